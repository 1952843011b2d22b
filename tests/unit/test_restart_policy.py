"""Decisions after a failed attempt: values in, values out."""

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import DiskError, InterruptedRunError, RunFailedError, StalledRunError, UsageError
from crosstrain.core.job import Job
from crosstrain.launch.driver.first_failure import AddressInUseError, NodeLostError, TaskDiedError
from crosstrain.launch.driver.restart_policy import (
    AttemptSummary,
    FailFast,
    Failure,
    LimitedRestarts,
    PortClashRetry,
    Restart,
    RestartTask,
    Stop,
    failure_from_error,
    policy_for_job,
)

KINDS = st.sampled_from(["task", "node", "stall", "port"])


def failure(kind):
    return Failure(kind, None, None, "a cause", 0)


class Recorder:
    """Restarts on every failure, and counts the decisions."""

    decisions = 0

    def decide(self, failure, attempts, nodes):
        self.decisions += 1
        return Restart(7.0)


@given(kind=KINDS, earlier=st.lists(KINDS, max_size=5))
def test_fail_fast_stops_on_every_failure(kind, earlier):
    attempts = [AttemptSummary(0, 1.0, failure(kind_before)) for kind_before in earlier]
    assert FailFast().decide(failure(kind), attempts, 2) == Stop()


@given(kinds=st.lists(KINDS, min_size=1, max_size=20))
def test_port_clash_is_retried_twice_and_else_delegated(kinds):
    fallback, attempts, clashes = Recorder(), [], 0
    policy = PortClashRetry(fallback)
    for kind in kinds:
        clashes = clashes + 1 if kind == "port" else 0
        decision = policy.decide(failure(kind), attempts, 2)
        attempts.append(AttemptSummary(0, 1.0, failure(kind)))
        if kind != "port":
            assert decision == Restart(7.0)
        elif clashes < 3:
            assert decision == Restart(0.0)
        else:
            assert decision == Stop("3 times a port was taken before a task could listen")
            assert [before.failure.kind for before in attempts[-3:]] == ["port"] * 3
            break
    assert fallback.decisions == sum(attempt.failure.kind != "port" for attempt in attempts)


@given(
    most=st.integers(1, 5),
    window=st.none() | st.floats(1, 100),
    passed=st.lists(st.floats(0, 60), min_size=1, max_size=30),
)
def test_restarts_are_limited_in_any_window(most, window, passed):
    now = [0.0]
    policy = LimitedRestarts(most, window, clock=lambda: now[0])
    restarted = []
    for seconds in passed:
        now[0] += seconds
        recent = [at for at in restarted if window is None or now[0] - at < window]
        decision = policy.decide(failure("task"), [], 2)
        assert isinstance(decision, Restart) == (len(recent) < most)
        if isinstance(decision, Restart):
            restarted.append(now[0])
        else:
            assert "as often as --max-restarts allows" in decision.because


@given(steps=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_restart_is_immediate_after_progress_else_delayed(steps):
    policy, attempts = LimitedRestarts(100, min_nodes=1), []
    waited = 0.0
    for step in steps:
        decision = policy.decide(Failure("task", None, None, "a cause", step), attempts, 2)
        assert (decision.replaces_nodes, decision.min_nodes) == (True, 1)
        if not attempts or step > attempts[-1].failure.step:
            waited = 0.0
            assert decision.after_seconds == 0
        else:
            assert waited <= decision.after_seconds <= 30
            assert decision.after_seconds >= 1
            waited = decision.after_seconds
        attempts.append(AttemptSummary(0, 1.0, Failure("task", None, None, "a cause", step)))


def test_job_selects_its_restart_policy():
    assert policy_for_job(Job()).decide(failure("task"), [], 1) == Stop()
    restarted = policy_for_job(Job(nodes=3, max_restarts=1, min_nodes=2))
    assert restarted.decide(failure("node"), [], 1) == Restart(replaces_nodes=True, min_nodes=2)
    assert isinstance(restarted.decide(failure("node"), [], 1), Stop)
    assert (Job().saved_every, Job().saves_intermediate_checkpoints) == (None, False)
    assert (Job(max_restarts=1).saved_every, Job(max_restarts=1).saves_intermediate_checkpoints) == ("10s", True)
    assert not Job(max_restarts=1, checkpoint_every="end").saves_intermediate_checkpoints
    assert Job(keep_best="accuracy").saves_intermediate_checkpoints


def test_only_recoverable_errors_are_failures():
    log = "task worker-1 on node 0 was killed by SIGKILL\nlast lines of its log:\n  x"
    assert failure_from_error(TaskDiedError(log, "worker-1", 0), 7) == Failure("task", "worker-1", 0, log.splitlines()[0], 7)
    assert failure_from_error(NodeLostError("gone", "agent-1", 1), 7) == Failure("node", None, 1, "gone", 7)
    assert failure_from_error(StalledRunError("stalled", "worker-0"), 7) == Failure("stall", "worker-0", None, "stalled", 7)
    assert failure_from_error(AddressInUseError("in use"), 0) == Failure("port", None, None, "in use", 0)
    disk = DiskError("runs", OSError(28, "full"))
    for error in (RunFailedError("the loss is infinite"), InterruptedRunError("by the user"), UsageError("wrong"), disk, KeyError("ours")):
        assert failure_from_error(error, 7) is None


@given(most=st.integers(1, 5), passed=st.lists(st.integers(0, 200), min_size=1, max_size=12))  # whole seconds, whose sums are exact
def test_task_restart_counts_like_any_restart(most, passed):
    now = [1000.0]
    policy = PortClashRetry(LimitedRestarts(most, clock=lambda: now[0]))
    for number, seconds in enumerate(passed):
        now[0] += seconds
        decision = policy.decide(Failure("task", "worker-1", 1, "a cause", 7, rejoins=True), [], 3)
        if number >= most:
            assert isinstance(decision, Stop)
            continue
        assert isinstance(decision, RestartTask)
        assert (decision.after_seconds == 0) == (number == 0 or seconds >= 60)
        assert decision.after_seconds <= 30
    another = policy.decide(Failure("task", "worker-2", 1, "a cause", 7, rejoins=True), [], 3)
    assert another == (RestartTask() if len(passed) < most else another)
