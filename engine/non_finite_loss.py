"""What a run does when its loss is NaN or infinite (``--on-nan``).

An update that is skipped because fp16's loss scaling overflowed is no such case: only its gradients overflowed, its loss is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RunFailedError

__all__ = ["LossGuard"]


class LossGuard:
    """Looks at every loss of a run. `tell` is called once with a sentence for the user, where training goes on all the same."""

    def __init__(self, on_nan: Literal["fail", "continue"], rate: float, tell: Callable[[str], None]) -> None:
        self._fails = on_nan == "fail"
        self._rate = rate
        self._tell = tell
        self._told = False

    def trained(self, first_step: int, losses: NDArray[Any], rates: NDArray[Any]) -> None:
        """Take the losses of consecutive updates and their learning rates, [k] each. Raises RunFailedError where one ends the run.

        `first_step` counts from 0, as the records do; a person reads of the first step as step 1, as in the progress.
        """
        self._rate = float(rates[-1])
        if bad := np.flatnonzero(~np.isfinite(losses)).tolist():
            number = first_step + bad[0]
            record = f" (number {number} in steps.jsonl, which counts from 0)"
            self._not_finite(f"the loss of step {number + 1:,}", float(losses[bad[0]]), float(rates[bad[0]]), record)

    def evaluated(self, step: int, split: str, loss: float) -> None:
        """Take the loss of an evaluation after `step` updates. Raises RunFailedError where it ends the run."""
        if not np.isfinite(loss):
            self._not_finite(f"the {split} loss after {step:,} steps", loss, self._rate)

    def _not_finite(self, what: str, loss: float, rate: float, record: str = "") -> None:
        kind = "not a number" if np.isnan(loss) else "infinite"
        cause = f"{what} is {kind}{record}, at the learning rate {rate:g}; a smaller --lr may help"
        if self._fails:
            raise RunFailedError(f"{cause} (--on-nan continue trains on)")
        if not self._told:
            self._told = True
            self._tell(f"{cause}; training continues (--on-nan continue)")
