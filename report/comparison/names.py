"""What settings are called in the names of runs and set-ups, and how several names are listed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["setting_text", "some_of"]

MOST_NAMED = 4

_COUNTED = frozenset({"nodes", "workers", "parameter servers"})

_SWITCHES = frozenset({"on", "off", "true", "false", "none"})


def setting_text(label: str, text: str) -> str:
    """Return a setting in a name: words speak for themselves, numbers and switches need their label: ``lr 0.1``, ``3 nodes``."""
    if label in _COUNTED and text.replace(",", "").isdigit():
        return f"{text} {label.removesuffix('s') if text == '1' else label}"
    speaks = text.replace("-", "").isalpha() and text not in _SWITCHES
    return text if speaks else f"{label} {text}"


def some_of(names: Sequence[str]) -> str:
    """Return names in a row, of many the first few and how many more there are; names with commas have semicolons between."""
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ("; " if any("," in name for name in names) else ", ").join([*names[:MOST_NAMED], *more])
