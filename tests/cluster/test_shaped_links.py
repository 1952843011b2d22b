"""Frames on a shaped link: pieces as large as the link's bucket, not single frames."""

from __future__ import annotations

import subprocess
import sys

import pytest

from crosstrain.launch.virtual.namespaces import MissingCapabilityError
from crosstrain.launch.virtual.network import VirtualNetwork, possible

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(sys.platform != "linux", reason="virtual nodes need Linux")]

FRAME_BYTES = 1514
SINK = """
import socket
server = socket.create_server(({address!r}, 5000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
for line in open("/proc/net/dev").read().splitlines()[2:]:
    name, _, figures = line.partition(":")
    if name.strip() != "lo":
        print(*figures.split()[:2], flush=True)
"""
SENDER = """
import socket
with socket.create_connection(({address!r}, 5000)) as connection:
    connection.sendall(bytes({size}))
"""


@pytest.mark.parametrize("megabits", [100, 300, 500, 1000])
def test_pieces_fit_into_the_bucket(megabits):
    """A piece larger than the bucket would be split into frames at the receiver's cost."""
    if (lack := possible().missing.get("namespaces")) is not None:
        pytest.skip(str(lack))
    try:
        with VirtualNetwork(2, megabits * 1e6, lambda node: None) as network:
            python, address = [sys.executable, "-I", "-S", "-c"], network.addresses[1]
            sink = network.popen(1, [*python, SINK.format(address=address)], stdout=subprocess.PIPE, text=True)
            assert sink.stdout is not None
            assert sink.stdout.readline() == "ready\n"
            sender = network.popen(0, [*python, SENDER.format(address=address, size=megabits * 30_000)])
            assert sender.wait(timeout=60) == 0
            received, pieces = (int(figure) for figure in sink.communicate(timeout=60)[0].split())
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    assert received / pieces > 4 * FRAME_BYTES
