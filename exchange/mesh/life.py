"""Signs of life between ranks: each gives every other one a byte a second, on connections of their own, while it computes.

So a rank that computes for long is told from one that is frozen or cut off, also where the system still answers for it. Only code that
holds the interpreter's lock for as long would be taken for frozen.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from ...core.liveness.silence import TICK_SECONDS, SilenceCounter

__all__ = ["LifeSigns"]

INTERVAL_SECONDS = 1.0
_SIGN = b"."
_MOST_BYTES = 4096


class LifeSigns:
    """Gives and hears signs of life in a thread of its own until `close`; `silent` is whom nothing has been heard of for the limit.

    A rank whose connection has ended counts as silent from then on: where it has left, its other connection tells so sooner.
    """

    def __init__(self, connections: Mapping[int, socket.socket], limit_seconds: float) -> None:
        self.silent: frozenset[int] = frozenset()
        self._connections = dict(connections)
        self.limit_seconds = limit_seconds
        self._wake, self._woken = socket.socketpair()
        for connection in self._connections.values():
            connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        heard = dict.fromkeys(self._connections, 0)
        counter = SilenceCounter(self.limit_seconds, time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            next_sign = 0.0
            while True:
                for key, _ in selector.select(TICK_SECONDS):
                    if key.data is None:
                        return
                    if _hears(self._connections[key.data]):
                        heard[key.data] += 1
                    else:
                        selector.unregister(key.fileobj)
                if (now := time.monotonic()) >= next_sign:
                    next_sign = now + INTERVAL_SECONDS
                    for peer in heard:
                        with contextlib.suppress(OSError):  # it reads nothing any more, or is gone: then it is not heard of either
                            self._connections[peer].send(_SIGN)
                self.silent = frozenset(counter.tick(now, heard))

    def close(self) -> None:
        """End the thread and the connections; a second call does nothing."""
        self._wake.close()
        self._thread.join()
        self._woken.close()
        for connection in self._connections.values():
            connection.close()


def _hears(connection: socket.socket) -> bool:
    """Return whether the other side still speaks: it said something, or nothing for now."""
    try:
        return bool(connection.recv(_MOST_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False
