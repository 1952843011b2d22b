"""Which jobs the direct exchange is for."""

from __future__ import annotations

from ..core.direct_exchange import MOST_RANKS
from ..core.errors import UsageError

__all__ = ["gpu_error", "refuse_too_many"]


def refuse_too_many(ranks: int) -> None:
    """Raise UsageError for more ranks than a mesh connects."""
    if ranks > MOST_RANKS:
        raise UsageError(
            f"exchange: got 'direct', which connects each worker with each other one, {MOST_RANKS} at most, and this job has {ranks}; "
            "choose native."
        )


def gpu_error() -> UsageError:
    """Return the error about gradients that lie in the memory of a GPU."""
    return UsageError(
        "exchange: got 'direct', which adds up gradients in the host's memory; on GPUs native is better (nccl). "
        "Choose native, or --device cpu."
    )
