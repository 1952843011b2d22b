"""Byte counts of transfers of known size: real sockets, and real frames in a namespace."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from monitor_tools import program

from crosstrain.monitor.collector import NodeSampler
from crosstrain.monitor.network import InterfaceCounters, without_loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sock_diag and network namespaces are Linux's")

MEGABYTE = 1 << 20

RECEIVER = """
import socket
import struct
listener = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
count = 0
while part := connection.recv(1 << 20):
    count += len(part)
connection.close()
say(str(count))
"""

SENDER = """
import socket
import struct
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while (megabytes := int(say() or 0)):
    for _ in range(megabytes):
        connection.sendall(bytes(1 << 20))
connection.close()
say()
"""


def traffic_by_task(record) -> dict[str, tuple[int | None, int | None]]:
    return {task.task: (task.network_sent_bytes, task.network_received_bytes) for task in record.tasks}


def moved(record) -> int:
    """Bytes known to both sender and receiver; acknowledgements arrive a moment later."""
    tasks = traffic_by_task(record)
    return min(tasks["sender"][0], tasks["receiver"][1])


@pytest.fixture
def sampler():
    made = NodeSampler(0, isolated=False, interval_seconds=60, emit=lambda record: None)
    yield made
    made.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_tcp_bytes_include_closed_connections(sampler, address):
    """5 MB are seen in the open connection; 15 MB more and its close between two samples."""
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with program(RECEIVER, address) as receiver, program(SENDER, address, receiver.line()) as sender:
        sender.line()
        sampler.watch("sender", sender.pid)
        sampler.watch("receiver", receiver.pid)
        sender.go("5")
        sender.line()
        open_record = sample_until(sampler, lambda record: moved(record) >= 5 * MEGABYTE)
        sender.go("15")
        sender.line()
        sender.go("0")
        sender.line()
        assert receiver.line() == str(20 * MEGABYTE)
        closed_record = sample_until(sampler, lambda record: moved(record) >= 20 * MEGABYTE)
        sampler.sample()
        later_record = sampler.sample()
        sampler.unwatch("sender")
        sampler.unwatch("receiver")
    last_record = sampler.sample()
    assert open_record.network_source == "sockets"
    assert traffic_by_task(open_record)["sender"][0] == pytest.approx(5 * MEGABYTE, abs=2)  # SYN and FIN count as a byte each
    for record in (closed_record, later_record):
        assert traffic_by_task(record)["sender"] == (pytest.approx(20 * MEGABYTE, abs=2), pytest.approx(0, abs=2))
        assert traffic_by_task(record)["receiver"] == (pytest.approx(0, abs=2), pytest.approx(20 * MEGABYTE, abs=2))
    assert last_record.network_sent_bytes == pytest.approx(20 * MEGABYTE, abs=4)
    assert not open_record.problems + closed_record.problems + later_record.problems + last_record.problems


def sample_until(sampler, condition):
    """Sample until the condition holds; the notice of a close arrives a moment later."""
    deadline = time.monotonic() + 5
    while not condition(record := sampler.sample()):
        assert time.monotonic() < deadline, record
        time.sleep(0.01)
    return record


def test_other_processes_traffic_is_not_counted(sampler):
    with program(RECEIVER, "127.0.0.1") as receiver, program(SENDER, "127.0.0.1", receiver.line()) as sender, program("say()") as idle:
        sender.line()
        idle.line()
        sampler.watch("worker-0", idle.pid)
        sender.go("3")
        sender.line()
        record = sampler.sample()
    assert (record.network_sent_bytes, record.network_received_bytes) == (0, 0)
    assert traffic_by_task(record)["worker-0"] == (0, 0)


def test_child_s_connection_counts_for_its_task(sampler):
    code = RECEIVER.replace("say(str(count))", "").replace(
        "listener.accept()", "listener.accept()\nlistener.close()\nprint('accepted', flush=True)"
    )
    with program(f"if os.fork() == 0:\n{textwrap.indent(code, '    ')}\n    os._exit(0)\nos.wait()\nsay('over')", "127.0.0.1") as task:
        sampler.watch("worker-0", task.pid)
        with program(SENDER, "127.0.0.1", task.line()) as sender:
            sender.line()
            assert task.line() == "accepted"  # before that the connection belongs to no process
            sampler.sample()
            sender.go("2")
            sender.line()
            sender.go("0")
            assert task.line() == "over"
            record = sample_until(sampler, lambda record: record.network_received_bytes >= 2 * MEGABYTE)
    assert record.network_received_bytes == pytest.approx(2 * MEGABYTE, abs=2)


# Raw frames of known size over a veth pair, and 1 MB over lo, in a new namespace.
FRAMES = """
import json, os, socket, sys, threading
from pyroute2 import IPRoute
from crosstrain.monitor.collector import NodeSampler

