"""Checks of hosts before a run: each problem is named with its host."""

import json
import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from probe_ports import release_ports

from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.engine.protocol.messages import PROTOCOL, Stream
from crosstrain.engine.protocol.probe_messages import QUESTIONS, Connect, Data, DataDigest, Describe, Listen, Model, ModelDigest, Problem
from crosstrain.launch.launchers.host_list import refuse
from crosstrain.launch.node.scratch import FIRST_PORT, LAST_PORT
from crosstrain.launch.preflight.findings import Here, findings, table
from crosstrain.launch.preflight.interview import HostReport, Probe, interview, peers_of
from crosstrain.launch.preflight.model_source import model_source, package_path
from crosstrain.launch.preflight.probe import answer
from crosstrain.monitor.host import PACKAGES, installed_versions

HERE = Here({"crosstrain": "1.0"}, "data", "model", Path("/texts"))


@pytest.fixture(autouse=True)
def _no_ports_held():
    yield
    release_ports()


def report(name="node0", **changes):
    """Return the report of a sound host, with changes."""
    packages = {"crosstrain": "1.0", "numpy": "2", "torch": "2.5", "tensorflow": None, **changes.pop("packages", {})}
    interfaces = {"eth0": {"addresses": ["10.0.0.1"]}}
    host = {"packages": packages, "python": "3.11.7", "cores_available": 8.0, "memory_total_bytes": 2**34, "memory_limit_bytes": None}
    host |= {"interfaces": interfaces} | changes.pop("host", {})
    described = {"protocol": PROTOCOL, "identity": {"boot": name, "network": "n"}, "host": host, "address": "10.0.0.1"}
    described |= changes.pop("described", {})
    model = ModelDigest("model", "networks")
    host_report = HostReport(name, None, described, 0.001, 0.002, DataDigest("data"), model, (1, 2), 2, {})
    for key, value in changes.items():
        setattr(host_report, key, value)
    return host_report


def states(reports, module="torch"):
    return {
        (finding.host, finding.what): finding.state
        for finding in findings(reports, HERE, module, started_by="srun")
        if finding.state != "ok"
    }


def test_sound_hosts_have_no_problems():
    reports = [report(f"node{number}") for number in range(3)]
    assert states(reports) == {}
    all_findings = findings(reports, HERE, "torch", started_by="srun")
    assert [(finding.host, finding.what) for finding in all_findings[:7]] == [
        ("node0", what) for what in ("crosstrain", "Python", "torch", "machine", "clock", "data", "model")
    ]
    refuse(all_findings)


@pytest.mark.parametrize(
    ("changes", "what", "state"),
    [
        ({"problem": "is out of reach"}, "srun", "bad"),
        ({"described": {"protocol": PROTOCOL + 1, "host": {}}}, "crosstrain", "bad"),
        ({"packages": {"crosstrain": "1.1"}}, "crosstrain", "bad"),
        ({"packages": {"torch": None}}, "torch", "bad"),
        ({"packages": {"torch": "2.6"}}, "torch", "odd"),
        ({"host": {"python": "3.12.1"}}, "Python", "odd"),
        ({"host": {"memory_limit_bytes": 2**29}}, "machine", "odd"),
        ({"problem": "does not answer within 24 of 30 s", "silent": True}, "srun", "bad"),
        ({"described": {"identity": {"boot": "node0", "network": "n"}}}, "machine", "odd"),
        ({"described": {"identity": {"boot": "node0", "network": "another"}}}, "machine", "odd"),
        ({"ahead_seconds": -7.0}, "clock", "odd"),
        ({"data": Problem("no folder")}, "data", "bad"),
        ({"data": DataDigest("other")}, "data", "bad"),
        ({"model": Problem("no such module")}, "model", "bad"),
        ({"model": ModelDigest("other", "networks")}, "model", "bad"),
        ({"described": {"address": None}}, "network", "bad"),
        ({"unreachable": {"node0": "no answer within 3 s"}}, "network", "bad"),
        ({"unreachable": None}, "network", "odd"),
        ({"tried": 0}, "network", "odd"),
    ],
)
def test_problem_is_named_with_its_host(changes, what, state):
    reports = [report("node0"), report("node1", **changes), report("node2")]
    problem_states = states(reports)
    shared = {"node0"} if changes.get("described", {}).get("identity") else set()  # both are one machine
    assert problem_states == {(host, what): state for host in {"node1"} | shared}
    if state == "bad":
        with pytest.raises(
            RunFailedError if "problem" in changes else UsageError, match=r"^1 of 3 hosts cannot take part in this run:\nFAIL  node1  "
        ):
            refuse(findings(reports, HERE, "torch", started_by="srun"))


