"""CPU that other programs took from a run: real processes, and figures by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor_tools import program
from run_samples import CLOCK, sample

from crosstrain.launch.virtual.cpu_quota import CpuGroups, Hierarchy
from crosstrain.launch.virtual.namespaces import MissingCapabilityError
from crosstrain.monitor.cpu_limits import QuotaCounter, WaitCounter, cpu_quota_cores, read_machine_cpu_seconds, read_pressure_seconds
from crosstrain.records.node_usage import CpuUse, lost_cpu, mean_over_segments, per_node

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counters of the Linux kernel")

# Two threads compute while the main thread waits for a line, all on the given core.

THREADS = """
import hashlib, threading
os.sched_setaffinity(0, {int(sys.argv[1])})

def compute():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000)

for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
say()
"""


@on_linux
def test_all_threads_count_and_a_sleeping_one_does_not_wait():
    core = str(min(os.sched_getaffinity(0)))
    with program(THREADS, core) as busy, program("say()") as idle:
        for process in (busy, idle):
            process.line()
        counters = {process.pid: WaitCounter() for process in (busy, idle)}
        before, began = {pid: counter.read([pid]) for pid, counter in counters.items()}, time.monotonic()
        time.sleep(1.0)
        shares = {pid: (counter.read([pid]) - before[pid]) / (time.monotonic() - began) for pid, counter in counters.items()}
    assert shares[idle.pid] < 0.05
    assert 0.8 < shares[busy.pid] < 2.0  # one at any time; both if other programs use the core too


@on_linux
def test_two_processes_on_one_core_wait_half_the_time():
    code = "os.sched_setaffinity(0, {int(sys.argv[1])})\nsay()\nburn(60)"
    core = str(max(os.sched_getaffinity(0)))
    with program(code, core) as first, program(code, core) as second:
        for process in (first, second):
            process.line()
        for process in (first, second):
            process.go()
        counter = WaitCounter()
        pids = [first.pid, second.pid]
        before, began = counter.read(pids), time.monotonic()
        time.sleep(1.5)
        share = (counter.read(pids) - before) / (time.monotonic() - began)
        assert 0.8 < share < 2.0
        first.end()
        after = counter.read(pids)
        assert counter.read(pids) >= after >= before  # ended processes still count


@on_linux
def test_machine_cpu_time_includes_all_processes():
    before, pressure = read_machine_cpu_seconds(), read_pressure_seconds()
    with program("say()\nburn(0.5)\nsay()") as process:
        process.line()
        process.go()
        process.line()
        used = read_machine_cpu_seconds() - before
    assert used >= 0.45  # it is counted in ticks
    if pressure is not None:
        assert read_pressure_seconds() >= pressure


# Prints the cores used by others while a task computed for a second on the only core.
MEASURE_OTHERS = """
import json, os, sys, time
from crosstrain.monitor.collector import NodeSampler
os.sched_setaffinity(0, {int(sys.argv[2])})
sampler = NodeSampler(0, isolated=True, interval_seconds=60, emit=print)
sampler.watch("worker-0", int(sys.argv[1]))
records = [sampler.sample()]
time.sleep(2.2)
records.append(sampler.sample())
names = ("cpu_seconds", "cpu_wait_seconds", "machine_cpu_seconds", "trainer_cpu_seconds")
print(json.dumps([[getattr(record, name) for name in names] + [record.time_seconds] for record in records]))
"""


@on_linux
def test_competing_process_takes_half_of_a_core():
    """Real samples of a real contention for a core, up to the resulting fraction."""
    core = str(max(os.sched_getaffinity(0)))
    code = "os.sched_setaffinity(0, {int(sys.argv[1])})\nsay()\nburn(60)"
    with ExitStack() as stack:
        task, competitor = (stack.enter_context(program(code, core)) for _ in range(2))
        for process in (task, competitor):
            process.line()
            process.go()
        done = subprocess.run(
            [sys.executable, "-c", MEASURE_OTHERS, str(task.pid), core], capture_output=True, text=True, check=True, timeout=60
        )
    first, last = json.loads(done.stdout.splitlines()[-1])
    seconds = last[4] - first[4]
    used, waited, machine, trainer = ((after - before) / seconds for before, after in zip(first[:4], last[:4], strict=True))
    (loss,) = lost_cpu([CpuUse(used, waited, trainer, machine, 1.0)], ["here"])
    lost = loss.fraction
    assert lost > 0.4  # half, or more where other tests run here too
    assert lost == pytest.approx(1.0 - used, abs=0.15)  # it wanted a whole core


# Limits ----------------------------------------------------------------------------------------------------------------

LIMITED = """
import json, os, subprocess, sys, time
from crosstrain.monitor.cpu_limits import QuotaCounter
from crosstrain.monitor.cpu_limits import WaitCounter
open(sys.argv[1], "w").write("0")
work, pause = float(sys.argv[2]), float(sys.argv[3])
counter, waits, began, used, read = QuotaCounter(), WaitCounter(), time.monotonic(), time.process_time(), []
while time.monotonic() - began < 3.0:
    until = time.process_time() + work
    while time.process_time() < until:
        pass
    time.sleep(pause)
    read.append([time.monotonic() - began, time.process_time() - used, waits.read([os.getpid()]), *counter.read()])
