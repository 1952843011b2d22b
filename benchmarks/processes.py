"""Measured processes: equal environments, monitored, and removed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from crosstrain.core.process import die_with_parent

from .memory import TreeMemory

LAST_LINES = 15
POLL_SECONDS = 0.1
LOOKS_EVERY_SECONDS = 1.0
"""At the memory of all processes: seldom enough to cost nothing that is measured."""

GRACE_SECONDS = 20.0
"""For those that have nothing more to do, after the first one has ended."""

Start = Callable[..., "subprocess.Popen[Any]"]


def _start_child(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with this one, also where this one is killed."""
    return subprocess.Popen(argv, preexec_fn=partial(die_with_parent, os.getpid()), **options)


class MeasurementError(Exception):
    """A run that gave no figures, and why."""


def environment(extra: Mapping[str, str], *, gpu: bool = False) -> dict[str, str]:
    """Return this process's environment without variables that affect either side, plus `extra`.

    Without GPUs unless `gpu`.
    """
    steering = ("TRAINER_", "TF_", "OMP_", "MKL_", "KMP_", "GLOO_", "SLURM_", "TORCHELASTIC_")
    contract = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith(steering) and name not in contract) or name == "TRAINER_DATA_CACHE"
    }
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    return {**kept, **hidden, "TF_CPP_MIN_LOG_LEVEL": "1", "KERAS_BACKEND": "tensorflow", **extra}


class Group:
    """Processes of one run; leaving the block kills the rest and their descendants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[tuple[str, subprocess.Popen[Any]]] = []
        self._peaks: dict[str, int] = {}
        self._trees: dict[str, TreeMemory] = {}

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], popen: Start = _start_child) -> None:
        """Start a process whose output goes to files; `popen` may put it into a virtual node."""
        with open(self._folder / f"{name}.out", "wb") as out, open(self._folder / f"{name}.err", "wb") as err:
            process = popen(
                list(argv),
                env=dict(environment),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._processes.append((name, process))
        self._trees[name] = TreeMemory(process.pid)

    def wait_for(self, leader: str, timeout_seconds: float) -> str:
        """Wait for the leader's end and return its standard output.

        Raises MeasurementError if a process fails or after the time limit.
        """
        deadline = time.monotonic() + timeout_seconds
        process = dict(self._processes)[leader]
        next_look = 0.0
        while self._poll(leader, process) is None:
            for name, member in self._processes:
                if self._poll(name, member) not in (None, 0):
                    raise MeasurementError(self._failure(name, f"ended with code {member.returncode}"))
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOKS_EVERY_SECONDS
                self._trees[leader].look()
            if time.monotonic() > deadline:
                raise MeasurementError(self._failure(leader, f"has not ended after {timeout_seconds:.0f} s"))
            time.sleep(POLL_SECONDS)
        if process.returncode != 0:
            raise MeasurementError(self._failure(leader, f"ended with code {process.returncode}"))
        return (self._folder / f"{leader}.out").read_text(errors="replace")

    def peak_bytes(self, name: str) -> int | None:
        """Return the peak resident memory of an ended process and its awaited descendants.

        The largest process counts, as reported by wait4(2). None if `wait_for` did not wait for the process.
        """
        return self._peaks.get(name)

    def tree_bytes(self, name: str) -> int | None:
        """Return the sum of peak resident memory of a leader and its descendants, every second."""
        return self._trees[name].most_bytes

    def _poll(self, name: str, process: subprocess.Popen[Any]) -> int | None:
        """Return the exit code of an ended process.

        It is waited for here, since Popen does not report the process's usage.
        """
        if process.returncode is None:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._peaks[name] = usage.ru_maxrss * 1024
        return process.returncode

    def wait_for_rest(self, names: Sequence[str]) -> None:
        """Wait for the other processes to exit. Raises MeasurementError if one fails or remains."""
        deadline = time.monotonic() + GRACE_SECONDS
        for name in names:
            try:
                code = dict(self._processes)[name].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise MeasurementError(self._failure(name, "does not end")) from None
            if code != 0:
                raise MeasurementError(self._failure(name, f"ended with code {code}"))

    def _failure(self, name: str, what: str) -> str:
        written = "\n".join((self._folder / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        lines = [line[:500] for line in written.splitlines() if line.strip() and not line.startswith("RESULT ")]
        return "\n    ".join([f"{name} {what}", *lines[-LAST_LINES:]])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ask graceful where `trainer` or torchrun has children of its own to end, then kill."""
        running = [process for _, process in self._processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + (5.0 if running else 0.0)
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
