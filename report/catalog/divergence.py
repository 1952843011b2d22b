"""Did a run stop training, as its loss was NaN or infinite from some update to its end?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .summary_rows import number

__all__ = ["diverged", "diverged_text"]


def diverged(summary: Mapping[str, Any]) -> str | None:
    """Return since when the loss was not finite to the end of a run, such as ``from step 3 on``; None where it was finite at the end.

    A run of an earlier release does not say it: there the loss of the last updates and that of the last evaluation tell, without the step.
    """
    if (step := summary.get("non_finite_from_step")) is not None:
        return f"from step {step:,} on"
    losses = (number(value) for value in (summary.get("final_train_loss"), (summary.get("eval") or {}).get("loss")))
    return "at the end" if all(loss is not None and not math.isfinite(loss) for loss in losses) else None


def diverged_text(summary: Mapping[str, Any]) -> str | None:
    """Return what has to be said of such a run in a sentence, None of any other."""
    since = diverged(summary)
    return None if since is None else f"The loss was not finite (NaN or infinite) {since}: speed and resources are not those of training."
