"""Has memory run out? What errors of the system and of the frameworks say of it, and what the kernel counts."""

from __future__ import annotations

import errno
import re
from pathlib import Path

__all__ = ["REMEDY", "kernel_oom_kills", "told_of", "worker_in"]

REMEDY = (
    "a smaller --batch-size, or of text --batch-tokens, needs less (--accumulate N makes updates as large again from N such batches), "
    "and so do fewer workers on a node"
)

_TOLD = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|failed to allocate memory|OOM when allocating|std::bad_alloc"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
"""How torch (DefaultCPUAllocator, CUDA), TensorFlow, the C++ library, numpy and the system say it; frameworks raise general errors."""

_TF_WORKER = re.compile(r"/job:worker/replica:\d+/task:(\d+)/")


def told_of(error: BaseException | None) -> str | None:
    """Return in a line what an error, or what it was raised because of, says of memory that ran out; None where it does not."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        line = next((line.strip() for line in str(error).splitlines() if _TOLD.search(line)), None)
        if line is not None:
            return line[:1000]
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return f"{type(error).__name__}: {error}"[:1000].rstrip(": ")
        error = error.__cause__
    return None


def worker_in(line: str) -> str | None:
    """Return the worker that TensorFlow names in such a line: the one that asked for the memory may not be the one that raises."""
    found = _TF_WORKER.search(line)
    return f"worker-{found[1]}" if found else None


def kernel_oom_kills() -> int | None:
    """Return how many processes of this machine the kernel has killed since it started, as memory ran out; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill"), None)
