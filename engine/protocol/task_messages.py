"""Messages between the driver and its tasks, with bounds, as a node may be hostile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...backends.base import CalibrationOrder, CalibrationResult, EvalResult, Plan, StepResult
from ...data.base import Split
from ...metrics.base import MAX_SUMS
from ...models.decoding import Decoding, Hypothesis
from ...records.store.schema import Count, Seconds, StepRecord
from .node_messages import Duration, Name, Number, TaskReport, Text, ToTask

Elapsed = Seconds  # by TensorFlow's wall clock: negative where it was set back
Sums = Annotated[dict[Name, float], msgspec.Meta(max_length=MAX_SUMS)]
NonFinite = Literal["nan", "inf", "-inf"]  # after divergence, which ``--on-nan`` handles; JSON has no such numbers

# From tasks


class Ready(TaskReport):
    """The task is warm, with this number format and device (``cpu``, ``gpu``), None if unknown."""

    ARRIVES: ClassVar = "requested"

    precision_used: Name | None
    device_used: Name | None


class CompileTimed(TaskReport):
    """Times of a step with and without compilation; as many `tasks` report them."""

    ARRIVES: ClassVar = 1

    plain_seconds: Elapsed
    compiled_seconds: Elapsed | None
    reason: Text | None
    tasks: Number


class WorkerStalled(TaskReport):
    """The chief has waited too long for a worker."""

    ARRIVES: ClassVar = 1000

    worker: Number


class Done(TaskReport):
    """A command is done; `drain_seconds` were spent on training before it."""

    ARRIVES: ClassVar = "command"

    sequence: Count
    command: Name
    seconds: Duration
    drain_seconds: Duration


class Steps(TaskReport):
    """A group of updates: see `StepResult`."""

    ARRIVES: ClassVar = "command"
    ARRAYS: ClassVar = {"losses": ("<f4", 1), "staleness": ("<i8", 1)}
    OPTIONAL: ClassVar = frozenset({"staleness"})

    first_step: Count
    examples: Count
    seconds: Elapsed
    data_wait_seconds: Duration | None
    network_wait_seconds: Duration | None
    worker: Number | None
    profiled_seconds: Duration | None

    @classmethod
    def from_result(cls, result: StepResult) -> Steps:
        """Return the message of a result."""
        arrays: dict[str, NDArray[Any]] = {"losses": np.asarray(result.losses, dtype=np.float32)}
        if result.staleness is not None:
            arrays["staleness"] = np.asarray(result.staleness, dtype=np.int64)
        return cls(arrays=arrays, **{name: getattr(result, name) for name in _STEP_FIELDS})

    def result(self) -> StepResult:
        """Return the result."""
        return StepResult(
            **{name: getattr(self, name) for name in _STEP_FIELDS},
            losses=self.array("losses"),
            staleness=self.array("staleness") if "staleness" in self.arrays else None,
            profiled=self.profiled_seconds is not None,
        )


_STEP_FIELDS = ("first_step", "examples", "seconds", "data_wait_seconds", "network_wait_seconds", "worker", "profiled_seconds")


def step_record(result: StepResult, epoch: int, now: float, rates: NDArray[np.float64]) -> StepRecord:
    """Return the record of a step result: `now` in run seconds, `rates` of its updates."""
    return StepRecord(
        step=result.first_step,
        count=result.count,
        epoch=epoch,
        time_seconds=now,
        losses=tuple(result.losses.tolist()),
        learning_rates=tuple(_distinct(rates).tolist()),
        staleness=None if result.staleness is None else tuple(result.staleness.tolist()),
        **{name: getattr(result, name) for name in _STEP_FIELDS if name != "first_step"},
    )


class Evaluated(TaskReport):
    """An evaluation's sums, the answer to command `sequence`."""

    ARRIVES: ClassVar = "command"

    sequence: Count
    split: Name
    sums: Annotated[dict[Name, float | NonFinite], msgspec.Meta(max_length=MAX_SUMS)]
    seconds: Duration
    updates_applied: Count

    @classmethod
    def from_result(cls, result: EvalResult, sequence: int) -> Evaluated:
        """Return the message of a result."""
        sums = {name: value if math.isfinite(value) else str(float(value)) for name, value in result.sums.items()}
        return cls(sequence=sequence, split=result.split, sums=sums, seconds=result.seconds, updates_applied=result.updates_applied)  # type: ignore[arg-type]

    def result(self) -> EvalResult:
        """Return the result."""
        return EvalResult(self.split, {name: float(value) for name, value in self.sums.items()}, self.seconds, self.updates_applied)  # type: ignore[arg-type]


class Predicted(TaskReport):
    """Logits float32 [examples, classes] of the examples from `start` on."""

    ARRIVES: ClassVar = "command"
    ARRAYS: ClassVar = {"logits": ("<f4", 2)}

    start: Count


class Decoded(TaskReport):
    """A task's translation sums of an order; a heartbeat if not `complete`.

    `without_numbers` counts the sentences without finite log-probabilities.
    """

    ARRIVES: ClassVar = "command"

    start: Count
    sums: Sums
    without_numbers: Count
    seconds: Duration
    complete: bool

    @classmethod
    def heartbeat(cls, start: int) -> Decoded:
        """Return the heartbeat of an order."""
        return cls(start=start, sums={}, without_numbers=0, seconds=0.0, complete=False)


