"""What settings are called in the names of runs and set-ups."""

from __future__ import annotations

__all__ = ["setting_text"]

_SWITCHES = frozenset({"on", "off", "true", "false", "none"})


def setting_text(label: str, text: str) -> str:
    """Return a setting in a name: words speak for themselves, numbers and switches need their label."""
    speaks = text.replace("-", "").isalpha() and text not in _SWITCHES
    return text if speaks else f"{label} {text}"
