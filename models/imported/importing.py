"""Imported models as `ModelSpec`s, from descriptions that a process with torch writes; this process imports no framework."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...core.drafts import replacing
from ...core.errors import MissingPackageError, UsageError
from ...core.process import child_working_directory, command_ending_with_parent, python
from ...data.base import IMAGE, LABEL, DataInfo
from ...data.store.location import cache_root
from ..base import Array, ParameterSpec
from .description import BUFFER, Description, Imported, ImportedSpec, initial_file, read_description, source_digest
from .reference import read_reference

MAX_SECONDS = 600.0  # for importing, building and exporting a model
CHILD = "crosstrain.models.imported.torch.process"
_ADVICE = "Keep what trains or prints under `if __name__ == '__main__':`"


class Request(msgspec.Struct):
    """What the process with torch is asked for. `arguments`: as typed; `shape`, `classes`: of the data; `seed` for initial values."""

    reference: str
    arguments: dict[str, str]
    shape: list[int]
    classes: int
    seed: int
    folder: str
    describe: bool


def build(text: str, data: DataInfo) -> ImportedSpec:
    """Return the spec of a model ``REFERENCE[?key=value&…]`` for this data. Raises UsageError."""
    base, question_mark, rest = text.partition("?")
    reference = read_reference(base)
    if question_mark and not rest:
        raise UsageError(f"model: got {text!r}, where nothing follows '?'; write {base}?key=value&key=value, or leave '?' out.")
    arguments = _arguments(text, rest)
    facts: dict[str, Any] = {"reference": reference.text, "arguments": arguments, "shape": list(data.input_shape), "classes": data.classes}
    folder = _folder(facts)
    description = read_description(folder)
    if description is None:
        _ask(Request(**facts, seed=0, folder=str(folder), describe=True))
        description = read_description(folder)
        if description is None:
            raise UsageError(f"model: a source of {reference.text} changed while it was read. Try again.")
    return _spec(reference.text, facts, folder, description, data)


def _arguments(text: str, rest: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for part in rest.split("&") if rest else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise UsageError(f"model: got {part!r} in {text!r}; write key=value, with '&' between two of them.")
        if key in arguments:
            raise UsageError(f"model: got {key!r} twice in {text!r}; give it once.")
        arguments[key] = value
    return arguments


def _folder(facts: Mapping[str, Any]) -> Path:
    try:
        torch = version("torch")
    except PackageNotFoundError as error:
        raise MissingPackageError(
            "model: an nn.Module needs torch, also to be trained on TensorFlow. Install it with: pip install 'crosstrain[torch]'"
        ) from error
    key = json.dumps([facts, torch, version("crosstrain")], sort_keys=True)
    return cache_root().parent / "models" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _spec(reference: str, facts: Mapping[str, Any], folder: Path, description: Description, data: DataInfo) -> ImportedSpec:
    settings = Imported(reference, folder, (IMAGE,), tuple(description.kernels), tuple(description.dropouts), facts)
    return ImportedSpec(
        name=reference,
        parameters=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.parameters.items()),
        input_shape=data.input_shape,
        classes=description.classes,
        multiply_adds=description.multiply_adds,
        buffers=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.buffers.items()),
        dropout=bool(description.dropouts or description.problems),
        inputs=(IMAGE,),
        target=LABEL,
        settings=settings,
        problems=description.problems,
        source=source_digest(description.sources),
    )


def initial_values(imported: Imported, seed: int) -> Mapping[str, Array]:
    """Return a model's own initial values of parameters and buffers for a seed."""
    path = initial_file(imported.folder, seed)
    if not path.exists():
        _ask(Request(**imported.request, seed=seed, folder=str(imported.folder), describe=False))
    with np.load(path, allow_pickle=False) as file:
        return {name.removeprefix(BUFFER): file[name] for name in file.files}


def _ask(request: Request) -> None:
    """Have a process with torch write what is asked for. Raises UsageError with what it says is wrong."""
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


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write named arrays, replacing the file at once."""
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, **values)
