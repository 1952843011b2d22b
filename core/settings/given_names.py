"""Errors about a setting say it as it was given: the option, the variable, or the key and its file.

Whoever finds what is wrong may know the job alone, and not where its values came from: a dataset, a backend in a process of its own. Its
message begins with the field's name, ``data_dir: …``; here, where the sources are known, that becomes ``--data-dir: …``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .job_fields import flag_name

__all__ = ["key_of", "named"]


def key_of(field: str, origin: str) -> str:
    """Return what somebody has to look at to change a field whose value came from `origin` (`sources.Resolved`)."""
    if origin.startswith(("flag", "default")):
        return flag_name(field)
    if origin.startswith("environment "):
        return origin.split()[1]
    return f"{field} ({'in' if origin.startswith('file ') else 'from'} {origin})"


def named(message: str, sources: Mapping[str, str]) -> str:
    """Return a message that begins with fields (``ps: …``, ``epochs and steps: …``) with these as they were given.

    `sources` has the origin of each field that is meant; a message that begins with anything else stays as it is.
    """
    head, sign, rest = message.partition(": ")
    fields = head.split(" and ")
    if not sign or not all(field in sources for field in fields):
        return message
    return f"{' and '.join(key_of(field, sources[field]) for field in fields)}: {rest}"
