"""A worker may be lost anywhere: no step is, none is applied twice, and what a lost one still sends is refused. Real sockets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.torch.asynchronous.applied_steps import AppliedSteps
from crosstrain.backends.torch.asynchronous.leases import Leases

SEED = os.environ["CROSSTRAIN_TEST_SEED"]


@pytest.mark.long
def test_each_shard_applies_each_update_once_whatever_workers_die_of():
    script = Path(__file__).parent / "lost_workers_torch.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script), SEED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-6000:]}"


@given(st.lists(st.integers(0, 40), max_size=80))
def test_a_step_is_new_once(steps):
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
def test_what_is_kept_of_steps_grows_with_the_tickets_handed_out_alone(random, workers, tickets):
    """Tickets of ten steps, of which each worker carries out one at a time: never more intervals than workers and one."""
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


def test_a_lease_ends_with_the_next_one_or_by_the_chief():
    leases = Leases()
    first = leases.begin(1, 1)
    with first:
        pass
    second = leases.begin(1, 2)
    with pytest.raises(ConnectionError), first:
        pass
    leases.end(1, 1)  # the chief speaks of the one before
    with second:
        pass
    leases.end(1, 3)  # of one that has not joined yet
    with pytest.raises(ConnectionError), second:
        pass
    for generation in (1, 2, 3):
        with pytest.raises(ConnectionError, match="has ended"):
            leases.begin(1, generation)
    with leases.begin(1, 4), leases.begin(2, 1):
        pass
