"""Plain TCP sockets: ping-pong of two ranks, and throughput of all ranks together.

Each rank is connected with the one after it and the one before it, and while it sends to the one it hears the other.
"""

from __future__ import annotations

import socket
import threading
import time

from place import Place, arguments, read_place, report

PING_BYTES, PINGS, SHORT_PINGS = 64, 1000, 50
BUFFER_BYTES = 256 << 10
"""Stays in a core's cache: what is measured is the network and the system's copies."""

WINDOW_SECONDS = 1.0


def join(place: Place) -> tuple[socket.socket, socket.socket]:
    """Return the connections to the next rank and to the one before."""
    following = (place.rank + 1) % place.ranks
    with socket.create_server((place.addresses[place.rank], place.ports[place.rank])) as listening:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                to_next = socket.create_connection((place.addresses[following], place.ports[following]))
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        from_previous, _ = listening.accept()
    for connection in (to_next, from_previous):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return to_next, from_previous


def ping_pong(place: Place, to_next: socket.socket, from_previous: socket.socket, tries: int) -> list[float]:
    """Return half the mean round trip of a short message for each try; nothing on other ranks."""
    connection = {0: to_next, 1: from_previous}.get(place.rank)
    if connection is None:
        return []
    message, into = bytes(PING_BYTES), bytearray(PING_BYTES)
    seconds = []
    for pings in (SHORT_PINGS, *[PINGS] * tries):
        began = time.perf_counter()
        for _ in range(pings):
            if place.rank == 0:
                connection.sendall(message)
            connection.recv_into(into, PING_BYTES, socket.MSG_WAITALL)
            if place.rank == 1:
                connection.sendall(message)
        seconds.append((time.perf_counter() - began) / pings / 2)
    return seconds[1:]


def stream(to_next: socket.socket, from_previous: socket.socket, tries: int) -> list[float]:
    """Return for each try the bytes per second received while sending to the next rank."""
    stop = threading.Event()

    def send() -> None:
        buffer = bytes(BUFFER_BYTES)
        while not stop.is_set():
            to_next.sendall(buffer)
        to_next.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    into = bytearray(BUFFER_BYTES)
    sender.start()
    rates = []
    for _ in range(tries + 1):
        arrived, began = 0, time.perf_counter()
        while time.perf_counter() - began < WINDOW_SECONDS:
            arrived += from_previous.recv_into(into)
        rates.append(arrived / (time.perf_counter() - began))
    stop.set()
    while from_previous.recv_into(into):
        pass
    sender.join()
    return rates[1:]


def main() -> None:
    """Measure both."""
    options = arguments().parse_args()
    place = read_place(options)
    to_next, from_previous = join(place)
    latencies = ping_pong(place, to_next, from_previous, options.tries)
    if place.rank == 0:
        to_next.sendall(b"g")  # the word goes round: the first two ranks are done
    if from_previous.recv(1) and place.rank:
        to_next.sendall(b"g")
    rates = stream(to_next, from_previous, options.tries)
    report(place, {"latency_seconds": latencies, "bytes_per_second": rates})


main()
