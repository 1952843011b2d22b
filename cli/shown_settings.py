"""What ``--print-config`` shows: every setting and personal option, and where its value came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.settings.personal import GivenOption
from ..core.settings.personal_options import PERSONAL_OPTIONS
from ..core.settings.sources import Resolved
from ..core.untrusted.console import json_text

__all__ = ["settings_as_json", "settings_as_text"]


def _shown(resolved: Resolved, personal: Mapping[str, GivenOption]) -> dict[str, tuple[Any, str]]:
    """Return the settings of the job and what the user alone gives, by name: the value and its source; an address without its secrets."""
    found = {key: (value, resolved.sources[key]) for key, value in resolved.job.model_dump(mode="json").items()}
    for name, option in PERSONAL_OPTIONS.items():
        given = personal.get(name)
        found[name] = (None, "default") if given is None else (option.shown(given.value), given.source)
    return found


def settings_as_json(resolved: Resolved, personal: Mapping[str, GivenOption]) -> str:
    """Write them as one JSON document: by name, the value and its source."""
    shown = _shown(resolved, personal)
    return json_text({key: {"value": value, "source": source} for key, (value, source) in shown.items()}, indent=2)


def settings_as_text(resolved: Resolved, personal: Mapping[str, GivenOption]) -> str:
    """Write a setting a line: name, value in JSON's notation, source; in columns."""
    rows = [(key, json_text(value), source) for key, (value, source) in _shown(resolved, personal).items()]
    width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for key, value, _ in rows if key not in PERSONAL_OPTIONS)
    return "\n".join(f"{key:<{width}}  {value:<{value_width}}  {source}" for key, value, source in rows)
