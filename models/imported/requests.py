"""Requests to processes that read users' modules, as they import frameworks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from ...core.errors import UsageError
from ...core.process import child_working_directory, command_ending_with_parent, public_environment, python
from ...data.columns import LENGTHS, ColumnSpec

MAX_SECONDS = 600.0  # for importing, building and exporting a model
PIECE_BYTES, KEPT_PIECES = 1 << 14, 4  # of what the user's code prints
MAX_ANSWER_BYTES = 1 << 16
_ADVICE = "Keep what trains or prints under `if __name__ == '__main__':`"


@dataclass(frozen=True, slots=True)
class InputColumn(ColumnSpec):
    """A column of the data. `limit`: its whole numbers are below it, 0 if unknown."""

    limit: int = 0


class DataFacts(msgspec.Struct, frozen=True):
    """The columns that a module may read, its loss also `target`; "" for data without."""

    columns: tuple[InputColumn, ...]
    target: str

    @property
    def inputs(self) -> tuple[InputColumn, ...]:
        """The columns but the target."""
        return tuple(column for column in self.columns if column.name != self.target)

    def tensors(self, names: Collection[str]) -> list[str]:
        """Return the names of the tensors of columns, in order; see `ForwardContext`."""
        read = [column for column in self.columns if column.name in names]
        return [name for column in read for name in ([column.name, column.name + LENGTHS] if column.varies else [column.name])]


class Request(msgspec.Struct):
    """A request to the process with a model's framework.

    `arguments`: as typed. `outputs`: how many numbers are predicted for an example, 0 for a single one without a dimension of its own.
    `seed`: for initial values. `framework`: torch, or keras.
    """

    reference: str
    arguments: dict[str, str]
    data: DataFacts
    outputs: int
    seed: int
    folder: str
    describe: bool
    framework: str = "torch"


def ask(request: Request) -> None:
    """Have a process with the framework write what is requested.

    Raises UsageError with its message.
    """
    Path(request.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    ask_process(f"{__package__}.{request.framework}.process", msgspec.json.encode(request), f"importing {request.reference}")


def ask_process(module: str, content: bytes, doing: str) -> None:
    """Have a process of this module carry out a request.

    Raises UsageError with its message, or with what it was `doing`.
    """
    (problem,) = ask_processes([module], content, doing)
    if problem is not None:
        raise UsageError(problem)


def ask_processes(modules: Sequence[str], content: bytes, doing: str) -> list[str | None]:
    """Have a process of each module carry out a request, all together; return their problems.

    They see no GPU, and end with all that they have started.
    """
    with ExitStack() as stack:
        children = [stack.enter_context(_asked(module, content)) for module in modules]
        return [child.problem(doing) for child in children]


class _Child:
    """A process that carries out a request."""

    def __init__(self, process: subprocess.Popen[bytes], answer: IO[bytes], output: deque[bytes], reader: threading.Thread) -> None:
        self.process, self._answer, self._output, self._reader = process, answer, output, reader

    def problem(self, doing: str) -> str | None:
        """Wait for the end, and return the answer, or why there is none."""
        try:
            code = self.process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            return f"model: {doing} took longer than {MAX_SECONDS:.0f} s. {_ADVICE}."
        self.end()
        self._answer.seek(0)
        return _problem(doing, code, self._answer.read(MAX_ANSWER_BYTES), b"".join(self._output))

    def end(self) -> None:
        """Kill the process, and what the user's code has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(1.0)


@contextmanager
def _asked(module: str, content: bytes) -> Iterator[_Child]:
    output: deque[bytes] = deque(maxlen=KEPT_PIECES)
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(
            command_ending_with_parent(python(module)),
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=subprocess.PIPE,
            cwd=child_working_directory(),
            env={**public_environment(), "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        reader = threading.Thread(target=_keep_last, args=(process.stderr, output), name="output of a model", daemon=True)
        child = _Child(process, answer, output, reader)
        reader.start()
        try:
            _send(process, content)
            yield child
        finally:
            child.end()


def _send(child: subprocess.Popen[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError):  # it has ended, which its exit code explains
        if child.stdin is not None:
            child.stdin.write(content)
            child.stdin.close()


def _keep_last(stream: IO[bytes] | None, output: deque[bytes]) -> None:
    while stream is not None and (piece := os.read(stream.fileno(), PIECE_BYTES)):
        output.append(piece)
    if stream is not None:
        stream.close()


def _problem(doing: str, code: int, answer: bytes, output: bytes) -> str | None:
    problem: Any = None
    with suppress(msgspec.DecodeError):
        problem = msgspec.json.decode(answer, type=str | None)
        if code == 0 and problem is None:
            return None
    if isinstance(problem, str):
        return problem
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = output.decode(errors="replace").strip().splitlines()
    return f"model: {doing} {how}{f': {lines[-1][:400]}' if lines else ''}. {_ADVICE}."


def answer_request(answer: Callable[[bytes], str | None]) -> None:
    """Answer the request on standard input with a problem or null.

    What users' code prints goes to standard error.
    """
    answer_to = os.dup(1)
    os.dup2(2, 1)
    problem = answer(sys.stdin.buffer.read())
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(msgspec.json.encode(problem and problem.encode(errors="backslashreplace").decode()))
