"""What an attention's mask has to be, the same on every framework."""

from __future__ import annotations

from ...core.errors import UsageError

__all__ = ["refuse_mask"]


def refuse_mask(kind: str, layer: int) -> None:
    """Raise UsageError for a mask whose values are of this kind, where that is not ``bool``. `layer` is the number of its dropout."""
    if kind != "bool":
        raise UsageError(
            f"model: the attention with the dropout number {layer} was given a mask of {kind}; bool is needed,"
            " [batch, heads, query time, key time] or what broadcasts to it, True where a key is attended to"
        )
