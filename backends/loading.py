"""Find backends by name, built-in or from entry points, and check their interface."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import MissingPackageError, UsageError
from ..core.plugins import BUILT_IN, Plugin, find, load, missing_packages, plugin_code

if TYPE_CHECKING:
    from .base import Backend
    from .capabilities import Capabilities

MEMBERS = ("name", "capabilities", "probe", "placement", "preload", "open")


def load_backend(name: str) -> Backend:
    """Return a usable backend, framework not imported.

    Raises MissingPackageError, or UsageError for an unknown or incomplete one.
    """
    plugin = find("backend", name)
    backend = _complete(plugin, load(plugin, "backend"))
    for package in missing_packages(backend.capabilities.packages):
        raise MissingPackageError(f"backend {name!r} needs the package {package!r}, which is not installed. {install_hint(name)}")
    return backend


def declared_capabilities(plugin: Plugin) -> Capabilities:
    """Return what a backend declares, installed or not.

    Raises UsageError as `load_backend` does.
    """
    return _complete(plugin, load(replace(plugin, requires=""), "backend")).capabilities


def install_hint(name: str) -> str:
    """Return a sentence on how to install a backend's packages."""
    plugin = find("backend", name)
    install = declared_capabilities(plugin).install
    if install:
        return f"Install it with: {install}"
    return f"The documentation of the package {plugin.provider!r} says how to install it."


def _complete(plugin: Plugin, loaded: Any) -> Backend:
    from .capabilities import Capabilities  # imports the job, which agents, that only list packages, do without

    with plugin_code(plugin, "backend", "its declaration"):
        missing = [member for member in MEMBERS if not hasattr(loaded, member)]
    if missing:
        raise UsageError(f"backend {plugin.name!r} ({plugin.target}) is incomplete; missing: {', '.join(missing)}.")
    if not isinstance(loaded.capabilities, Capabilities):
        raise UsageError(
            f"backend {plugin.name!r} ({plugin.target}) has capabilities of the type {type(loaded.capabilities).__name__!r};"
            " they have to be crosstrain.backends.capabilities.Capabilities."
        )
    if plugin not in BUILT_IN["backend"]:
        _check_types(plugin, loaded.capabilities)
    backend: Backend = loaded
    return backend


def _check_types(plugin: Plugin, declared: Capabilities) -> None:
    from pydantic import TypeAdapter, ValidationError

    from ..core.bounded_json import first_problem

    try:
        TypeAdapter(type(declared)).validate_python({field.name: getattr(declared, field.name) for field in fields(declared)})
    except ValidationError as error:
        problem = first_problem(error)
        raise UsageError(f"backend {plugin.name!r} ({plugin.target}) declares capabilities that are none: {problem}.") from error


def recorded_packages(backend: str) -> dict[str, Sequence[str]]:
    """Return the modules to record, each with its possible distributions.

    A backend that cannot be loaded has none.
    """
    rows = BUILT_IN["backend"]
    packages: dict[str, Sequence[str]] = {row.requires: row.distributions for row in rows}
    if backend not in {row.name for row in rows}:
        try:
            packages.update(declared_capabilities(find("backend", backend)).packages)
        except UsageError:
            return packages
    return packages


TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)


def tune_malloc(most_bytes: int, piece_bytes: int, *, one_arena: bool) -> None:
    """Have the C library keep freed memory; only on Linux with glibc.

    It keeps up to `most_bytes` in pieces of `piece_bytes`, which each step would fault in again. Call it after loading data. `one_arena`:
    other threads' arenas hold no piece above 64 MiB.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, most_bytes)
        mallopt(MMAP_THRESHOLD, piece_bytes)
        if one_arena:
            mallopt(ARENA_MAX, 1)