print(json.dumps([[last - first for first, last in zip(read[0], read[-1])]]))
"""


@on_linux
def test_cpu_limit_and_throttled_time_are_measured():
    """A task computes at its limit, then waits as for a peer. Throttled time counts as waiting.

    The limit is low, so that it is reached on a busy machine too, and the task waits for most of the time.
    """
    cores, work, pause = 0.1, 0.02, 0.5
    try:
        groups = CpuGroups(Hierarchy.find(), os.getpid())
        group = groups.make(0, cores)
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    try:
        argv = [sys.executable, "-c", LIMITED, str(group.processes_file), str(work), str(pause)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    finally:
        group.remove(5.0)
    ((seconds, used, waited, granted, throttled),) = json.loads(done.stdout)
    assert used <= granted + 0.02 * seconds
    assert granted < 0.9 * cores * seconds
    assert 0.0 < throttled <= waited + 0.05 * seconds


@on_linux
def test_process_without_a_limit_has_no_grant():
    if cpu_quota_cores() is not None:
        pytest.skip("a group above this process has a limit")
    assert QuotaCounter().read() is None


# Figures ---------------------------------------------------------------------------------------------------------------

USES = st.builds(
    CpuUse,
    used=st.floats(0.001, 4.0),
    waited=st.floats(0.0, 50.0),
    trainer=st.floats(0.0, 0.5),
    machine=st.floats(0.0, 8.0),
    available=st.floats(0.1, 8.0),
    granted=st.none() | st.floats(0.0, 8.0),
    throttled=st.none() | st.floats(0.0, 8.0),
    seconds=st.floats(2.0, 100.0),
)


@given(nodes=st.lists(USES, min_size=1, max_size=4), shared=st.booleans())
def test_lost_cpu_is_bounded_by_wait_and_foreign_use(nodes, shared):
    machines = ["one"] * len(nodes) if shared else [str(number) for number in range(len(nodes))]
    losses = lost_cpu(nodes, machines)
    for node, loss in zip(nodes, losses, strict=True):
        assert 0.0 <= loss.fraction <= 1.0
        most = node.available if node.granted is None else min(node.available, node.granted)
        assert 0.0 <= loss.lost <= min(max(0.0, node.waited - (node.throttled or 0.0)), max(0.0, most - node.used)) + 1e-6
    for machine in set(machines):
        here = [loss for loss, where in zip(losses, machines, strict=True) if where == machine]
        assert sum(loss.lost for loss in here) <= max(loss.foreign for loss in here) + 1e-6


@given(nodes=st.lists(USES, min_size=1, max_size=4), share=st.floats(0.0, 1.0))
def test_wait_is_lost_in_proportion_to_foreign_use(nodes, share):
    """Where foreign use is small compared with that of the nodes, they waited for each other."""
    trainer_use = sum(node.used + node.trainer for node in nodes)
    foreign = share * trainer_use
    losses = lost_cpu([replace(node, machine=trainer_use + foreign, throttled=None) for node in nodes], ["one"] * len(nodes))
    for node, loss in zip(nodes, losses, strict=True):
        foreign_use = trainer_use + foreign - node.used
        assert loss.lost <= (node.waited * foreign / foreign_use if foreign_use > 1e-9 else 0.0) + 1e-6


@given(nodes=st.lists(USES, min_size=1, max_size=3), gone=USES, machines=st.lists(st.sampled_from("ab"), min_size=3, max_size=3))
def test_use_on_unknown_machine_is_not_foreign(nodes, gone, machines):
    machines = machines[: len(nodes)]
    losses = lost_cpu([*nodes, gone], [*machines, None])
    for node, where, loss in zip(nodes, machines, losses, strict=False):
        here = [other_node for other_node, other_machine in zip(nodes, machines, strict=True) if other_machine == where]
        trainer_use = sum(other_node.used + other_node.trainer for other_node in (*here, gone))
        assert loss.foreign == pytest.approx(max(0.0, node.machine - trainer_use), abs=1e-9)


@given(segments=st.lists(USES, min_size=1, max_size=4))
def test_segments_add_their_losses(segments):
    known = [lost_cpu([segment], ["one"])[0] for segment in segments]
    whole = mean_over_segments([None, *known])
    seconds = sum(segment.seconds for segment in segments)
    assert whole.seconds == pytest.approx(seconds)
    for name in ("lost", "used", "foreign"):
        assert getattr(whole, name) * seconds == pytest.approx(sum(getattr(segment, name) * segment.seconds for segment in known), abs=1e-6)
    assert mean_over_segments([None, None]) is None


@given(nodes=st.lists(USES, min_size=1, max_size=4))
def test_nodes_alone_on_a_machine_are_never_starved(nodes):
    trainer_use = sum(node.used + node.trainer for node in nodes)
    fractions = [loss.fraction for loss in lost_cpu([replace(node, machine=trainer_use) for node in nodes], ["one"] * len(nodes))]
    assert fractions == pytest.approx([0.0] * len(nodes), abs=1e-6)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (CpuUse(0.6, 0.4, 0.0, 2.0, 2.0), 0.4),  # it waited for what others had
        (CpuUse(1.0, 0.0, 0.0, 2.0, 2.0), 0.0),  # others had what it did not want
        (CpuUse(0.5, 3.0, 0.0, 1.5, 0.5), 0.0),  # it used all that --cores-per-node lets it
        (CpuUse(0.5, 1.5, 0.1, 0.6, 2.0), 0.0),  # agent and driver are not foreign
        (CpuUse(0.0, 0.0, 0.0, 2.0, 2.0), 0.0),
        # A limit of 0.67, reached whenever it computed; it waited for peers half of the time.
        (CpuUse(0.3, 0.35, 0.05, 0.46, 0.67, granted=0.3, throttled=0.3), 0.0),
        (CpuUse(0.3, 0.35, 0.05, 0.46, 0.67, granted=0.33, throttled=0.33), pytest.approx(0.05, abs=0.02)),
        (CpuUse(0.2, 0.4, 0.0, 2.0, 0.7, granted=0.5, throttled=0.0), 0.6),  # others had the cores, so it did not reach its limit
        (CpuUse(0.2, 0.4, 0.0, 2.0, 0.7, granted=0.7, throttled=0.3), 1 / 3),  # it reached its limit for three quarters of its waiting
        (CpuUse(None, 0.4, 0.0, 2.0, 2.0), None),
        (CpuUse(0.6, None, 0.0, 2.0, 2.0), None),
        (CpuUse(0.6, 0.4, None, 2.0, 2.0), None),
        (CpuUse(0.6, 0.4, 0.0, None, 2.0), None),
        (CpuUse(0.6, 0.4, 0.0, 2.0, None), None),
    ],
)
def test_lost_cpu_by_hand(use, expected):
    (loss,) = lost_cpu([use], ["one"])
    fraction = None if loss is None else loss.fraction
    assert fraction == (pytest.approx(expected, abs=1e-9) if isinstance(expected, float) else expected)


def contended(seconds, **figures):
    """A sample of a node that uses 0.6 cores and waits 0.4 of the time, with foreign use of 1.4."""
    counters = {
        "cpu_seconds": 0.6,
        "cpu_wait_seconds": 0.4,
        "machine_cpu_seconds": 2.0,
        "trainer_cpu_seconds": 0.0,
        "cpu_pressure_seconds": 0.9,
    }
    return sample(0, seconds, cores_available=2.0, **{name: 100 + rate * seconds for name, rate in counters.items()} | figures)


def test_summary_has_lost_and_waited_cpu():
    clock = replace(CLOCK, run_seconds=4.0)
    (node,) = per_node([contended(tick) for tick in range(5)], 1, clock, machines=["here"])
    assert (node["starved_fraction"], node["foreign_cpu_cores_used"]) == (pytest.approx(0.4), pytest.approx(1.4))
    assert node["cpu_cores_lost"] == pytest.approx(0.4)
    assert (node["cpu_wait_seconds"], node["cpu_pressure_fraction"]) == (pytest.approx(1.6), pytest.approx(0.9))
    (unknown,) = per_node([contended(tick) for tick in range(5)], 1, clock)
    assert (unknown["starved_fraction"], unknown["foreign_cpu_cores_used"]) == (None, None)
    (short,) = per_node([contended(tick / 4) for tick in range(5)], 1, replace(CLOCK, run_seconds=1.0), machines=["here"])
    assert short["starved_fraction"] is None
    (older,) = per_node([sample(0, tick) for tick in range(5)], 1, clock, machines=["here"])
    assert (older["starved_fraction"], older["cpu_wait_seconds"], older["cpu_pressure_fraction"]) == (None, None, None)


# Segments of a run -----------------------------------------------------------------------------------------------------

CLOCK_OF_10 = replace(CLOCK, run_seconds=10.0)


def contended_samples(node, began, until, foreign, nodes, interval=0.5):
    """Return a node's samples in a segment: 0.5 cores used, one waited for, `foreign` by others."""
    ticks = int((until - began) / interval)
    for tick in range(-1, ticks + 1):
        seconds = interval * tick
        rates = {"cpu_seconds": 0.5, "cpu_wait_seconds": 1.0, "machine_cpu_seconds": 0.5 * nodes + foreign, "trainer_cpu_seconds": 0.0}
        counters = {name: 50.0 + rate * seconds for name, rate in rates.items()}
        yield sample(node, began + seconds, cores_available=2.0, part_began_seconds=began, **counters)


