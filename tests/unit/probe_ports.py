"""The ports that a probe's answers hold: a probe keeps them until its process ends, and a test answers in its own."""

import socket

from crosstrain.launch.preflight import probe


def release_ports():
    """Listen on nothing any more, and give all ports back."""
    for server in probe._ports:
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        server.close()
    for block in probe._blocks:
        block.release()
    probe._ports.clear()
    probe._blocks.clear()