class Translated(TaskReport):
    """Each sentence's hypotheses, best first, the answer to command `order`."""

    ARRIVES: ClassVar = "command"
    ARRAYS: ClassVar = {
        **dict.fromkeys(("counts", "lengths", "pieces", "ended"), ("<i8", 1)),
        **dict.fromkeys(("scores", "log_probabilities"), ("<f8", 1)),
    }

    order: Count

    @classmethod
    def from_hypotheses(cls, translations: Sequence[Sequence[Hypothesis]], order: int) -> Translated:
        """Return the message of each sentence's hypotheses."""
        every = [hypothesis for hypotheses in translations for hypothesis in hypotheses]
        arrays = {
            "counts": np.array([len(hypotheses) for hypotheses in translations], np.int64),
            "lengths": np.array([len(hypothesis.pieces) for hypothesis in every], np.int64),
            "pieces": np.array([piece for hypothesis in every for piece in hypothesis.pieces], np.int64),
            "scores": np.array([hypothesis.score for hypothesis in every], np.float64),
            "log_probabilities": np.array([hypothesis.log_probability for hypothesis in every], np.float64),
            "ended": np.array([hypothesis.ended for hypothesis in every], np.int64),
        }
        return cls(order=order, arrays=arrays)

    def hypotheses(self, sentences: int) -> list[list[Hypothesis]]:
        """Return the hypotheses of so many sentences. Raises ValueError where counts do not match."""
        counts, lengths, pieces, ended, scores, totals = map(self.array, self.ARRAYS)
        fits = len(counts) == sentences and counts.min(initial=0) >= 0 and lengths.min(initial=0) >= 0 and int(counts.sum()) == len(lengths)
        if not fits or int(lengths.sum()) != len(pieces) or not len(lengths) == len(scores) == len(totals) == len(ended):
            raise ValueError(f"translations of {len(counts)} sentences that do not fit the {sentences} that were asked for")
        every = [
            Hypothesis(tuple(part.tolist()), score, total, bool(end))
            for part, score, total, end in zip(_cut(pieces, lengths), scores.tolist(), totals.tolist(), ended.tolist(), strict=True)
        ]
        ends = np.cumsum(counts).tolist()
        return [every[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _cut(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


class Calibrated(TaskReport):
    """A worker's figures."""

    ARRIVES: ClassVar = "command"

    result: CalibrationResult


# To tasks


class Compile(ToTask):
    """Whether to compile, the answer to `CompileTimed`."""

    compile: bool


class Close(ToTask):
    """End the session."""


class Command(ToTask, kw_only=True):
    """A command to leading tasks, which answer it with `Done`."""

    sequence: int = 0


def _distinct(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    return rates[:1] if len(rates) > 1 and np.all(rates == rates[0]) else rates


class Train(Command):
    """A plan; a constant learning rate is sent once."""

    ARRAYS: ClassVar = {"learning_rates": ("<f8", 1)}

    first_step: int
    count: int
    epoch: int
    first_in_epoch: int
    skip: int
    arranged: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_plan(cls, plan: Plan) -> Train:
        """Return the command of a plan."""
        fields = {name: getattr(plan, name) for name in Plan.__dataclass_fields__ if name != "learning_rates"}
        return cls(**fields, arrays={"learning_rates": _distinct(np.asarray(plan.learning_rates, np.float64))})

    def plan(self) -> Plan:
        """Return the plan."""
        rates = np.ascontiguousarray(np.broadcast_to(self.array("learning_rates"), (self.count,)))
        return Plan(self.first_step, self.count, self.epoch, self.first_in_epoch, rates, self.skip, self.arranged)


class Drain(Command):
    """Make the cluster quiescent."""


class Evaluate(Command):
    """Evaluate a split."""

    split: Split


class SendState(Command, tag="state"):
    """Send a copy of the state."""


class Load(Command):
    """Load the state that was sent before."""


class Predict(Command):
    """Send the logits of examples start … stop − 1."""

    split: Split
    start: int
    stop: int


class Decode(Command):
    """Translate and score sentences start … stop − 1, each leading task its share."""

    split: Split
    start: int
    stop: int
    decoding: Decoding


class Translate(Command):
    """Translate sentences, which end with END, as pieces and lengths."""

    ARRAYS: ClassVar = {"pieces": ("<i8", 1), "lengths": ("<i8", 1)}

    decoding: Decoding
    n_best: int

    @classmethod
    def from_sentences(cls, sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> Translate:
        """Return the command for sentences."""
        lengths = np.array([len(source) for source in sources], np.int64)
        pieces = np.concatenate([np.zeros(0, np.int64), *(np.asarray(source, np.int64) for source in sources)])
        return cls(decoding=decoding, n_best=n_best, arrays={"pieces": pieces, "lengths": lengths})

    def sources(self) -> list[NDArray[np.int64]]:
        """Return the sentences."""
        return _cut(self.array("pieces"), self.array("lengths"))


class Calibrate(Command):
    """Repeat a component."""

    order: CalibrationOrder