def test_gpus_are_checked_per_answering_host():
    """Workers are those of each host, also if another host does not answer."""

    def with_gpus(count):
        listed = [{"visible_as": str(finding), "uuid": None, "gpu": finding} for finding in range(count)]
        return {"gpus": [{"name": "A", "memory_total_bytes": 2**30, "uuid": None}] * count, "visible_gpus": listed}

    reports = [report("node0", problem="is out of reach"), report("node1", host=with_gpus(1)), report("node2", host=with_gpus(2))]
    all_findings = findings(reports, HERE, "torch", "gpu", started_by="srun", workers=[1, 2, 2])
    assert [(finding.host, finding.state, finding.found) for finding in all_findings if finding.what == "GPUs"] == [
        ("node1", "bad", "2 workers, 1 GPU (1 × A (1.0 GiB))"),
        ("node2", "ok", "2 × A (1.0 GiB)"),
    ]


def test_missing_data_can_be_copied():
    problems = findings([report("node 1", data=Problem("no folder"))], HERE, "torch", started_by="srun")
    assert "→ rsync -a --mkpath /texts/ 'node 1:/texts/'" in table(problems)


@pytest.mark.parametrize("answered", [Problem("no such module"), ModelDigest("x", "own")])
def test_missing_model_can_be_copied(tmp_path, answered):
    package, module = tmp_path / "own", tmp_path / "own.py"
    package.mkdir()
    module.touch()
    for place, end in ((package, "/"), (module, "")):
        here = Here({"crosstrain": "1.0"}, "data", "model", None, place)
        problems = findings([report("node1", model=answered)], here, "torch", started_by="ssh")
        assert f"→ rsync -a --mkpath {place}{end} node1:{place}{end} (and install there what it imports)" in table(problems)


def test_more_workers_than_cores_are_reported():
    """As where a port was meant: node1:22."""
    all_findings = findings([report("node0"), report("node1")], HERE, None, started_by="ssh", workers=[8, 22])
    machines = [(finding.host, finding.state, finding.found) for finding in all_findings if finding.what == "machine"]
    assert machines == [
        ("node0", "ok", "8 cores, 16.0 GiB"),
        ("node1", "odd", "8 cores, 16.0 GiB, which 22 workers share (HOST:22 is a number of processes)"),
    ]


@given(st.integers(1, 200))
def test_probe_pairs_cover_every_host(count):
    hosts = [f"n{number}" for number in range(count)]
    tried = {host: peers_of(host, hosts) for host in hosts}
    assert all(host not in peers and len(set(peers)) == len(peers) for host, peers in tried.items())
    assert all(len(peers) <= max(15, count.bit_length()) for peers in tried.values())
    reached, edge = {hosts[0]}, [hosts[0]]
    while edge:
        edge = [peer for host in edge for peer in tried[host] if peer not in reached and not reached.add(peer)]
    assert reached == set(hosts)


def probe(files, name, ports=None, *, answers=True):
    """Run a probe behind a socket in this process; it may report other ports or stay silent."""
    ends = [files.enter_context(end) for end in socket.socketpair()]
    ours, theirs = (Stream(end.makefile("rb"), end.makefile("wb")) for end in ends)
    instead = {"describe": {"address": "127.0.0.1"}, "listen": {} if ports is None else {"ports": ports}}

    def serve():
        while (question := theirs.receive()) is not None:
            theirs.send(structs.replace(answer(QUESTIONS.parse(question)), **instead.get(question.kind, {})))

    for stream in (ours, theirs):
        files.callback(stream.close)
    if answers:
        thread = threading.Thread(target=serve)
        thread.start()
        files.callback(thread.join)
    files.callback(ends[0].shutdown, socket.SHUT_RDWR)
    return Probe(name, ours, lambda: "has ended")


def test_hosts_probe_each_other_despite_a_slow_one():
    """One host does not answer, and one reports a port without a listener."""
    with ExitStack() as files:
        probes = [probe(files, "node0"), probe(files, "node1", [1, 2]), probe(files, "node2", answers=False)]
        reports = interview(probes, "torch", None, 6.0)
        late = "does not answer within 4.5 of 6 s (the rest is for the hosts to try each other)"
        assert [host_report.problem for host_report in reports] == [None, None, late]
        silent = findings(reports, HERE, "", started_by="ssh")[-1]
        assert silent.remedy.startswith("see whether `ssh node2 true` ends at once here; if so, give the hosts more time: --timeout of")
        assert [host_report.unreachable for host_report in reports] == [{"node1": "Connection refused"}, {}, None]
        problems = [host_report for host_report in findings(reports, HERE, "", started_by="ssh") if host_report.what == "network"]
    networks = {host_report.host: (host_report.state, host_report.found.partition("; ")[2]) for host_report in problems}
    assert networks["node0"] == ("bad", "does not reach node1: Connection refused")
    assert networks["node1"] == ("odd", "reaches 1 of 2 others, as no more could be tried")


def test_untested_host_is_not_reported_as_reachable():
    def network_findings(*reports):
        return [
            finding.found.partition("; ")[2] for finding in findings(reports, HERE, "torch", started_by="ssh") if finding.what == "network"
        ]

    assert network_findings(report()) == [""]
    assert network_findings(report(tried=1), report("node1", unreachable=None)) == [
        "reaches the others",
        "did not try the others within the time",
    ]
    assert network_findings(report(tried=0), report("node1", problem="is out of reach")) == [
        "reaches nobody yet, as no more could be tried"
    ]


