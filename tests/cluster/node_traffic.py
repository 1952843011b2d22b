"""Programs that send and receive inside virtual nodes.

Usage: ``node_traffic.py sink PORT CONNECTIONS`` and ``… send HOST PORT BYTES SECONDS``
"""

import socket
import sys
import threading
import time


def sink(port: int, connections: int) -> None:
    """Print ``ready``, read that many connections to their ends, print the sum of bytes."""
    totals: list[int] = []

    def drain(connection: socket.socket) -> None:
        buffer, total = bytearray(1 << 20), 0
        with connection:
            while got := connection.recv_into(buffer):
                total += got
        totals.append(total)

    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        threads = [threading.Thread(target=drain, args=(server.accept()[0],)) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(sum(totals), flush=True)


def send(host: str, port: int, size: int, seconds: float) -> None:
    """Send `size` bytes (0: endless) for at most `seconds`; print how many were sent."""
    block, sent, end = bytes(1 << 16), 0, time.monotonic() + seconds
    with socket.create_connection((host, port), timeout=5) as connection:
        while time.monotonic() < end and (not size or sent < size):
            piece = block if not size else block[: size - sent]
            connection.sendall(piece)
            sent += len(piece)
    print(sent, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink(int(sys.argv[2]), int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
