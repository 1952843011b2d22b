"""What frameworks can do on this machine, kept from one command to the next: to ask takes seconds, as each is imported for it.

An answer holds for what it depends on: the interpreter and where it finds modules, the backend's own files, crosstrain's release, the GPUs,
their driver, and the variables that hide them. Where any of that is another now, or a problem was found, the framework is asked again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...backends.base import Availability
from ...core.plugins import available, find
from ...core.process import python
from ...core.untrusted.bounded_json import JsonObject, UnreadableError, read_json
from ...data.store.location import user_cache
from ...engine.backend_probe import probe_all
from ...monitor.gpu_devices import nvidia_hardware

__all__ = ["kept_file", "probe_kept"]

MOST_BYTES = 1_000_000

MOST_SOURCES = 5_000
"""Files of a backend's package that are looked at."""

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "XLA_FLAGS")
"""What decides whether a framework loads, and which GPUs it sees."""

DRIVER = Path("/proc/driver/nvidia/version")


class _Answer(JsonObject):
    """An answer as the file has it: of what it depends on a digest, and the fields of `Availability`."""

    holds_for: str
    version: str
    devices: list[str]


def kept_file() -> Path | None:
    """Return the file that keeps the answers, which may not exist; None for a user without a home."""
    folder = user_cache()
    return None if folder is None else folder / "probes.json"


def probe_kept(names: Iterable[str] | None = None, *, fresh: bool = False) -> list[Availability]:
    """Return what `probe_all` does, of what was asked before without asking again, unless `fresh`.

    A file that cannot be read, or that others may write to, is none, and a folder that cannot be written to keeps nothing.
    """
    wanted = list(available("backend") if names is None else names)
    now = {name: _holds_for(name) for name in wanted}
    kept = {} if fresh else _read()
    known = {name: answer for name, answer in kept.items() if now.get(name) == answer.holds_for}
    asked = {found.name: found for found in probe_all([name for name in wanted if name not in known])}
    sound = {name: found for name, found in asked.items() if found.problem is None and found.version is not None}
    if sound:
        new = {name: _Answer(holds_for=now[name], version=found.version or "", devices=[*found.devices]) for name, found in sound.items()}
        _write({**_read(), **new})
    return [asked[name] if name in asked else Availability(name, known[name].version, tuple(known[name].devices)) for name in wanted]


def _holds_for(name: str) -> str:
    """Return a digest of what an answer about a backend depends on."""
    module = find("backend", name).target.partition(":")[0]
    top = importlib.util.find_spec(module.partition(".")[0])
    folders = [] if top is None else top.submodule_search_locations or []
    sources = [str(top.origin)] if top is not None and top.origin else []
    sources += [file for folder in folders for file in _sources(folder)]
    found = {
        "python": [python(__name__)[0], sys.prefix, platform.python_version(), platform.release()],
        "crosstrain": importlib.metadata.version("crosstrain"),
        "modules": [[entry, _changed(entry)] for entry in sys.path if entry],
        "backend": [module, [[file, _changed(file)] for file in sources]],
        "gpus": [asdict(nvidia_hardware()), _changed(str(DRIVER)), _text(DRIVER)],
        "variables": [os.environ.get(variable) for variable in VARIABLES],
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _sources(folder: str) -> list[str]:
    """Return the Python files of a package, of a very large one the first."""
    found = (os.path.join(here, file) for here, _, files in os.walk(folder, followlinks=True) for file in files if file.endswith(".py"))
    return sorted(islice(found, MOST_SOURCES))


def _changed(path: str | None) -> list[int] | None:
    """Return when a file or folder was last changed, and its size: installing and removing a package changes the folder that it lies in."""
    try:
        found = os.stat(path or "")
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read() -> dict[str, _Answer]:
    path = kept_file()
    if path is None:
        return {}
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return {}
        found: Any = read_json(path, MOST_BYTES)
        return {str(name): _Answer.model_validate(answer) for name, answer in found.items()}
    except (OSError, UnreadableError, ValidationError, AttributeError):
        return {}


def _write(answers: dict[str, _Answer]) -> None:
    path = kept_file()
    if path is None:
        return
    draft: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=".probes.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({name: answer.model_dump() for name, answer in answers.items()}, file)
        os.replace(draft, path)
    except OSError:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
