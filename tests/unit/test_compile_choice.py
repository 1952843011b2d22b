"""Whether steps are compiled, from the timings of all tasks, and the limit on compilation."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.compiling import (
    GAIN,
    CompileChoice,
    Timing,
    compile_is_faster,
    compiled_sizes,
    decide_by,
    settle,
    should_time,
    timed,
)
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.sampler import Batches
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.models.build import build_model

seconds = st.floats(1e-6, 1e3)
timings = st.lists(st.builds(Timing, seconds, st.none() | seconds), min_size=1, max_size=8)


@given(timings)
def test_steps_are_compiled_if_all_can_and_time_is_saved(task_timings):
    fast_enough = all(timing.compiled_seconds is not None for timing in task_timings) and sum(
        timing.compiled_seconds for timing in task_timings
    ) <= GAIN * sum(timing.plain_seconds for timing in task_timings)
    assert compile_is_faster(task_timings) == fast_enough
    assert compile_is_faster(task_timings[::-1]) == fast_enough or len(task_timings) > 2  # order changes the last bit of sums
    assert CompileChoice.from_timings(task_timings).compiled == fast_enough


def test_choice_retains_reason():
    choice = CompileChoice.from_timings([Timing(1.0, 0.1), Timing(3.0, None, "no compiler")])
    assert choice == CompileChoice(compiled=False, plain_seconds=2.0, compiled_seconds=None, reason="no compiler")


def test_slow_compilation_is_aborted():
    never, calls = threading.Event(), []
    began = time.monotonic()
    timing = timed(
        lambda: 0.5, never.wait, lambda: pytest.fail("nothing was compiled"), lambda: calls.append("given up"), limit_seconds=0.2
    )
    assert time.monotonic() - began < 5.0
    never.set()
    assert timing == Timing(0.5, None, "it was not compiled within 0.2 s")
    assert calls == ["given up"]


def test_compiler_error_is_the_reason():
    def fail():
        raise ValueError("cannot compile that")

    timing = timed(lambda: 0.5, fail, lambda: pytest.fail("nothing was compiled"))
    assert timing == Timing(0.5, None, "ValueError: cannot compile that")


def test_error_of_compiled_step_is_the_reason():
    """Errors of whole steps only: an update that the compiler refuses, a batch of another size."""

    def broken():
        raise ValueError("no such kernel")

    timing = timed(lambda: 1.0, lambda: None, broken)
    assert (timing.plain_seconds, timing.compiled_seconds, timing.reason) == (1.0, None, "ValueError: no such kernel")


def test_both_kinds_are_timed():
    assert timed(lambda: 0.5, lambda: None, lambda: 0.25) == Timing(0.5, 0.25)


def test_settle_uses_registered_decision():
    requests = []

    def refuse(timing, tasks):
        requests.append((timing, tasks))
        return False

    assert settle(Timing(1.0, 0.1), 3)  # by itself
    decide_by(refuse)
    try:
        assert not settle(Timing(1.0, 0.1), 3)
    finally:
        decide_by(lambda timing, tasks: compile_is_faster([timing]))
    assert requests == [(Timing(1.0, 0.1), 3)]


@given(st.integers(0, 5000), st.integers(1, 64))
def test_micro_batches_of_the_first_batch_are_compiled(size, most):
    batches, _ = Batches.single(size).in_micro_batches(most)
    cut = {after - before for before, after in zip(batches.offsets[:-1].tolist(), batches.offsets[1:].tolist(), strict=True)}
    assert cut - {0} <= compiled_sizes(size, most)
    assert len(compiled_sizes(size, most)) <= 4
    assert compiled_sizes(size) == {size, size // 2} - {0}


@pytest.mark.parametrize(("compile_", "chosen"), [("off", False), ("on", False), ("auto", True)])
def test_auto_makes_a_choice(compile_, chosen):
    data = open_dataset("digits")
    assert should_time(Job(backend="tf", compile=compile_), build_model("logreg", data.info), data) == chosen


def test_sequences_are_not_compiled():
    data = open_dataset("numbers")
    model = build_model("transformer:tiny", data.info)
    assert not should_time(Job(backend="tf", compile="auto"), model, data)
    with pytest.raises(UsageError, match=r"compile: got 'on', but the examples of .* vary in length"):
        should_time(Job(backend="tf", compile="on"), model, data)
