"""The stacks of a stalled task are collected in bounded time and reported in a line."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from crosstrain.core.liveness import DUMP_SIGNAL, answers_signal
from crosstrain.engine.protocol.messages import MAX_STACK_CHARACTERS
from crosstrain.launch.node import stacks as places
from crosstrain.launch.node.stacks import (
    COLLECT_SECONDS,
    STACKS,
    InspectedTask,
    TaskStack,
    append_stacks,
    collect_stacks,
    describe_places,
    find_py_spy,
    odd_one_out,
)

HANGS = """
import ctypes, sys, threading, time
from crosstrain.core.liveness import mark_working_thread, write_stacks_on_signal

def in_python():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

def in_native_code():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)  # which holds the interpreter's lock meanwhile

def in_a_thread():
    mark_working_thread()
    in_python()

def in_deep_recursion(depth=500):
    in_deep_recursion(depth - 1) if depth else in_python()

sys.argv[2] == "-1" or write_stacks_on_signal(int(sys.argv[2]))
if sys.argv[1] == "in_a_thread":
    threading.Thread(target=in_a_thread).start()
    threading.Event().wait()
globals()[sys.argv[1]]()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("hangs") / "hangs.py"
    path.write_text(HANGS)
    return path


@contextmanager
def hanging(script, how, *, answers=True):
    """Start a process that hangs in this way; yield it as the agent sees it."""
    written = os.memfd_create("stacks")
    command = [sys.executable, "-P", str(script), how, str(written if answers else -1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[written]) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield InspectedTask("worker-0", process.pid, "S", written)
        finally:
            process.kill()
            os.close(written)


def place_of(task, spy=None):
    stack = collect_stacks([task], spy)[task.name]
    return TaskStack(stack["text"], stack["problem"])


@pytest.mark.parametrize(
    ("how", "function"), [("in_python", "in_python"), ("in_native_code", "in_native_code"), ("in_a_thread", "in_python")]
)
def test_hanging_task_writes_its_stack(script, how, function):
    with hanging(script, how) as task:
        for _ in range(2):  # each answer is the newest one
            stack = place_of(task)
            assert stack.problem is None
            assert f"{script}:" in stack.place
            assert stack.place.endswith(f"({function})")
            assert stack.text.count(f"in {function}\n") == 1


def test_installed_py_spy_is_used(script):
    spy = find_py_spy()
    if spy is None:
        pytest.skip("py-spy is not installed")
    with hanging(script, "in_a_thread") as task:
        assert f"{script}:" in place_of(task, spy).place
        os.kill(task.pid, signal.SIGSTOP)
        stopped = place_of(InspectedTask(task.name, task.pid, "T", task.written), spy)
        assert stopped.place.endswith("(in_python)")


@pytest.fixture
def spy(tmp_path):
    """Return a function that writes a fake py-spy of these lines of sh."""

    def write(lines):
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o700)
        return str(path)

    return write


def test_py_spy_output_is_read_with_the_active_thread_first(script, spy):
    with hanging(script, "in_python") as task:
        lines = f'echo "Thread 7 (idle)"; echo "    f (/x/a.py:1)"; echo "Thread {task.pid} (idle)"; echo "    g (/x/b.py:22)"'
        stack = place_of(task, spy(lines))
        assert stack.place == "/x/b.py:22 (g)"
        assert "/x/a.py:1" in stack.text


def test_refused_py_spy_falls_back_to_the_task(script, spy):
    with hanging(script, "in_python") as task:
        assert "(in_python)" in place_of(task, spy("echo 'Error: Permission Denied' >&2; exit 1")).place
        stopped = place_of(InspectedTask("worker-0", task.pid, "T", task.written), spy("echo 'Error: Permission Denied' >&2; exit 1"))
        assert stopped.place is None
        assert "is stopped by a signal" in stopped.problem
        assert "Permission Denied" in stopped.problem
        assert "cannot be run" in place_of(InspectedTask("worker-0", task.pid, "D", task.written), "/no/such/program").problem


def test_hanging_py_spy_is_ended(script, spy, monkeypatch):
    monkeypatch.setattr("crosstrain.launch.node.stacks.SPY_SECONDS", 0.3)
    with hanging(script, "in_python") as task:
        began = time.monotonic()
        assert "(in_python)" in place_of(task, spy("exec sleep 60")).place
        assert time.monotonic() - began < COLLECT_SECONDS


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_unresponsive_task_is_not_waited_for(script, state):
    with hanging(script, "in_python") as task:
        began = time.monotonic()
        stack = place_of(InspectedTask("worker-0", task.pid, state, task.written))
        assert time.monotonic() - began < 0.5
        assert (stack.text, stack.place) == ("", None)
        assert "cannot say where it stands" in stack.problem


