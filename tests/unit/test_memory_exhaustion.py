"""Out-of-memory errors: recognised in each framework's words, reported with a remedy."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from crosstrain.core.liveness import REMEDY, kernel_oom_kills, memory_error_line, worker_in
from crosstrain.engine.protocol.node_messages import Death, Error
from crosstrain.launch.driver.first_failure import Failures

TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 281474976710656 bytes."
)
TF = "OOM when allocating tensor with shape[70368744177664] and type float on /job:worker/replica:0/task:1/device:CPU:0 by allocator mklcpu"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(TORCH), TORCH),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "CUDA out of memory. Tried to allocate 20.00 GiB."),
        (RuntimeError(f"Graph execution error:\n\n  at node while/Fill\n{TF}\n\t [[node]]"), TF),
        (MemoryError(), "MemoryError"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (ValueError("an image is broken"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("RESOURCE_EXHAUSTED: received a message that is larger than allowed"), None),
    ],
)
def test_out_of_memory_errors_are_recognised(error, line):
    assert memory_error_line(error) == line
    outer = RuntimeError("the step failed")
    outer.__cause__ = error
    assert memory_error_line(outer) == line


def test_numpy_allocation_failure_is_recognised():
    with pytest.raises(MemoryError) as refused:
        np.zeros(2**60, np.uint8)
    assert memory_error_line(refused.value).startswith("Unable to allocate 1.00 EiB for an array")


def test_worker_is_read_from_tensorflow_error():
    assert worker_in(TF) == "worker-1"
    assert worker_in(TORCH) is None


def test_kernel_oom_count_exists_on_linux():
    assert kernel_oom_kills() >= 0


def described(task, error=None, **death):
    failures = Failures(())
    if error is not None:
        failures.record(0, Error("SomeError", "Graph execution error:", None, None, peer_lost=False, task=task, **error))
    fields = {"pid": 7, "code": 1, "signal": None, "order": 1, "cpu_seconds": 0.5, "max_rss_bytes": 1, "tail": [], **death}
    return str(failures.death_of(0, "node 0", Death(task, **fields)))


def test_out_of_memory_death_suggests_a_remedy():
    description = described("worker-1", {"out_of_memory": TORCH})
    assert description == f"task worker-1 on node 0 ended with exit code 1, as it ran out of memory ({TORCH}): {REMEDY}"
    assert "--accumulate" in REMEDY
    description = described("chief-0", {"out_of_memory": TF})
    assert description.startswith("task chief-0 on node 0 ended with exit code 1, as worker-1 ran out of memory (OOM when")
    description = described("worker-1", {"out_of_memory": None})
    assert description == "task worker-1 on node 0 ended with exit code 1 (SomeError: Graph execution error:)"


def test_kill_is_out_of_memory_if_the_kernel_counted_it():
    killed = {"code": None, "signal": "SIGKILL"}
    assert described("worker-1", **killed, oom_kills=1).endswith(f"it ran out of memory, most likely: {REMEDY}")
    for kills in (0, None):
        assert described("worker-1", **killed, oom_kills=kills) == "task worker-1 on node 0 was killed by SIGKILL"
    assert "memory" not in described("worker-1", code=None, signal="SIGSEGV", oom_kills=1)
