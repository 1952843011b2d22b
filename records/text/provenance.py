"""What a run was made with, in a few words: the code, and the instructions of a processor that training gains by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["code_text", "instructions_text"]

_COMMIT_DIGITS = 12
"""So many tell apart the commits of any repository, as far as anybody knows (git itself shows 7 or more)."""

_VECTOR_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm", "sme"),
)
"""Of x86 and Arm, as Linux calls them in /proc/cpuinfo: of some hundred flags those that decide how fast products are."""


def code_text(code: Mapping[str, Any] | None) -> str | None:
    """Return which code ran, from ``code`` of ``env.json``: crosstrain's release and commit, and that of the folder it was typed in.

    ``(changed)`` says that tracked files were not as in the commit, ``(perhaps changed)`` that this is not known. None where the run does
    not tell, as those of earlier releases.
    """
    if code is None:
        return None
    release, own, typed_in = (code.get("packages") or {}).get("crosstrain"), code.get("crosstrain"), code.get("typed_in")
    if release is None and own is None and typed_in is None:
        return None
    crosstrain = f"crosstrain{f' {release}' if release else ''}{f' at commit {_commit(own)}' if own else ''}"
    return f"{crosstrain}, typed in a work tree at commit {_commit(typed_in)}" if typed_in else crosstrain


def _commit(tree: Mapping[str, Any]) -> str:
    changed = {True: " (changed)", None: " (perhaps changed)"}.get(tree.get("changed"), "")
    return f"{tree['commit'][:_COMMIT_DIGITS]}{changed}"


def instructions_text(flags: Sequence[str] | None) -> str | None:
    """Return which instructions for vectors and matrices a processor has, by its flags; None where none of them is known of it."""
    known = frozenset(flags or ())
    return " ".join(flag for flag in _VECTOR_FLAGS if flag in known) or None
