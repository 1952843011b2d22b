"""Virtual nodes are separate, connected, shaped, limited and removed afterwards.

As root and as an ordinary user.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bridge_counters import bridge_counters
from processes import MARK, marked

from crosstrain.conformance.runs import run_job
from crosstrain.core.errors import UsageError
from crosstrain.launch.virtual.cpu_quota import Hierarchy
from crosstrain.launch.virtual.namespaces import MissingCapabilityError, NetworkLostError
from crosstrain.launch.virtual.network import VirtualNetwork, possible

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(sys.platform != "linux", reason="virtual nodes need Linux")]

PYTHON = [sys.executable, "-I", "-S"]
TRAFFIC = [*PYTHON, str(Path(__file__).with_name("node_traffic.py"))]
PORT = 5000


def unlimited(_: int) -> None:
    return None


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if (lack := possible().missing.get("namespaces")) is not None:
        pytest.skip(str(lack))


@pytest.fixture(scope="module")
def groups() -> Path:
    """The folder in which CPU groups are made."""
    try:
        return Hierarchy.find().base
    except MissingCapabilityError as error:
        pytest.skip(str(error))


@pytest.fixture
def three() -> Iterator[VirtualNetwork]:
    with VirtualNetwork(3, None, unlimited) as network:
        yield network


def output(network: VirtualNetwork, node: int, program: str) -> str:
    """Run a Python program in a node; return what it prints."""
    process = network.popen(node, [*PYTHON, "-c", program], stdout=subprocess.PIPE, text=True)
    written, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return str(written)


def start_sink(network: VirtualNetwork, node: int, connections: int) -> subprocess.Popen[str]:
    sink = network.popen(node, [*TRAFFIC, "sink", str(PORT), str(connections)], stdout=subprocess.PIPE, text=True)
    assert sink.stdout is not None
    assert sink.stdout.readline() == "ready\n"
    return sink


def start_sender(network: VirtualNetwork, node: int, to: int, size: int, seconds: float) -> subprocess.Popen[str]:
    argv = [*TRAFFIC, "send", network.addresses[to], str(PORT), str(size), str(seconds)]
    return network.popen(node, argv, stdout=subprocess.PIPE, text=True)


def test_every_node_reaches_every_other(three: VirtualNetwork) -> None:
    for receiver in range(3):
        sink = start_sink(three, receiver, 2)
        senders = [start_sender(three, node, receiver, 300_000, 20.0) for node in range(3) if node != receiver]
        assert [sender.communicate(timeout=30)[0] for sender in senders] == ["300000\n", "300000\n"]
        assert sink.communicate(timeout=30)[0] == "600000\n"


def test_a_node_has_one_address_and_no_way_out(three: VirtualNetwork) -> None:
    names = "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    assert output(three, 2, names).split() == [three.interface, "lo"]
    routes = [line.split()[:2] for line in output(three, 2, "print(open('/proc/net/route').read())").splitlines()[1:] if line]
    assert routes == [[three.interface, "00004D0A"]]  # 10.77.0.0, and no default route
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {server.getsockname()[1]})))"
        assert output(three, 0, attempt).strip() == "111"  # refused: its loopback is not ours


def test_both_ends_of_a_cable_count_the_same(three: VirtualNetwork) -> None:
    sink = start_sink(three, 0, 1)
    start_sender(three, 1, 0, 5_000_000, 20.0).communicate(timeout=30)
    sink.communicate(timeout=30)
    peers = bridge_counters(three)
    for node, (from_node, to_node) in enumerate(peers):
        line = next(line for line in output(three, node, "print(open('/proc/net/dev').read())").splitlines() if three.interface in line)
        columns = line.split()
        assert (int(columns[1]), int(columns[9])) == (to_node, from_node)
    assert 5_000_000 < peers[1][0] < 5_500_000  # the payload and its headers
    assert 0.98 < peers[0][1] / peers[1][0] < 1.02
    assert sum(peers[2]) < 1000


@pytest.mark.thorough
@pytest.mark.parametrize(("senders", "receiver"), [([1, 2], 0), ([0], 1)], ids=["two to one", "one to one"])
def test_bandwidth_holds_in_both_directions(senders: list[int], receiver: int) -> None:
    limit = 100e6
    with VirtualNetwork(3, limit, unlimited) as network:
        sink = start_sink(network, receiver, len(senders))
        running = [start_sender(network, node, receiver, 0, 2.3) for node in senders]
        time.sleep(0.6)
        readings = []
        for _ in range(4):
            before = time.perf_counter()
            readings.append((before, bridge_counters(network), time.perf_counter()))
            time.sleep(0.4)
        for process in [*running, sink]:
            process.communicate(timeout=30)
    into = rates(readings, lambda counters: counters[receiver][1])
    out_of = rates(readings, lambda counters: sum(counters[node][0] for node in senders))
    assert max(into) <= 1.05 * limit
    assert max(out_of) <= 1.05 * limit
    assert max(into) >= 0.85 * limit  # the best of them: other programs may have the processors for a while


def rates(readings: list[tuple[float, list[tuple[int, int]], float]], of: Callable[[list[tuple[int, int]]], int]) -> list[float]:
    """Return the bits per second between consecutive readings, within their uncertain times."""
    return [(of(after) - of(before)) * 8 / (end - start) for (start, before, _), (_, after, end) in itertools.pairwise(readings)]


def test_cpu_quota_holds_from_the_first_instruction(groups: Path) -> None:
    """A low quota is reached on a busy machine too; usage before joining the group is small."""
    cores = 0.1
    burn = "import time\nend = time.monotonic() + 3.0\nwhile time.monotonic() < end: pass"
    with VirtualNetwork(2, None, lambda node: [cores, None][node]) as network:
        assert (network.cores(0), network.cores(1)) == (cores, None)
        where = output(network, 0, "import os; print(open('/proc/self/cgroup').read())")
        (group,) = groups.glob(f"crosstrain-*-{os.getpid()}-*-node0")
        assert group.name in where
        assert group.name not in output(network, 1, "print(open('/proc/self/cgroup').read())")
        start = time.perf_counter()
        process = network.popen(0, [*PYTHON, "-c", burn])
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        throttled = re.search(r"nr_throttled (\d+)", (group / "cpu.stat").read_text())
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime <= 1.1 * cores * seconds + 0.02  # it enters its group before its first instruction
    assert throttled is not None
    assert int(throttled[1]) > 5
    assert not group.exists()


def test_virtual_node_process_is_the_program(three: VirtualNetwork, tmp_path: Path) -> None:
    program = "import os, signal, sys; print(os.getpid(), os.getppid(), os.getcwd(), os.environ['MARK'], len(os.listdir('/proc/self/fd')))"
    process = three.popen(0, [*PYTHON, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={"MARK": "seen"})
    written, _ = process.communicate(timeout=30)
    assert written.split() == [str(process.pid), str(os.getpid()), str(tmp_path), "seen", "4"]  # 0, 1, 2 and the listing's own
    ended_by_pipe = three.popen(0, ["sh", "-c", "kill -PIPE $$"])
    assert ended_by_pipe.wait(timeout=30) == -signal.SIGPIPE  # not ignored, as Python would leave it


def test_virtual_node_invalid_program_is_reported(three: VirtualNetwork) -> None:
    process = three.popen(1, ["no-such-program"], stderr=subprocess.PIPE, text=True)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 127
    assert "no-such-program" in complaint
    with pytest.raises(TypeError, match="shell"):
        three.popen(1, ["true"], shell=True)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Mark all processes of this test: a namespace's number may be reused by another test."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def test_virtual_network_close_removes_everything(mark: str) -> None:
    network = VirtualNetwork(1, None, unlimited)
    network.start()
    ended = network.popen(0, ["true"])
    ended.wait(timeout=30)
    settled = network.popen(0, ["sh", "-c", "(sleep 600 &); echo started; exec sleep 600"], stdout=subprocess.PIPE, start_new_session=True)
    assert settled.stdout is not None
    with settled.stdout:
        settled.stdout.readline()
    entering = network.popen(0, ["sleep", "600"], start_new_session=True)
    holder = network.holder_pid
    assert holder in marked(mark)
    network.close()
    network.close()
    assert (ended.returncode, settled.wait(timeout=5), entering.wait(timeout=5)) == (0, -signal.SIGKILL, -signal.SIGKILL)
    assert marked(mark) == []
    assert not Path(f"/proc/{holder}").exists()
    with pytest.raises(RuntimeError, match="not running"):
        network.popen(0, ["true"])


def test_killed_holder_is_noticed_and_nodes_survive(groups: Path) -> None:
    with VirtualNetwork(2, None, lambda _: 1.0) as network, VirtualNetwork(2, None, lambda _: 1.0) as another:
        os.kill(network.holder_pid, signal.SIGKILL)
        sink = start_sink(network, 0, 1)
        assert start_sender(network, 1, 0, 1000, 20.0).communicate(timeout=30)[0] == "1000\n"
        assert sink.communicate(timeout=30)[0] == "1000\n"
        with pytest.raises(NetworkLostError, match="holder"):
            network.check()
        another.check()
        assert len(list(groups.glob(f"crosstrain-*-{os.getpid()}-*"))) == 4
    assert list(groups.glob(f"crosstrain-*-{os.getpid()}-*")) == []


OWNER = """
import json, os, subprocess, sys, time
from crosstrain.launch.virtual.network import VirtualNetwork
network = VirtualNetwork(2, 1e9, lambda node: eval(sys.argv[1]))
network.start()
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(600)  # holds our end of the holder's socket
programs = [network.popen(node, ["sleep", "600"], start_new_session=True) for node in range(2)] if sys.argv[2] == "leave" else []
network.popen(0, ["true"]).wait()
print(json.dumps({"pids": [program.pid for program in programs], "holder": network.holder_pid}), flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_owner(cores: str, what: str, seconds: float) -> tuple[dict[str, Any], float, int]:
    """Start an owner, kill it and wait for the end of its holder and programs.

    Return its output, the duration and its id.
    """
    owner = subprocess.Popen([sys.executable, "-c", OWNER, cores, what], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    with owner.stdout:
        description = json.loads(owner.stdout.readline())
        assert description["holder"] in marked(os.environ[MARK])
        owner.kill()
        start = time.monotonic()
        owner.wait()
    while any(alive(pid) for pid in [*description["pids"], description["holder"]]) and time.monotonic() < start + seconds:
        time.sleep(0.05)
    return description, time.monotonic() - start, owner.pid


@pytest.mark.thorough
@pytest.mark.faults
def test_nothing_remains_after_the_owner_is_killed(groups: Path, mark: str) -> None:
    description, seconds, owner = kill_owner("1.0", "leave", 12.0)
    assert seconds < 10.0
    assert len(description["pids"]) == 2
    assert marked(mark) == []
    assert list(groups.glob(f"crosstrain-*-{owner}-*")) == []


@pytest.mark.faults
def test_holder_notices_end_while_fork_has_its_socket() -> None:
    description, seconds, owner = kill_owner("None", "fork", 5.0)
    (fork,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != owner and os_session(pid) == owner]
    os.kill(fork, signal.SIGKILL)
    assert seconds < 2.0
    assert not alive(description["holder"])


def os_session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def test_later_run_removes_leftovers_of_killed_holder(groups: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = groups / f"crosstrain-{os.stat('/proc/self/ns/pid').st_ino}-{ended.pid}-1-2-node0"
    foreign = groups / f"crosstrain-1-{ended.pid}-1-2-node0"
    stale.mkdir()
    foreign.mkdir()
    try:
        with VirtualNetwork(1, None, lambda _: 1.0):
            assert not stale.exists()
            assert foreign.exists()  # its owner lives in another process namespace: not ours to judge
    finally:
        foreign.rmdir()


ORDINARY_USER = """
import json, os, subprocess, sys
from bridge_counters import bridge_counters
from crosstrain.launch.virtual.network import MissingCapabilityError
from crosstrain.launch.virtual.network import VirtualNetwork, possible
able = possible()
result = {"rootless": able.rootless, "lacks": {capability: str(lack) for capability, lack in able.missing.items()}}
if "namespaces" not in able.missing:
    with VirtualNetwork(3, 1e9, lambda node: None) as network:
        sink = network.popen(0, [sys.executable, sys.argv[1], "sink", "5000", "2"], stdout=subprocess.PIPE, text=True)
        sink.stdout.readline()
        send = [sys.executable, sys.argv[1], "send", network.addresses[0], "5000", "1000000", "20"]
        senders = [network.popen(node, send, stdout=subprocess.DEVNULL) for node in (1, 2)]
        result["codes"] = [sender.wait(timeout=30) for sender in senders]
        result["received"] = int(sink.communicate(timeout=30)[0])
        status = network.popen(0, ["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True).communicate()[0]
        result["status"] = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("Uid", "CapEff"))}
        result["counted"] = bridge_counters(network)
    try:
        VirtualNetwork(1, None, lambda node: 0.5).start()
    except MissingCapabilityError as lack:
        result["lack"] = [lack.exit_code, lack.capability, str(lack)]
print(json.dumps(result))
"""


def interpreter_for(user: list[str]) -> str | None:
    """Return a Python of at least 3.11 that `user` can run; ours may be in a private home."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        if candidate and subprocess.run([*user, candidate, "-I", "-S", "-c", check], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.fixture
def open_folder(repository: Path) -> Iterator[Path]:
    """A folder that every user can read, with what a run of virtual nodes imports."""
    with tempfile.TemporaryDirectory(prefix="crosstrain-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for package in ("core", "launch", "monitor"):
            shutil.copytree(repository / package, folder / "crosstrain" / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(
            Path(sysconfig.get_paths()["purelib"], "pyroute2"), folder / "pyroute2", ignore=shutil.ignore_patterns("__pycache__")
        )
        for script in (TRAFFIC[-1], Path(__file__).with_name("bridge_counters.py")):
            shutil.copy(script, folder)
        yield folder


def test_an_ordinary_user_can_have_virtual_nodes(open_folder: Path) -> None:
    # setpriv itself still has root's rights when it starts a program; env does not.
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env"] if os.geteuid() == 0 else []
    if user and not shutil.which("setpriv"):
        pytest.skip("setpriv (util-linux) is needed to become an ordinary user")
    python = interpreter_for(user)
    if python is None:
        pytest.skip("no Python 3.11 that the user nobody can run")
    environment = {name: os.environ[name] for name in ("PATH", MARK)}
    environment |= {"PYTHONPATH": str(open_folder), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [*user, python, "-c", ORDINARY_USER, str(open_folder / "node_traffic.py")]
    done = subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=True)
    description = json.loads(done.stdout)
    if "namespaces" in description["lacks"]:
        pytest.skip(f"user namespaces are off here: {description['lacks']['namespaces']}")
    assert description["rootless"]
    assert "bandwidth" not in description["lacks"]
    assert description["codes"] == [0, 0]
    assert description["received"] == 2_000_000
    assert description["status"] == {"Uid": str(os.geteuid() or 65534), "CapEff": "0000000000000000"}  # it cannot undo its own limits
    assert description["counted"][0][1] > 2_000_000
    if "cpu_quota" in description["lacks"]:
        assert description["lack"][:2] == [2, "cpu_quota"]
        assert "cores-per-node" in description["lack"][2]


def test_virtual_network_impossible_limits_are_refused() -> None:
    with pytest.raises(UsageError, match="nodes: got '0'"):
        VirtualNetwork(0, None, unlimited)
    with pytest.raises(UsageError, match="bandwidth"):
        VirtualNetwork(1, 1e12, unlimited)
    with pytest.raises(UsageError, match="cores_per_node"):
        VirtualNetwork(1, None, lambda _: 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "mode"), [("torch", "sync"), pytest.param("tf", "async", marks=pytest.mark.slow)])
def test_nodes_with_different_numbers_of_workers(tmp_path, backend, mode):
    done = run_job(tmp_path, backend=backend, mode=mode, nodes=2, procs_per_node="1,2", steps=30, eval_every="end", calibrate=True)
    assert [worker["node"] for worker in done.summary["time_shares"]["workers"]] == [0, 1, 1]
    assert done.summary["workers"] == 3
    assert done.summary["updates_applied"] == 30
    job = json.loads((done.path / "job.json").read_text())
    assert job["procs_per_node"] == [1, 2]
    assert [node["cpu_seconds"] > 0 for node in done.summary["per_node"]] == [True, True]