def test_task_stopped_meanwhile_is_waited_for_briefly(script):
    with hanging(script, "in_python") as task:
        os.kill(task.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert "has not answered within 1 s" in place_of(task).problem
        assert time.monotonic() - began < 3


def test_task_without_handler_gets_no_signal(script):
    with hanging(script, "in_python", answers=False) as task:
        assert not answers_signal(task.pid)
        assert "has not begun to" in place_of(task).problem
        os.kill(task.pid, 0)
    assert "is gone" in place_of(InspectedTask("worker-0", task.pid, "gone", None)).problem
    assert not answers_signal(2**22 + 1)


def test_signal_is_unused_by_batch_systems_and_frameworks():
    assert signal.SIGRTMIN + 8 < DUMP_SIGNAL < signal.SIGRTMAX - 8


def test_stacks_are_bounded_and_keep_the_innermost_line(script):
    with hanging(script, "in_deep_recursion") as task:
        many = [InspectedTask(f"worker-{number}", task.pid, "S", task.written) for number in range(64)]
        stacks = collect_stacks(many, None)
    assert sum(len(stack["text"]) for stack in stacks.values()) <= 8 * MAX_STACK_CHARACTERS
    assert all(len(stack["text"]) <= 4096 for stack in stacks.values())
    assert all("(in_python)" in TaskStack(stack["text"]).place for stack in stacks.values() if stack["problem"] is None)
    assert any(stack["text"].endswith("… (cut)\n") for stack in stacks.values())


def stack_of_lines(*lines):
    return TaskStack("Current thread 0x1 (most recent call first):\n" + "".join(f'  File "{file}", line 3 in f\n' for file in lines))


def test_equal_places_are_grouped_and_the_rarest_is_first():
    stacks = {f"worker-{number}": stack_of_lines("/wait.py", "/loop.py") for number in range(9)} | {"worker-9": stack_of_lines("/stuck.py")}
    assert describe_places(stacks) == (
        "worker-9 stands at /stuck.py:3 (f); worker-0, worker-1, worker-2, worker-3, worker-4, worker-5 and 3 more stand at /wait.py:3 (f)"
    )
    assert describe_places({"worker-0": TaskStack("", "is gone")}) == ""
    many = describe_places({f"worker-{number}": stack_of_lines(f"/{number}.py") for number in range(100)})
    assert many.endswith("; others at 96 more places")


def test_straggler_is_the_task_at_another_place():
    wait, stuck = stack_of_lines("/wait.py"), stack_of_lines("/stuck.py")
    assert odd_one_out({"worker-0": wait, "worker-1": stuck, "worker-2": wait}) == "worker-1"
    assert odd_one_out({"worker-0": wait, "worker-1": stuck}) is None
    assert odd_one_out({"worker-0": wait, "worker-1": stuck, "ps-0": wait}) is None
    assert odd_one_out({"worker-0": wait, "worker-1": wait, "worker-2": wait}) is None
    assert odd_one_out({"worker-0": wait, "worker-1": TaskStack("", "is gone"), "worker-2": wait}) is None
    assert odd_one_out({}) is None


def test_texts_of_a_node_are_escaped_and_short():
    place = TaskStack(f'  File "/a\x1b[2J{"x" * 5000}/b\u2028c.py", line 3 in f\u202e\n').place
    assert len(place) < 500
    assert place.isprintable()
    assert "c.py:3 (f" in place


def test_file_keeps_all_stalls_until_it_is_large(tmp_path, monkeypatch):
    append_stacks(tmp_path, "stalled\nonce", {"worker-0": stack_of_lines("/a.py"), "worker-1": TaskStack("", "is stopped")})
    append_stacks(tmp_path, "stalled twice", {"worker-0": TaskStack('  File "/b\x1b.py", line 3 in f\n')})
    text = (tmp_path / STACKS).read_text()
    assert "stalled\\x0aonce" in text
    assert "== worker-1: is stopped" in text
    assert '"/b\\x1b.py"' in text
    monkeypatch.setattr(places, "MAX_BYTES", len(text))
    append_stacks(tmp_path, "stalled again", {"worker-0": stack_of_lines("/a.py")})
    append_stacks(tmp_path, "stalled for ever", {"worker-0": stack_of_lines("/a.py")})
    assert (tmp_path / STACKS).read_text()[len(text) :].count("\n") == 3
    assert "omitted" in (tmp_path / STACKS).read_text()
