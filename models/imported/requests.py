"""Requests to the process that reads a user's module; it imports torch, this one does not."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import UsageError
from ...core.process import child_working_directory, command_ending_with_parent, python

MAX_SECONDS = 600.0  # for importing, building and exporting a model
CHILD = "crosstrain.models.imported.torch.process"
_ADVICE = "Keep what trains or prints under `if __name__ == '__main__':`"


class Request(msgspec.Struct):
    """A request to the process with torch.

    `arguments`: as typed. `shape` and `classes`: of the data. `seed`: for initial values.
    """

    reference: str
    arguments: dict[str, str]
    shape: list[int]
    classes: int
    seed: int
    folder: str
    describe: bool


def ask(request: Request) -> None:
    """Have a process with torch write what is requested. Raises UsageError with its message."""
    Path(request.folder).mkdir(parents=True, exist_ok=True)
    command = command_ending_with_parent(python(CHILD))
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": child_working_directory()}
    try:
        child = subprocess.run(
            command,
            check=False,
            input=msgspec.json.encode(request),
            timeout=MAX_SECONDS,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            **output,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"model: importing {request.reference} took longer than {MAX_SECONDS:.0f} s. {_ADVICE}.") from error
    problem: Any = None
    with suppress(msgspec.DecodeError):
        problem = msgspec.json.decode(child.stdout, type=str | None)
        if child.returncode == 0 and problem is None:
            return
    if isinstance(problem, str):
        raise UsageError(problem)
    how = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"ended with code {child.returncode}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    raise UsageError(f"model: importing {request.reference} {how}{f': {lines[-1][:400]}' if lines else ''}. {_ADVICE}.")
