"""Dynamic scaling of the loss in fp16 (Micikevicius et al. 2018, "Mixed Precision Training"): the rule, one for every framework.

The gradients of a loss that was multiplied by a power of two lose fewer small numbers to fp16, and no bit besides. Where they overflow,
the update is left out and the scale halved; after `CLEAN_STEPS` updates without an overflow it doubles, up to `MOST_SCALE`.

The figures are those of OpenSeq2Seq. Its upper end is kept: a gradient of 4e-9 is a normal number of fp16 there, and a scale that may
always grow throws away an update every `CLEAN_STEPS` in search of its limit. Gradients that overflow at a scale of 1 are lost in fp16
whatever the scale: that is the end of the run, which would leave out every further update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import RunFailedError

__all__ = ["CLEAN_STEPS", "FIRST_SCALE", "LEAST_SCALE", "MOST_SCALE", "ChiefLossScale", "next_scale", "refuse_exhausted"]

FIRST_SCALE = MOST_SCALE = 2.0**14
LEAST_SCALE = 1.0
CLEAN_STEPS = 2000
"""Updates without an overflow after which the scale doubles."""


def _chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


def next_scale(
    scale: Any, clean: Any, finite: Any, *, where: Callable[[Any, Any, Any], Any] = _chosen, smaller: Callable[[Any, Any], Any] = min
) -> tuple[Any, Any]:
    """Return the scale, and the updates in a row without an overflow, after an update whose gradients were `finite` or not.

    Numbers, or a framework's scalars, with its own functions for a choice and for the smaller of two.
    """
    unbroken = where(finite, clean + 1, clean * 0)
    grows = unbroken >= CLEAN_STEPS
    kept = where(grows, smaller(scale * 2.0, MOST_SCALE), scale)
    return where(finite, kept, scale * 0.5), where(grows, clean * 0, unbroken)


def refuse_exhausted(scale: float) -> None:
    """Raise RunFailedError where a scale has been halved below the least."""
    if scale < LEAST_SCALE:
        raise RunFailedError(
            f"precision fp16: gradients are not finite even at the loss scale {LEAST_SCALE:g}, so that no update could be made any more; "
            "train with --precision bf16 or fp32, with a smaller --lr or a longer warm-up"
        )


class ChiefLossScale:
    """The same for async workers, which the chief tells the scale that they are to use, and learns from them what came of it.

    May be used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restore({})

    @property
    def scalars(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        with self._lock:
            return {"loss_scale": self.scale, "clean_steps": float(self._clean)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Take over what a checkpoint kept; begin anew where it kept nothing."""
        with self._lock:
            self.scale, self._clean = scalars.get("loss_scale", FIRST_SCALE), int(scalars.get("clean_steps", 0.0))

    def learn(self, given: float, ended: float, updates: int) -> None:
        """Take over what some updates of a worker found, which was `given` a scale and `ended` with another or the same.

        A lower one holds for all, whichever scale other workers still have; steps without overflow are counted over all workers. Raises
        RunFailedError where the scale is exhausted.
        """
        with self._lock:
            if ended < given:
                self.scale, self._clean = min(self.scale, ended), 0
                refuse_exhausted(self.scale)
                return
            self._clean += updates
            if self._clean >= CLEAN_STEPS:
                self.scale, self._clean = min(self.scale * 2.0, MOST_SCALE), 0
