"""Tickets: pieces of a plan or of an evaluation, handed to workers as they become free.

A ticket that is lost with its worker goes back, less what was applied, so that exactly the planned updates are applied.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import split_evenly
from ...data.base import Split
from ...data.batching import Arranged
from ..base import CalibrationOrder, Plan, StepComponent

__all__ = ["MAX_COUNT", "EvalTicket", "Ticket", "TrainTicket", "cut_evaluation", "cut_plan", "decode", "encode"]

PIECES_PER_WORKER = 8
"""Pieces a plan is cut into for each worker, where it has that many updates: small enough that workers end together."""

MAX_COUNT = 512
"""Most updates of a ticket."""

_HEAD = struct.Struct("<cqqqqq")
_SPLITS: tuple[Split, ...] = ("train", "test")
_COMPONENTS: tuple[StepComponent, ...] = get_args(StepComponent)


@dataclass(frozen=True, slots=True)
class TrainTicket:
    """Consecutive updates of one epoch; `first_step`, `first_in_epoch`, `skip` and `arranged` as in `Plan`; one learning rate an update."""

    first_step: int
    epoch: int
    first_in_epoch: int
    learning_rates: NDArray[np.float64]
    skip: int = 0
    arranged: Arranged = ()

    @property
    def count(self) -> int:
        """Number of updates."""
        return len(self.learning_rates)

    def after(self, done: int) -> TrainTicket:
        """Return what is left after the first `done` updates."""
        rest = self.learning_rates[done:]
        return TrainTicket(self.first_step + done, self.epoch, self.first_in_epoch + done, rest, self.skip, self.arranged)


@dataclass(frozen=True, slots=True)
class EvalTicket:
    """The examples start … stop − 1 of a split."""

    split: Split
    start: int
    stop: int


Ticket = TrainTicket | EvalTicket | CalibrationOrder
"""An order to calibrate is a ticket for one worker alone."""


def cut_plan(plan: Plan, workers: int) -> list[TrainTicket]:
    """Cut a plan into tickets of nearly equal size."""
    pieces = max(min(plan.count, workers * PIECES_PER_WORKER), math.ceil(plan.count / MAX_COUNT))
    return [
        TrainTicket(
            plan.first_step + start, plan.epoch, plan.first_in_epoch + start, plan.learning_rates[start:stop], plan.skip, plan.arranged
        )
        for start, stop in split_evenly(plan.count, pieces)
    ]


def cut_evaluation(split: Split, size: int, workers: int, least: int) -> list[EvalTicket]:
    """Cut a split into tickets, a few for each worker, of at least `least` examples where there are as many."""
    pieces = max(1, min(4 * workers, size // least))
    return [EvalTicket(split, start, stop) for start, stop in split_evenly(size, pieces) if stop > start]


def encode(ticket: Ticket | None) -> bytes:
    """Return a ticket as bytes; None means that there will be no more."""
    if ticket is None:
        return _HEAD.pack(b"x", 0, 0, 0, 0, 0)
    if isinstance(ticket, EvalTicket):
        return _HEAD.pack(b"e", _SPLITS.index(ticket.split), ticket.start, ticket.stop, 0, 0)
    if isinstance(ticket, CalibrationOrder):
        return _HEAD.pack(b"c", _COMPONENTS.index(ticket.component), ticket.count, round(1e9 * ticket.seconds), 0, 0)
    head = _HEAD.pack(b"t", ticket.first_step, ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip)
    return head + np.asarray(ticket.learning_rates, dtype="<f8").tobytes() + np.array(ticket.arranged, dtype="<i8").tobytes()


def decode(data: bytes) -> Ticket | None:
    """Read what `encode` wrote. Raises ValueError where it is no ticket."""
    kind, first, second, third, count, skip = _HEAD.unpack_from(data)
    if kind == b"x":
        return None
    if kind == b"e":
        return EvalTicket(_SPLITS[first], second, third)
    if kind == b"c":
        return CalibrationOrder(_COMPONENTS[first], second, third / 1e9)
    rest = (len(data) - _HEAD.size) // 8 - count
    if kind != b"t" or count < 0 or rest < 0 or rest % 3 or (len(data) - _HEAD.size) % 8:
        raise ValueError("not a ticket of the parameter server")
    rates = np.frombuffer(data, dtype="<f8", count=count, offset=_HEAD.size)
    arranged = np.frombuffer(data, dtype="<i8", offset=_HEAD.size + 8 * count).reshape(-1, 3).tolist()
    return TrainTicket(first, second, third, rates.astype(np.float64), skip, tuple((*entry,) for entry in arranged))