def run_of(*segments):
    """Return the samples of a run of segments (began, until, nodes, foreign cores)."""
    return [
        record
        for began, until, nodes, foreign in segments
        for tick in zip(*(contended_samples(node, began, until, foreign, nodes) for node in range(nodes)), strict=True)
        for record in tick
    ]


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
def test_resized_run_is_starved_in_its_contended_segment(first, second):
    """The second segment is too short for a figure, and does not make the first one unknown."""
    samples = run_of((0.0, 8.5, first, 1.0), (8.5, 10.0, second, 1.0))
    known, *more = per_node(samples, second, CLOCK_OF_10, [8.5], ["here"] * second)
    assert known["foreign_cpu_cores_used"] == pytest.approx(1.0)
    assert known["cpu_cores_lost"] == pytest.approx(0.5 if first == 2 else 1.0, abs=0.2)
    for node in more:
        assert (node["starved_fraction"] is None) == (first == 1)


@given(first=st.integers(1, 3), second=st.integers(1, 3), turn=st.sampled_from([3.0, 5.0, 7.0]))
def test_use_of_removed_or_new_nodes_is_not_foreign(first, second, turn):
    samples = run_of((0.0, turn, first, 0.0), (turn, 10.0, second, 0.0))
    figures = per_node(samples, second, CLOCK_OF_10, [turn], ["here"] * second)
    assert [node["starved_fraction"] for node in figures] == pytest.approx([0.0] * second, abs=1e-9)
    assert [node["foreign_cpu_cores_used"] for node in figures] == pytest.approx([0.0] * second, abs=1e-9)
