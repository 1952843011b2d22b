"""A user's own model on a host: the digest of its source, and an attempt to import it.

``python -m crosstrain.launch.preflight.model_source MODEL BACKEND`` prints as JSON why its import fails, or null.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.bounded_json import UnreadableError, parse_json
from ...core.errors import UsageError
from ...core.plugins import BUILT_IN, NO_MODULE, find, forward_plugin, is_reference, load, model_base, module_exists
from ...core.process import child_working_directory, command_ending_with_parent, python
from ...models.imported.reference import TORCHVISION, read_reference

MAX_BYTES = 64 * 2**20  # total size limit of a package's sources
MAX_ENTRIES = 20_000  # limit of files and folders in a package: large Python packages have a few thousand


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A package or module, and the SHA-256 over names and contents of its Python files."""

    package: str
    digest: str


def model_source(model: str) -> ModelSource | None:
    """Return a model's source; None for a model that is no module of the user's.

    It is the module's top-level package, as a model imports its siblings, or the largest package below that is within the limits. Raises
    UsageError if there is no such module, or it is too large itself.
    """
    module = model_base(model)
    if is_reference(module):
        return _reference_source(module)
    if "." not in module:
        return None
    if not module_exists(module):
        raise UsageError(f"model: got {module!r}, {NO_MODULE}")
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        files = _python_files(package)
        if files is not None:
            return ModelSource(package, _digest(files))
    raise UsageError(f"model: {module!r} has more than {MAX_ENTRIES:,} files, or {MAX_BYTES >> 20} MiB of Python; is it the right package?")


def _reference_source(base: str) -> ModelSource | None:
    reference = read_reference(base)
    if reference.kind == TORCHVISION:  # its version is compared with the packages'
        return None
    if sources := reference.sources():
        return ModelSource(reference.place, _digest(sources))
    package = reference.place.partition(".")[0]
    files = _python_files(package)
    if not files:
        raise UsageError(f"model: got {base!r}, {NO_MODULE}")
    return ModelSource(package, _digest(files))


def package_path(name: str) -> Path | None:
    """Return a package's folder or a module's file; None if it has none."""
    if os.path.isabs(name):
        return Path(name)
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None if spec.origin is None else Path(spec.origin)


def _python_files(name: str) -> dict[str, Path] | None:
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if not folders:
        return {} if spec is None or spec.origin is None else {Path(spec.origin).name: Path(spec.origin)}
    sources: dict[str, Path] = {}
    entries = size = 0
    for folder in folders:
        for at, subfolders, files in os.walk(folder):
            subfolders[:] = filter(str.isidentifier, subfolders)  # others cannot be imported
            entries += len(subfolders) + len(files)
            for path in (Path(at, file) for file in files if file.endswith(".py") and file[:-3].isidentifier()):
                if path.is_file():  # an editor leaves links that lead nowhere
                    sources.setdefault(path.relative_to(folder).as_posix(), path)
                    size += path.stat().st_size
            if entries > MAX_ENTRIES or size > MAX_BYTES:
                return None
    return sources


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def import_problem(model: str, backend: str) -> str | None:
    """Return why a backend cannot import a user's model, by a child process. Main thread only."""
    if is_reference(model_base(model)) or model_base(model) in {plugin.name for plugin in BUILT_IN["model"]}:
        return None  # the node's own process with torch says what is wrong with a reference's
    command = command_ending_with_parent(python(__name__, model, backend))
    output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    child = subprocess.run(command, check=False, cwd=child_working_directory(), **output)
    if child.returncode == 0:
        with suppress(UnreadableError):  # the model's code may have ended the process in its own way
            problem = parse_json(child.stdout.encode())
            if problem is None or isinstance(problem, str):
                return problem
    how = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"ended with code {child.returncode}"
    lines = child.stderr.strip().splitlines()
    return f"model: importing {model_base(model)!r} fails: it {how}{f': {lines[-1]}' if lines else ''}"


def main(model: str, backend: str) -> None:
    """Import in this process; prints go to standard error, to keep standard output JSON."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    problem = None
    try:
        load(find("model", model), "model")
        load(forward_plugin(model, backend), "forward")
    except UsageError as error:
        problem = str(error)
    with os.fdopen(answer_to, "w", encoding="utf-8") as stream:
        json.dump(problem, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
