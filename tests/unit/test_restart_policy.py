"""What becomes of a failed attempt: values in, values out."""

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import DiskError, InterruptedRunError, RunFailedError, StalledRunError, UsageError
from crosstrain.launch.driver.first_failure import AddressInUseError, NodeLostError, TaskDiedError
from crosstrain.launch.driver.restart_policy import AttemptSummary, FailFast, Failure, PortClashRetry, Restart, Stop, failure_of

KINDS = st.sampled_from(["task", "node", "stall", "port"])


def failure(kind):
    return Failure(kind, None, None, "a cause", 0)


class Recorder:
    """Restarts whatever it is asked about, and counts that."""

    asked = 0

    def decide(self, failure, attempts, nodes):
        self.asked += 1
        return Restart(7.0)


@given(kind=KINDS, earlier=st.lists(KINDS, max_size=5))
def test_fail_fast_stops_whatever_fails(kind, earlier):
    attempts = [AttemptSummary(0, 1.0, failure(each)) for each in earlier]
    assert FailFast().decide(failure(kind), attempts, 2) == Stop()


@given(kinds=st.lists(KINDS, min_size=1, max_size=20))
def test_a_start_is_tried_three_times_in_a_row_and_what_else_fails_is_for_others_to_decide(kinds):
    others, attempts, clashes = Recorder(), [], 0
    policy = PortClashRetry(others)
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
    assert others.asked == sum(attempt.failure.kind != "port" for attempt in attempts)


def test_only_what_another_attempt_could_mend_is_a_failure():
    log = "task worker-1 on node 0 was killed by SIGKILL\nlast lines of its log:\n  x"
    assert failure_of(TaskDiedError(log, "worker-1", 0), 7) == Failure("task", "worker-1", 0, log.splitlines()[0], 7)
    assert failure_of(NodeLostError("gone", "agent-1", 1), 7) == Failure("node", None, 1, "gone", 7)
    assert failure_of(StalledRunError("stalled", "worker-0"), 7) == Failure("stall", "worker-0", None, "stalled", 7)
    assert failure_of(AddressInUseError("in use"), 0) == Failure("port", None, None, "in use", 0)
    disk = DiskError("runs", OSError(28, "full"))
    for error in (RunFailedError("the loss is infinite"), InterruptedRunError("by the user"), UsageError("wrong"), disk, KeyError("ours")):
        assert failure_of(error, 7) is None
