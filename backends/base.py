"""The interface of a backend: the whole of what the engine asks of a framework.

A backend module is imported by the driver too, which runs no framework: import the framework inside `probe`, `preload` and `open` only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import Task, TaskSpec
from ..core.errors import UsageError
from ..core.job import Job
from ..core.update_rules import weights_to_evaluate
from ..data.augment import augmentation
from ..data.base import Dataset, Split
from ..data.batching import Arranged, batch_rule
from ..data.bucketing import example_lengths
from ..data.sampler import Batches, Sampler
from ..models.base import Array, ModelSpec
from ..models.objectives import COUNTED, Objective
from .capabilities import Capabilities
from .translating import Translating

__all__ = [
    "DIRECT_COMPONENTS",
    "Availability",
    "Backend",
    "CalibrationOrder",
    "CalibrationResult",
    "EvalResult",
    "Plan",
    "ReplacesWorkers",
    "Server",
    "Session",
    "State",
    "StepComponent",
    "StepResult",
    "batch_lengths",
    "calibration_batches",
    "make_sampler",
    "refuse_unweighted",
]

CALIBRATION_BATCHES = 2000
"""Batches that are gathered in turn while ``data`` is timed, at most: so many that they do not all stay in a cache."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What a framework can do here: its version and devices (``cpu``, ``gpu:0 NVIDIA …``), or `problem` and `hint`."""

    name: str
    version: str | None
    devices: tuple[str, ...] = ()
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A number of consecutive updates within one epoch, sent as one command.

    `first_step` counts updates from the start of the run, `first_in_epoch` those of the epoch, both from 0.
    `learning_rates` has one value an update, float64 [count]. `skip` is how many examples of the epoch a run that is resumed here had
    consumed before; `first_in_epoch` counts the updates after them. `arranged` is how the epoch's order had come about by then; a backend
    hands it to its sampler with `skip`.
    """

    first_step: int
    count: int
    epoch: int
    first_in_epoch: int
    learning_rates: NDArray[np.float64]
    skip: int = 0
    arranged: Arranged = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One or more consecutive updates that the framework carried out as a group.

    `losses`: float32 [count], the mean over the examples of each update's (global or worker) batch, before the update.
    `seconds`: wall time of the group. Waits: seconds spent waiting for data and for the network, None where not measured.
    Async: `worker` computed the group, and `staleness` int64 [count] is how many updates of others and its own were applied between
    the read of the parameters and the application of each update; None in sync mode.
    `profiled`: it was made while a worker traced its updates (``--profile``), this one or another: its time says nothing of the speed.
    `profiled_seconds` is then how long the leading task had trained since the result before, which includes starting and writing the
    trace; the engine fills it in.
    """

    first_step: int
    losses: Array
    examples: int
    seconds: float
    data_wait_seconds: float | None = None
    network_wait_seconds: float | None = None
    worker: int | None = None
    staleness: NDArray[np.int64] | None = None
    profiled: bool = False
    profiled_seconds: float | None = None

    @property
    def count(self) -> int:
        """Number of updates in the group."""
        return len(self.losses)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Sums over every example of a split, each counted exactly once, whatever the number of workers.

    `sums` are those of the model's objective, by name. `updates_applied` is the number of updates in the parameters that were evaluated,
    as counted where they are applied.
    """

    split: Split
    sums: Mapping[str, float]
    seconds: float
    updates_applied: int

    @classmethod
    def of(cls, objective: Objective, split: Split, size: int, sums: Sequence[float], seconds: float, updates_applied: int) -> EvalResult:
        """Return the result of a split of `size` examples from the vector of sums. Raises RuntimeError where it counted others."""
        named = objective.named(sums)
        if named[COUNTED] != size:
            raise RuntimeError(f"the evaluation counted {named[COUNTED]:g} examples of the {size} in split {split!r}")
        return cls(split, named, seconds, updates_applied)

    @property
    def examples(self) -> int:
        """How many examples were counted."""
        return int(self.sums[COUNTED])


@dataclass(frozen=True, slots=True)
class State:
    """All that training changes: canonical names, canonical layouts, numpy, nothing of the framework.

    `slots` maps slot name (those of `core.update_rules`) to values by parameter name. `buffers` are the model's
    (averaged over workers in sync mode). `updates` is the number of updates applied (Adam's t). `scalars` are further numbers that
    training changes (``loss_scale``, ``clean_steps`` with fp16).
    """

    parameters: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    updates: int = 0
    buffers: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def to_evaluate(self) -> State:
        """Return the weights that evaluations and translations use, with the buffers, as a state without slots; nothing is copied."""
        return State(weights_to_evaluate(self.parameters, self.slots), {}, self.updates, self.buffers)


StepComponent = Literal["data", "compute", "half", "communicate", "message", "direct", "direct_message", "direct_step"]
"""What a step consists of, as far as it can be repeated by itself:

- ``data``: gather, change and normalise a training batch
- ``compute``: forward, backward and (sync) update on the worker's batch, without communication; ``half``: the same on half of it
- ``communicate``: the exchange of one step alone; sync: all-reduce of the gradients; async: push a gradient, pull parameters
- ``message``: the same exchange with a few bytes in place of each message
- ``direct``, ``direct_message``: both with ``--exchange direct``; ``direct_step``: a whole step with it, from its batch to the update.
  They are asked for last, of a sync run that has trained with the native exchange on a backend that declares both
"""

DIRECT_COMPONENTS: tuple[StepComponent, ...] = ("direct", "direct_message", "direct_step")
"""Those of the direct exchange, in the order in which they are asked for."""


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """An order to repeat a component of a step: `count` times, and then on until `seconds` have passed.

    The first order for a component has the count 0: time to trace. Those in which sync ranks meet come with `seconds` 0, so that all ranks
    repeat them equally often; they had better meet once before the clock starts.
    """

    component: StepComponent
    count: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """What came of it on one worker: how many repetitions there were and what they took together.

    `native` has further figures of the framework's own about the run that has ended, by name; some answers carry them, most none.
    `refused`: why ``direct`` cannot be repeated here, empty where another worker has the reason. It is the answer to the first order for
    it, on every worker; then no other follows.
    """

    worker: int
    count: int
    seconds: float
    native: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None


class Session(Protocol):
    """A leading task at work. Methods are called from the task's main thread, one after another, on every rank alike in sync mode."""

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply exactly `plan.count` updates and yield results as they finish.

        Sync: every update of the plan has been applied when the iterator ends. Async: the iterator ends as soon as the next plan may be
        handed in without a worker falling idle; it may yield results of earlier plans, and what is outstanding comes from a later
        `train` or from `drain`. Results cover each step of each plan exactly once.
        """
        ...

    def drain(self) -> Iterator[StepResult]:
        """Make the cluster quiescent: yield everything outstanding. The engine calls it before `evaluate`, `state`, `load` and `close`."""
        ...

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate on every example of a split exactly once, with the current parameters, or their moving average where the job keeps one.

        `core.update_rules.weights_to_evaluate` says which, here and in `translating`. Raises RuntimeError where the count is off.
        """
        ...

    def state(self) -> State:
        """Return a copy of the state (complete on the first leading task; others may return it too).

        The copy lies in memory that the session keeps for it: the next call overwrites it, and training goes on meanwhile.
        """
        ...

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Return the logits of examples start … stop − 1, float32 [stop − start, classes]. Called on a single sync worker only."""
        ...

    def translating(self) -> Translating:
        """Return what translates with the weights that `evaluate` uses, of a model whose objective translates; asked for before each use.

        Called on every leading task alike, when nothing is outstanding and no copy of the state is under way. Each takes its share of a
        dataset's sentences.
        """
        ...

    def load(self, state: State | None) -> None:
        """Replace the state; slots that are absent become zeros.

        Given on the first leading task, None on the others; the backend spreads it.
        """
        ...

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Have every worker repeat a component of a step, all at once; sync: return this rank's figures, async: every worker's.

        Called when training is over, on every leading task alike. The state is worthless afterwards; only `close` may follow, or
        further calls.
        """
        ...

    def close(self) -> None:
        """Leave the cluster in good order; a second call does nothing."""
        ...


class ReplacesWorkers(Protocol):
    """What the leading session of an async run has besides, where its backend declares that workers rejoin (`Capabilities.rejoins`)."""

    on_stalled_worker: Callable[[int], None] | None
    """To be called, from the task's main thread, with the number of a worker that others, which are idle, have awaited for most of the
    job's `stall_timeout`: it is ended, and another process takes its place. None: the session raises StalledRunError after that time, as
    it does in any case where no worker gets on."""


class Server(Protocol):
    """A task that only serves: an async worker or parameter server."""

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set or the chief says so. Waits in Python, so that signals keep working."""
        ...


class Backend(Protocol):
    """A framework, and what of a job it can carry out; the core hands it no job that asks for more."""

    @property
    def name(self) -> str:
        """What ``--backend`` takes."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it declares; known without the framework."""
        ...

    def probe(self) -> Availability:
        """Import the framework and say what is found. Called in a process of its own."""
        ...

    def placement(self, job: Job) -> list[TaskSpec]:
        """Return every task of the job: role, index, node. Imports no framework.

        Asked again, with fewer nodes (from 0), where a run goes on without some; UsageError for a number of nodes that cannot be.
        """
        ...

    def preload(self, job: Job) -> None:
        """Import the framework, with what has to be set before `open`; called as early as a task's process exists.

        What is set before the import may depend on the job's ``deterministic`` and ``threads``, and on nothing else of it. A backend that
        declares `forks` is called twice for such a task: in the process that it is forked from, maybe for another such job, and in its own.
        """
        ...

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up.

        Ends warm: imports, cluster, first trace and first kernels are done on throw-away state, and the state is the model's initial
        one with zero updates. Returns a Session on a leading task, a Server on every other. Raises OSError with errno EADDRINUSE
        where a reserved port was taken meanwhile.
        """
        ...


def make_sampler(job: Job, data: Dataset, weight: str = COUNTED) -> Sampler:
    """Return the run's data order, with the changes of its images; every task derives the same one.

    `weight` is the objective's: the sum that the sum of the losses is divided by. Raises UsageError where the job asks for changes that
    the data does not allow, or where the data has no such weights, or an example weighs nothing.
    """
    weights = None if weight == COUNTED else data.weights("train", weight)
    changes = augmentation(job.augment, data.info)
    lengths = batch_lengths(job, data)
    try:
        return Sampler(data.info.sizes["train"], job.seed, batch_rule(job), job.workers, changes, weights, lengths)
    except ValueError as error:
        raise UsageError(f"data: the training examples of {data.info.name!r} cannot be weighted by {weight}: {error}") from error


def batch_lengths(job: Job, data: Dataset) -> dict[str, NDArray[np.int64]] | None:
    """Return the lengths of the training examples, by which a job's batches are filled, or those before it in the same epoch.

    Raises UsageError where the job fills batches by tokens and the data has none.
    """
    lengths = example_lengths(data)
    if job.batch_tokens is not None and (lengths is None or min(int(found.min()) for found in lengths.values()) < 1):
        raise UsageError(
            f"batch_tokens: got {job.batch_tokens}, but the examples of {data.info.name!r} are no sequences of tokens; "
            "give --batch-size, or choose a dataset of text: trainer data list"
        )
    return lengths


def refuse_unweighted(job: Job, data: Dataset, weight: str = COUNTED) -> None:
    """Raise UsageError where losses or evaluations would be divided by nothing: a training example, or all test examples, of no weight."""
    make_sampler(job, data, weight)
    if weight != COUNTED and not data.weights("test", weight).any():
        raise UsageError(
            f"data: the test examples of {data.info.name!r} have no {weight} at all, so that no evaluation can be divided by them"
        )


def calibration_batches(sampler: Sampler, rank: int | None = None) -> Batches:
    """Return the training batches that are repeated to calibrate: the first of an epoch, as many as are full (one at least).

    Of a sync rank its slices, of as many examples in every step; without `rank` those that async workers take.
    """
    steps = min(CALIBRATION_BATCHES, sampler.steps_per_epoch)
    if sampler.rule.buckets is not None:
        return sampler.whole(0, 0, steps) if rank is None else sampler.for_rank(0, 0, steps, rank)
    sizes = np.diff([sampler.examples_before(step) for step in range(steps + 1)])
    full = sizes == sizes[0] if rank is not None else sizes >= sizes[: sampler.workers].min()
    count = steps if full.all() else int(np.argmin(full))
    return sampler.whole(0, 0, count) if rank is None else sampler.for_rank(0, 0, count, rank)
