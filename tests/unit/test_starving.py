"""What other programs took of a run's cores: from the kernel's counters of real processes, and in figures written by hand."""

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

from crosstrain.metrics.nodes import per_node
from crosstrain.metrics.starving import CpuUse, foreign_cores, starved_fractions
from crosstrain.monitor.pressure import WaitCounter, read_machine_cpu_seconds, read_pressure_seconds

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counters of the Linux kernel")

# Two threads that compute at the same time, beside a first one that waits for a line; all on one core, which is given.
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
def test_every_thread_of_a_process_counts_and_one_that_sleeps_waits_for_nobody():
    core = str(min(os.sched_getaffinity(0)))
    with program(THREADS, core) as busy, program("say()") as idle:
        for one in (busy, idle):
            one.line()
        counters = {one.pid: WaitCounter() for one in (busy, idle)}
        before, began = {pid: counter.read([pid]) for pid, counter in counters.items()}, time.monotonic()
        time.sleep(1.0)
        shares = {pid: (counter.read([pid]) - before[pid]) / (time.monotonic() - began) for pid, counter in counters.items()}
    assert shares[idle.pid] < 0.05
    assert 0.8 < shares[busy.pid] < 2.0  # one of the two at any time; both, where other programs want the core as well


@on_linux
def test_two_processes_on_one_core_wait_half_of_the_time_each():
    code = "os.sched_setaffinity(0, {int(sys.argv[1])})\nsay()\nburn(60)"
    core = str(max(os.sched_getaffinity(0)))
    with program(code, core) as one, program(code, core) as other:
        for each in (one, other):
            each.line()
        for each in (one, other):
            each.go()
        counter = WaitCounter()
        pids = [one.pid, other.pid]
        before, began = counter.read(pids), time.monotonic()
        time.sleep(1.5)
        share = (counter.read(pids) - before) / (time.monotonic() - began)
        assert 0.8 < share < 2.0
        one.end()
        after = counter.read(pids)
        assert counter.read(pids) >= after >= before  # what has ended is kept


@on_linux
def test_the_machine_s_cpu_time_has_everybody_s():
    before, pressure = read_machine_cpu_seconds(), read_pressure_seconds()
    with program("say()\nburn(0.5)\nsay()") as stranger:
        stranger.line()
        stranger.go()
        stranger.line()
        used = read_machine_cpu_seconds() - before
    assert used >= 0.45  # it is counted in ticks
    if pressure is not None:
        assert read_pressure_seconds() >= pressure


