"""Options that choose among a run's checkpoints, the same for every command that uses trained weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from ..checkpoint.selection import WEIGHTS, Selection
from ..core.errors import UsageError
from .options import IntegerRange

__all__ = ["checkpoint_options"]

_OPTIONS = (
    click.option(
        "--best", is_flag=True, help="The best checkpoint by the run's --keep-best, or by its first metric. [default: the newest]"
    ),
    click.option("--checkpoint", metavar="NAME|N", help="One of the run's checkpoints: step-000000500, or 500."),
    click.option(
        "--average-checkpoints",
        type=IntegerRange(1, 1000),
        default=1,
        metavar="N",
        help="The mean of the weights of the N newest checkpoints, or with --best of the N best. [default: 1]",
    ),
    click.option(
        "--weights",
        metavar="|".join(WEIGHTS),
        help="The moving average that --ema-decay keeps, or the trained weights. [default: the average where there is one]",
    ),
)


def checkpoint_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which is given what they ask for as `selection`, a `Selection`."""

    @functools.wraps(function)
    def selecting(*, best: bool, checkpoint: str | None, average_checkpoints: int, weights: str | None, **others: Any) -> None:
        function(selection=_selection(best, checkpoint, average_checkpoints, weights), **others)

    for option in reversed(_OPTIONS):
        selecting = option(selecting)
    return selecting


def _selection(best: bool, checkpoint: str | None, average_checkpoints: int, weights: str | None) -> Selection:
    """Raise UsageError for weights of no kind that there is."""
    if weights not in (None, *WEIGHTS):
        raise UsageError.of("--weights", weights, ", ".join(WEIGHTS), WEIGHTS)
    return Selection(best, checkpoint, average_checkpoints, weights)
