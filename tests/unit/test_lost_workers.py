"""Lost workers: no step is lost or applied twice, late messages are refused. Real sockets."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.exchange.parameter_server.server import Leases
from crosstrain.exchange.parameter_server.shards import AppliedSteps
from crosstrain.exchange.parameter_server.wire_protocol import WorkerLinks

SEED = os.environ["CROSSTRAIN_TEST_SEED"]


@pytest.mark.thorough
def test_shards_apply_each_update_once_despite_deaths():
    script = Path(__file__).parent / "lost_workers_torch.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script), SEED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"--seed {SEED}: {done.stderr[-6000:]}"


@given(st.lists(st.integers(0, 40), max_size=80))
def test_step_is_new_once(steps):
    applied, seen = AppliedSteps(), set()
    for step in steps:
        assert (step in applied) == (step in seen)
        assert applied.add(step) == (step not in seen)
        seen.add(step)
        assert step in applied
    runs = sum(step - 1 not in seen for step in seen)
    assert len(applied) == runs
    applied.clear()
    assert all(step not in applied for step in seen)


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.integers(1, 30))
def test_stored_steps_grow_with_tickets_only(random, workers, tickets):
    """Tickets of ten steps, one at a time per worker: at most workers plus one intervals."""
    applied, waiting, held = AppliedSteps(), [range(10 * number, 10 * number + 10) for number in range(tickets)], {}
    while waiting or held:
        worker = random.randrange(workers)
        if worker not in held and waiting:
            held[worker] = iter(waiting.pop(0))
        step = next(held.get(worker, iter(())), None)
        if step is None:
            held.pop(worker, None)
            continue
        assert applied.add(step)
        assert len(applied) <= workers + 1
    assert len(applied) == 1


def test_lease_ends_by_the_next_one_or_the_chief():
    leases = Leases()
    first = leases.begin(1, 1)
    with first:
        pass
    second = leases.begin(1, 2)
    with pytest.raises(ConnectionError), first:
        pass
    leases.end(1, 1)  # the chief names the previous lease
    with second:
        pass
    leases.end(1, 3)  # a worker that has not joined yet
    with pytest.raises(ConnectionError), second:
        pass
    for generation in (1, 2, 3):
        with pytest.raises(ConnectionError, match="has ended"):
            leases.begin(1, generation)
    with leases.begin(1, 4), leases.begin(2, 1):
        pass


class Link:
    """A connection that records that it was cut."""

    def __init__(self):
        self.cut = threading.Event()

    def abort(self):
        self.cut.set()


@settings(max_examples=60)
@given(st.permutations(range(5)), st.lists(st.floats(0, 0.003), min_size=5, max_size=5))
def test_newest_connection_of_a_worker_wins(order, pauses):
    links, admitted = WorkerLinks(lambda worker: None, lambda worker: None), []
    links_by_arrival = [Link() for _ in order]

    def serve(arrival):
        try:
            links.enter(0, links_by_arrival[arrival], float(arrival))
        except ConnectionError:
            return
        admitted.append(arrival)
        assert links_by_arrival[arrival].cut.wait(10)
        links.leave(0)

    threads = [threading.Thread(target=serve, args=(arrival,), daemon=True) for arrival in order]
    for thread, pause in zip(threads, pauses, strict=True):
        thread.start()
        time.sleep(pause)
    last = threads[order.index(4)]
    for thread in threads:
        if thread is not last:
            thread.join(10)
            assert not thread.is_alive()
    deadline = time.monotonic() + 10
    while 4 not in admitted and time.monotonic() < deadline:
        time.sleep(0.001)
    assert admitted[-1] == 4
    assert not links_by_arrival[4].cut.is_set()
    assert admitted == sorted(admitted)
    links.cut(0)
    last.join(10)
