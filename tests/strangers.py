"""Unauthenticated connections: silent, dripping and sending garbage."""

import contextlib
import random
import socket
import threading
import time
from pathlib import Path


class Strangers:
    """Connect `count` times until the block ends, and reconnect after a refusal.

    A third each: silent, dripping, garbage.
    """

    def __init__(self, address, count, seed=0):
        self._address, self._count, self._random = address, count, random.Random(seed)
        self._over = threading.Event()
        self._connections = {}
        self.turned_away = 0
        self._thread = threading.Thread(target=self._attack)

    def __enter__(self):
        for place in range(self._count):
            self._connect(place)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _connect(self, place):
        with contextlib.suppress(OSError):  # nobody listens there any more
            self._connections[place] = connection = socket.create_connection(self._address, timeout=1.0)
            connection.setblocking(False)
            if place % 3 == 2:
                connection.sendall(self._random.randbytes(self._random.choice([40, 64, 5_000])))

    def _attack(self):
        while not self._over.wait(0.5):
            for place, connection in list(self._connections.items()):
                try:
                    while connection.recv(4096):
                        pass
                    gone = True
                except BlockingIOError:
                    gone = False
                except OSError:
                    gone = True
                if gone:
                    self.turned_away += 1
                    connection.close()
                    del self._connections[place]
                    self._connect(place)
                elif place % 3 == 1:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"x")


def dripping(address, until):
    """Send a byte every 0.3 s until the peer closes; return the seconds until then."""
    began = time.monotonic()
    with socket.create_connection(address) as connection:
        connection.settimeout(0.3)
        while time.monotonic() - began < until:
            try:
                connection.sendall(b"x")
                while connection.recv(4096):
                    pass
                break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - began


def listens(port):
    """Whether somebody listens there, without connecting."""
    return any(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in Path("/proc/net/tcp").read_text().splitlines()
    )
