"""Is a user's own model the same on every host? The digest of its source."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UsageError
from ...core.plugins import NO_MODULE, model_base, module_exists

__all__ = ["ModelSource", "model_source", "package_path", "source_digest"]

MOST_BYTES = 64 * 2**20
"""Of a package's sources together."""

MOST_ENTRIES = 20_000
"""Files and folders of any kind in a package: large ones of Python have some thousand, and a folder of examples is no part of a model."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The SHA-256 over names and contents of the Python files of `package`, or of a module of this name."""

    package: str
    digest: str


def source_digest(model: str) -> str | None:
    """Return the digest alone of `model_source`."""
    source = model_source(model)
    return None if source is None else source.digest


def model_source(model: str) -> ModelSource | None:
    """Return the source of a model, which is named as in a job; None for a model that is no module of the user's.

    It is that of the top-level package in which the module lies, since a model imports its siblings; of one that is too large, that of the
    largest package within it that is not. Raises UsageError where there is no such module, or it is too large itself.
    """
    module = model_base(model)
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
    raise UsageError(
        f"model: {module!r} has more than {MOST_ENTRIES:,} files, or {MOST_BYTES >> 20} MiB of Python; is it the right package?"
    )


def package_path(name: str) -> Path | None:
    """Return where a package is, or a module's file; None for one that is no file."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None if spec.origin is None else Path(spec.origin)


def _python_files(name: str) -> dict[str, Path] | None:
    """Return the Python files of a package or module by their names in it; None where they are too many or too large."""
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if not folders:
        return {} if spec is None or spec.origin is None else {Path(spec.origin).name: Path(spec.origin)}
    found: dict[str, Path] = {}
    entries = size = 0
    for folder in folders:
        for at, subfolders, files in os.walk(folder):
            subfolders[:] = filter(str.isidentifier, subfolders)  # of others nothing can be imported
            entries += len(subfolders) + len(files)
            for path in (Path(at, file) for file in files if file.endswith(".py") and file[:-3].isidentifier()):
                if path.is_file():  # an editor leaves links that lead nowhere
                    found.setdefault(path.relative_to(folder).as_posix(), path)
                    size += path.stat().st_size
            if entries > MOST_ENTRIES or size > MOST_BYTES:
                return None
    return found


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