if os.path.exists("/proc/sys/net/ipv6/conf/all/disable_ipv6"):
    open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w").write("1")  # no unasked-for neighbour discovery
with IPRoute() as routes:
    routes.link("add", ifname="left0", kind="veth", peer={"ifname": "right0"})
    for name in ("lo", "left0", "right0"):
        routes.link("set", index=routes.link_lookup(ifname=name)[0], state="up")

def send_frames(count, size):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as channel:
        channel.bind(("left0", 0))
        for _ in range(count):
            channel.send(b"\\xff" * 6 + b"\\x02" + bytes(5) + b"\\x88\\xb5" + bytes(size - 14))

def over_loopback(size):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        with receiver:
            threading.Thread(target=sender.sendall, args=(bytes(size),)).start()
            while size:
                size -= len(receiver.recv(1 << 16))

send_frames(50, 1000)  # before the monitor starts: must not count
sampler = NodeSampler(0, isolated=True, interval_seconds=60, emit=lambda record: None)
send_frames(1000, 1200)
over_loopback(1 << 20)
record = sampler.sample()
sampler.stop()
print(json.dumps({"source": record.network_source, "sent": record.network_sent_bytes, "received": record.network_received_bytes,
                  "interfaces": record.interfaces, "problems": record.problems}))
"""


def in_a_namespace(code):
    """Run a program in a new network namespace; return its printed JSON."""
    if not shutil.which("unshare"):
        pytest.skip("the program unshare is not installed")
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody make network namespaces")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*isolated, sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": paths})
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout)


def test_interface_bytes_are_exact_in_a_namespace():
    seen = in_a_namespace(FRAMES)
    assert seen["source"] == "interface"
    assert seen["problems"] == []
    assert seen["interfaces"]["left0"] == [1_200_000, 0]
    assert seen["interfaces"]["right0"] == [0, 1_200_000]
    assert (seen["sent"], seen["received"]) == (1_200_000, 1_200_000)
    assert seen["interfaces"]["lo"][0] == seen["interfaces"]["lo"][1] >= MEGABYTE


def test_interface_counters_start_at_creation():
    counters = InterfaceCounters()
    first = counters.read()
    assert "lo" in first
    assert without_loopback({"lo": (7, 7), "eth0": (5, 3), "ib0": (1, 2)}) == (6, 5)
    assert all(later >= earlier for name in first for later, earlier in zip(counters.read()[name], first[name], strict=True))


# In a new namespace, as the notices would reach all other socket monitors of this machine.
CLOSINGS = """
import json, socket, struct, time
from monitor_tools import program
from pyroute2 import IPRoute
from test_monitor_network import MEGABYTE, RECEIVER, SENDER
from crosstrain.monitor.collector import NodeSampler

with IPRoute() as routes:
    routes.link("set", index=routes.link_lookup(ifname="lo")[0], state="up")
sampler = NodeSampler(0, isolated=False, interval_seconds=60, emit=lambda record: None)
with program(RECEIVER, "127.0.0.1") as receiver, program(SENDER, "127.0.0.1", receiver.line()) as sender:
    sender.line()
    sampler.watch("sender", sender.pid)
    records = [sampler.sample()]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3000):
            with socket.create_connection(listener.getsockname()) as ours:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset: leaves no TIME_WAIT behind
                listener.accept()[0].close()
    sender.go("2")
    sender.line()
    drops, until = [0], time.monotonic() + 60  # the kernel writes the notices in the background
    while time.monotonic() < until and not 0 < drops[-1] == drops[max(0, len(drops) - 6)]:
        time.sleep(0.1)
        with open("/proc/net/netlink") as sockets:
            drops.append(sum(int(line.split()[8]) for line in sockets if line.split()[1] == "4"))
    records += [sampler.sample() for _ in range(2)]
sampler.stop()
print(json.dumps([{"problems": record.problems, "sent": record.network_sent_bytes} for record in records]))
"""


def test_overflow_of_closing_notices_is_reported():
    before, first, second = in_a_namespace(CLOSINGS)
    assert before["problems"] == []
    assert len(first["problems"]) == 1
    assert "more TCP connections closed" in first["problems"][0]
    assert second["problems"] == []
    assert second["sent"] == pytest.approx(2 * MEGABYTE, abs=2)
