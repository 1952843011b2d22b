"""What torch.compile needs and leaves: a compiler for C++, a folder for what it has compiled, and processes that end with it."""

from __future__ import annotations

import os
import shutil
import signal
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "end_children_of", "missing", "set_up"]

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it has compiled. A user may name a folder that outlasts a run."""

TICK_SECONDS = 0.05


def missing() -> str | None:
    """Return what torch.compile lacks here, with what installs it; None where there is all."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0] if compiler.strip() else "g++") is None:
        return f"torch.compile needs a C++ compiler, and there is no {compiler!r} here: apt install g++, or name another by CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python's headers, which are not here: apt install python3-dev"
    return None


def set_up() -> None:
    """Import the compiler, with its files among the task's temporary ones and no processes of its own beside those that compile."""
    os.environ.setdefault(CACHE_VARIABLE, os.path.join(os.environ.get("TMPDIR") or tempfile.gettempdir(), "torchinductor"))
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes
    torch._inductor.config.cpp.threads = torch.get_num_threads()  # also where another thread compiles
    torch._dynamo.config.optimize_ddp = False  # which would cut a forward pass along DDP's buckets


def end_children_of(thread: threading.Thread) -> None:
    """End the processes that a thread starts and waits for, until it has ended; returns at once."""

    def end() -> None:
        while thread.is_alive():
            for pid in list(_descendants(f"/proc/self/task/{thread.native_id}/children")):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(TICK_SECONDS)

    threading.Thread(target=end, name="end of compiling", daemon=True).start()


def _descendants(children: str) -> Iterator[int]:
    """Yield the processes in a file of the kernel's that lists children, each after those below it."""
    try:
        found = [int(pid) for pid in Path(children).read_text().split()]
    except OSError:  # has ended meanwhile
        return
    for pid in found:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                yield from _descendants(f"/proc/{pid}/task/{task}/children")
        yield pid