# Says how many cores others had while a task of ours burned for a second on the only core that all of them may use.
BESIDE = """
import json, os, sys, time
from crosstrain.monitor.sampler import NodeSampler
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
def test_a_stranger_on_the_task_s_core_takes_half_of_it():
    """Real samples of a real fight for a core, all the way to the fraction."""
    core = str(max(os.sched_getaffinity(0)))
    code = "os.sched_setaffinity(0, {int(sys.argv[1])})\nsay()\nburn(60)"
    with ExitStack() as stack:
        task, stranger = (stack.enter_context(program(code, core)) for _ in range(2))
        for each in (task, stranger):
            each.line()
            each.go()
        done = subprocess.run([sys.executable, "-c", BESIDE, str(task.pid), core], capture_output=True, text=True, check=True, timeout=60)
    first, last = json.loads(done.stdout.splitlines()[-1])
    seconds = last[4] - first[4]
    used, waited, machine, trainer = ((after - before) / seconds for before, after in zip(first[:4], last[:4], strict=True))
    (lost,) = starved_fractions([CpuUse(used, waited, trainer, machine, 1.0)], ["here"])
    assert lost > 0.4  # half, or more where other tests run here too
    assert lost == pytest.approx(1.0 - used, abs=0.15)  # it wanted a whole core


# Figures ---------------------------------------------------------------------------------------------------------------

USES = st.builds(
    CpuUse,
    used=st.floats(0.001, 4.0),
    waited=st.floats(0.0, 50.0),
    trainer=st.floats(0.0, 0.5),
    machine=st.floats(0.0, 8.0),
    available=st.floats(0.1, 8.0),
)


@given(nodes=st.lists(USES, min_size=1, max_size=4), shared=st.booleans())
def test_no_more_is_lost_than_others_used_than_was_waited_for_and_than_there_is(nodes, shared):
    machines = ["one"] * len(nodes) if shared else [str(number) for number in range(len(nodes))]
    foreign, found = foreign_cores(nodes, machines), starved_fractions(nodes, machines)
    lost = []
    for node, fraction in zip(nodes, found, strict=True):
        assert 0.0 <= fraction <= 1.0
        lost.append(fraction * node.used / (1.0 - fraction) if fraction < 1.0 else min(node.waited, node.available))
        assert lost[-1] <= min(node.waited, max(0.0, node.available - node.used)) + 1e-6
    for machine in set(machines):
        here = [index for index, where in enumerate(machines) if where == machine]
        if all(found[index] < 1.0 for index in here):
            assert sum(lost[index] for index in here) <= max(foreign[index] for index in here) + 1e-6


@given(nodes=st.lists(USES, min_size=1, max_size=4))
def test_nodes_that_have_the_machine_to_themselves_are_never_starved_however_long_they_wait(nodes):
    together = sum(node.used + node.trainer for node in nodes)
    found = starved_fractions([replace(node, machine=together) for node in nodes], ["one"] * len(nodes))
    assert found == pytest.approx([0.0] * len(nodes), abs=1e-6)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (CpuUse(0.6, 0.4, 0.0, 2.0, 2.0), 0.4),  # it waited for what others had
        (CpuUse(1.0, 0.0, 0.0, 2.0, 2.0), 0.0),  # others had what it did not want
        (CpuUse(0.5, 3.0, 0.0, 1.5, 0.5), 0.0),  # it used all that --cores-per-node lets it
        (CpuUse(0.5, 1.5, 0.1, 0.6, 2.0), 0.0),  # agent and driver are nobody else's
        (CpuUse(0.0, 0.0, 0.0, 2.0, 2.0), 0.0),
        (CpuUse(None, 0.4, 0.0, 2.0, 2.0), None),
        (CpuUse(0.6, None, 0.0, 2.0, 2.0), None),
        (CpuUse(0.6, 0.4, None, 2.0, 2.0), None),
        (CpuUse(0.6, 0.4, 0.0, None, 2.0), None),
        (CpuUse(0.6, 0.4, 0.0, 2.0, None), None),
    ],
)
def test_what_was_lost_by_hand(use, expected):
    (found,) = starved_fractions([use], ["one"])
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-9))


def contended(seconds, **figures):
    """A sample of a node that uses 0.6 cores and waits 0.4 of the time, beside others that use 1.4; agent and driver use nothing."""
    counters = {
        "cpu_seconds": 0.6,
        "cpu_wait_seconds": 0.4,
        "machine_cpu_seconds": 2.0,
        "trainer_cpu_seconds": 0.0,
        "cpu_pressure_seconds": 0.9,
    }
    return sample(0, seconds, cores_available=2.0, **{name: 100 + rate * seconds for name, rate in counters.items()} | figures)


def test_a_summary_has_what_was_lost_and_what_was_waited():
    clock = replace(CLOCK, run_seconds=4.0)
    (node,) = per_node([contended(tick) for tick in range(5)], 1, clock, machines=["here"])
    assert (node["starved_fraction"], node["foreign_cpu_cores_used"]) == (pytest.approx(0.4), pytest.approx(1.4))
    assert (node["cpu_wait_seconds"], node["cpu_pressure_fraction"]) == (pytest.approx(1.6), pytest.approx(0.9))
    (unknown,) = per_node([contended(tick) for tick in range(5)], 1, clock)
    assert (unknown["starved_fraction"], unknown["foreign_cpu_cores_used"]) == (None, None)
    (short,) = per_node([contended(tick / 4) for tick in range(5)], 1, replace(CLOCK, run_seconds=1.0), machines=["here"])
    assert short["starved_fraction"] is None
    (older,) = per_node([sample(0, tick) for tick in range(5)], 1, clock, machines=["here"])
    assert (older["starved_fraction"], older["cpu_wait_seconds"], older["cpu_pressure_fraction"]) == (None, None, None)
