"""The first failure of a run: examples, and random histories of a cluster."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.engine.protocol.node_messages import Death, Error
from crosstrain.engine.worker_watch import caused_by_peer_loss
from crosstrain.launch.driver.first_failure import Failures, Termination, first_cause, is_victim

GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.77.0.2]:49049. This is typically caused by …"
HEARTBEAT = "Collective ops is aborted by: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"
GRPC = ':UNKNOWN:Error received from peer  {grpc_message:"recvmsg:Connection reset by peer", grpc_status:14}'


def death(order=1, signal=None, tail=(), **more):
    fields = {"task": "worker-0", "pid": 7, "cpu_seconds": 0.5, "max_rss_bytes": 1, "code": None if signal else 1, **more}
    return Death(order=order, signal=signal, tail=list(tail), **fields)


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ConnectionResetError(), True),
        (ConnectionError("a rank has gone"), True),
        (RuntimeError(GLOO), True),
        (RuntimeError("x" * 5000 + GRPC), True),
        (RuntimeError(HEARTBEAT), True),
        (chained(RuntimeError("cannot go on"), BrokenPipeError()), True),
        (chained(RuntimeError("cannot go on"), ValueError("bad image")), False),
        (FileNotFoundError("no such file"), False),
        (MemoryError(), False),
    ],
)
def test_peer_loss_is_recognized_in_errors(error, lost):
    assert caused_by_peer_loss(error) is lost


@pytest.mark.parametrize(
    ("signal", "tail", "error", "victim"),
    [
        ("SIGKILL", [GRPC], None, False),
        ("SIGSEGV", [GLOO], None, False),
        ("SIGABRT", ["terminate called", GLOO], None, True),
        ("SIGABRT", ["double free or corruption"], None, False),
        (None, [GRPC], None, True),
        (None, ["warning: Connection reset by peer, tried again", "ValueError: bad image"], {"peer_lost": False}, False),
        (None, [], {"peer_lost": True}, True),
        ("SIGSEGV", [], {"peer_lost": True}, True),
        (None, [], None, False),
    ],
)
def test_victims_of_peer_loss_are_recognized(signal, tail, error, victim):
    assert is_victim(death(signal=signal, tail=tail), None if error is None else Error("E", "m", None, None, **error)) is victim


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        ([], None),
        (["", "   "], None),
        (
            ["terminate called after throwing an instance of 'x'", "  what():  accept: Too many open files", ""],
            "what():  accept: Too many open files",
        ),
        (
            ["Fatal Python error: Aborted", "", "Current thread 0x00 (most recent call first):", '  File "a.py", line 1 in f'],
            "Fatal Python error: Aborted",
        ),
        (["CUDA error: out of luck", "frame #0: c10::Error + 0x9f (0x7f)", "  @ 0x7f3a  raise"], "CUDA error: out of luck"),
        (["F0000 00:00:1 a.cc:1] Check failed", "I0000 00:00:1 b.cc:2] started"], "F0000 00:00:1 a.cc:1] Check failed"),
        (["2026-01-01 00:00:00.1: I tensorflow/core/a.cc:15] cpu"], None),
        (["[W1127 20:02:38.877 socket.cpp:207] [c10d] The hostname cannot be retrieved"], None),
        (["x" * 1000], "x" * 300 + "…"),
    ],
)
def test_last_relevant_log_line_of_killed_task_is_quoted(tail, last):
    fields = {"signal": "SIGABRT", "tail": tail}
    message = str(Failures([]).death_of(0, "node 0", death(**fields))).splitlines()[0]
    assert message == "task worker-0 on node 0 was killed by SIGABRT" + ("" if last is None else f'; its log ends with "{last}"')


def test_peer_loss_in_log_is_quoted_only_for_sigabrt():
    message = str(Failures([]).death_of(0, "node 0", death(signal="SIGKILL", tail=[GLOO]))).splitlines()[0]
    assert message == "task worker-0 on node 0 was killed by SIGKILL"
    assert "its log ends with" in str(Failures([]).death_of(0, "node 0", death(signal="SIGABRT", tail=[GLOO])))


def history(seed, offsets):
    """Return failures on three nodes as they arrive, with the true moment of each.

    The nodes' clocks differ, and messages are delayed.
    """
    draw = random.Random(seed)
    terminations, arrivals = [], []
    for node, offset in enumerate(offsets):
        moments = sorted(draw.uniform(0, 1) for _ in range(draw.randrange(4)))
        arrival = 0.0
        for order, moment in enumerate(moments, 1):
            arrival = max(arrival, moment + draw.uniform(0, 0.5))  # a channel keeps the order
            terminations.append((Termination(node, death(order, cpu_seconds=moment + offset), draw.random() < 0.6), moment))
            arrivals.append(arrival)
        if draw.random() < 0.2:
            terminations.append((Termination(node, None), 2.0))
            arrivals.append(max(arrival, 1.0) + draw.uniform(0, 0.5))
    return [terminations[index] for index in sorted(range(len(terminations)), key=arrivals.__getitem__)]


CLOCKS = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


@given(st.integers(0, 2**32), CLOCKS, CLOCKS)
def test_first_cause_is_independent_of_clocks(seed, clocks, other_clocks):
    terminations = history(seed, clocks)
    if not terminations:
        return
    blamed = first_cause([termination for termination, _ in terminations])
    again = first_cause([termination for termination, _ in history(seed, other_clocks)])
    assert (blamed.node, blamed.order, blamed.victim) == (again.node, again.order, again.victim)
    assert blamed.victim == all(termination.victim for termination, _ in terminations)
    equals = [(termination, moment) for termination, moment in terminations if termination.victim == blamed.victim]
    assert blamed.node == equals[0][0].node
    moment = next(moment for termination, moment in terminations if termination is blamed)
    assert moment == min(moment for termination, moment in equals if termination.node == blamed.node)


def test_look_for_restarts_costs_the_same_for_more_tasks():
    def instructions(tasks: int) -> int:
        failures = Failures([])
        for number in range(tasks):
            failures.mark_ready(f"worker-{number}")
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            failures.start_due()
            failures.overdue(0.0)
        finally:
            sys.settrace(None)
        return count

    assert 0 < instructions(1_000) == instructions(1)
