"""Which releases a node has: of this program, the frameworks, and what both compute with; for ``env.json``. Nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["PACKAGES", "installed_versions"]

PACKAGES: Mapping[str, Sequence[str]] = {
    "crosstrain": ("crosstrain",),
    "numpy": ("numpy",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "torch": ("torch",),
}
"""What is looked for, and the distributions it comes in."""


def installed_versions() -> dict[str, str | None]:
    """Return the release of each of `PACKAGES` as its metadata has it; None where none of its distributions is installed."""
    return {name: _first(distributions) for name, distributions in PACKAGES.items()}


def _first(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