def test_probe_answers_or_gives_a_reason():
    described = answer(Describe("torch"))
    assert described.kind == "found"
    assert json.loads(json.dumps(described.host))["packages"]["crosstrain"] == installed_versions(PACKAGES)["crosstrain"]
    assert isinstance(answer(Data("digits", None)), DataDigest)
    refused = answer(Data("digits", "/no/such/folder"))
    assert refused.kind == "problem"
    assert "/no/such/folder" in refused.text
    assert answer(Model("no.such_model", "torch")).kind == "problem"
    ports = answer(Listen()).ports
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert FIRST_PORT <= ports[0] <= LAST_PORT  # ports of tasks; gloo takes others
    assert first <= ports[1] <= last
    problems = answer(Connect([("127.0.0.1", port) for port in (*ports, 1)])).problems
    assert problems[:2] == [None, None]
    assert "refused" in problems[2]


def test_unreachable_port_is_named():
    with ExitStack() as files:
        free, open_port = socket.create_server(("127.0.0.1", 0)), files.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = free.getsockname()[1]
        free.close()
        probes = [probe(files, "node0"), probe(files, "node1", ports=[closed, open_port.getsockname()[1]])]
        reports = interview(probes, "torch", None, 6.0)
        assert [host_report.unreachable for host_report in reports] == [{"node1": f"port {closed}: Connection refused"}, {}]


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """Install a package of models for this process and its children; its forward needs no torch."""
    package = tmp_path / "networks_of_a_test"
    (package / "own").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "layers.py").write_text("WIDTH = 3\n")
    (package / "own" / "__init__.py").write_text("def build(data):\n    raise NotImplementedError\n")
    (package / "own" / "torch.py").write_text("from ..layers import WIDTH\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield package
    for module in [module for module in sys.modules if module.startswith("networks_of_a_test")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("own/torch.py", "print('noise')\n", None),
        ("own/torch.py", "import no_such_package_of_a_test\n", "ModuleNotFoundError: No module named 'no_such_package_of_a_test'"),
        ("own/__init__.py", "1 / 0\n", "ZeroDivisionError"),
        ("own/torch.py", "import sys\nsys.exit(0)\n", "could not be loaded from 'networks_of_a_test.own.torch': SystemExit: 0"),
        ("own/torch.py", "import os\nos._exit(0)\n", "ended with code 0"),
        ("own/torch.py", "import os\nos.kill(os.getpid(), 9)\n", "was killed by SIGKILL"),
    ],
)
def test_model_is_imported_on_the_training_host(networks, file, text, problem):
    """With its forward function on the backend, and its imports."""
    (networks / file).write_text(text)
    reply = answer(Model("networks_of_a_test.own?size=3", "torch"))
    assert "networks_of_a_test.own" not in sys.modules
    if problem is None:
        assert (reply.kind, reply.package) == ("found", "networks_of_a_test")
    else:
        assert reply.kind == "problem"
        assert problem in reply.text


def test_model_source_includes_imported_siblings(networks, monkeypatch):
    """It may import them; files that cannot be imported do not count."""
    first = model_source("networks_of_a_test.own")
    assert first.package == "networks_of_a_test"
    assert package_path(first.package) == networks
    (networks / ".#layers.py").symlink_to("nowhere")
    (networks / ".venv").mkdir()
    (networks / ".venv" / "other.py").touch()
    assert model_source("networks_of_a_test.own") == first
    (networks / "layers.py").write_text("WIDTH = 4\n")
    assert model_source("networks_of_a_test.own").digest != first.digest
    assert model_source("networks_of_a_test.layers").package == "networks_of_a_test"


@pytest.mark.parametrize(("limit", "most"), [("MAX_ENTRIES", 4), ("MAX_BYTES", 100)])
def test_large_package_counts_the_model_s_part(networks, monkeypatch, limit, most):
    monkeypatch.setattr(f"crosstrain.launch.preflight.model_source.{limit}", most)
    (networks / "large.py").write_text("#" * 200)
    (networks / "data").mkdir()
    first = model_source("networks_of_a_test.own")
    assert first.package == "networks_of_a_test.own"
    (networks / "own" / "torch.py").write_text("")
    assert model_source("networks_of_a_test.own").digest != first.digest
    (networks / "own" / "large.py").write_text("#" * 200)
    (networks / "own" / "more.py").touch()
    (networks / "own" / "still_more.py").touch()
    with pytest.raises(UsageError, match="is it the right package"):
        model_source("networks_of_a_test.own")


def test_model_source_covers_all_files(tmp_path, monkeypatch):
    package = tmp_path / "models_of_a_test" / "deep"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "torch.py"):
        file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "models_of_a_test.deep"
    try:
        first = model_source(f"{name}?size=3").digest
        (package / "torch.py").write_text("x = 1\n")
        second = model_source(name).digest
        (package / "torch.py").rename(package / "tf.py")
        third = model_source(name).digest
        assert len({first, second, third}) == 3
        assert model_source("logreg") is None
    finally:
        for module in [module for module in sys.modules if module.startswith("models_of_a_test")]:
            del sys.modules[module]
