"""From a backend's name to the backend: ours and those of entry points alike, with what every one of them has to have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.errors import MissingPackageError, UsageError
from ..core.plugins import Plugin, find, load, missing_packages
from .base import Backend
from .capabilities import Capabilities

__all__ = ["declared_capabilities", "install_hint", "load_backend"]

MEMBERS = ("name", "capabilities", "probe", "placement", "preload", "open")
"""What the core uses of a backend."""


def load_backend(name: str) -> Backend:
    """Return a backend that can be used here; its framework is not imported.

    Raises MissingPackageError where its framework is not installed, UsageError where there is no such backend or it is incomplete.
    """
    plugin = find("backend", name)
    backend = _complete(plugin, load(plugin, "backend"))
    for package in missing_packages(backend.capabilities.packages):
        raise MissingPackageError(f"backend {name!r} needs the package {package!r}, which is not installed. {install_hint(name)}")
    return backend


def declared_capabilities(plugin: Plugin) -> Capabilities:
    """Return what a backend declares, whether its framework is installed or not. Raises UsageError as `load_backend` does."""
    return _complete(plugin, load(replace(plugin, requires=""), "backend")).capabilities


def install_hint(name: str) -> str:
    """Say in a sentence how to install what a backend needs."""
    plugin = find("backend", name)
    install = declared_capabilities(plugin).install
    if install:
        return f"Install it with: {install}"
    return f"The documentation of the package {plugin.provider!r} says how to install it."


def _complete(plugin: Plugin, found: Any) -> Backend:
    """Return what a plugin stands for, if it is a backend. Raises UsageError."""
    lacking = [member for member in MEMBERS if not hasattr(found, member)]
    if lacking:
        raise UsageError(f"backend {plugin.name!r} ({plugin.target}) is incomplete; missing: {', '.join(lacking)}.")
    if not isinstance(found.capabilities, Capabilities):
        raise UsageError(
            f"backend {plugin.name!r} ({plugin.target}) has capabilities of the type {type(found.capabilities).__name__!r};"
            " they have to be crosstrain.backends.capabilities.Capabilities."
        )
    backend: Backend = found
    return backend
