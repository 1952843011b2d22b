"""Is a user's own model the same on every host? The digest of its source."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from ...core.errors import UsageError
from ...core.plugins import NO_MODULE, model_base, module_exists

__all__ = ["source_digest"]

MOST_BYTES = 64 * 2**20
"""Of a package's sources together."""


def source_digest(model: str) -> str | None:
    """Return the SHA-256 over names and contents of a model's Python files; None for a model that is no module of the user's.

    The model is named as in a job. Of a package all files count, of a module its own. Raises UsageError where there is no such module.
    """
    module = model_base(model)
    if "." not in module:
        return None
    if not module_exists(module):
        raise UsageError(f"model: got {module!r}, {NO_MODULE}")
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    files = [(path.relative_to(folder).as_posix(), path) for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    if spec is not None and spec.origin is not None and not files:
        files = [(Path(spec.origin).name, Path(spec.origin))]
    digest, size = hashlib.sha256(), 0
    for name, path in files:
        content = path.read_bytes()
        size += len(content)
        if size > MOST_BYTES:
            raise UsageError(f"model: the Python files of {module!r} have more than {MOST_BYTES >> 20} MiB; is it the right package?")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
