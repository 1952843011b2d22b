"""Interface of a backend.

A backend's module imports the framework only inside `probe`, `preload` and `open`.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from ..core.cluster import Task, TaskSpec, node_by_worker
from ..core.errors import RunFailedError, UsageError
from ..core.job import Job
from ..core.update_rules import weights_to_evaluate
from ..data.base import Dataset, Split
from ..data.batching import Arranged, batch_rule, example_lengths
from ..data.preprocessing import augmentation
from ..data.sampler import Batches, Sampler
from ..models.base import Array, ModelSpec
from ..models.losses import class_weights
from ..models.objectives import CLASS_WEIGHTS, COUNTED, Objective
from ..records.store.schema import Count, Index, Seconds
from .capabilities import Capabilities
from .decoding_functions import Translating

CALIBRATION_BATCHES = 2000  # so many that they do not all stay in a cache


@dataclass(frozen=True, slots=True)
class Availability:
    """Version and devices of a framework on this machine, or `problem` and `hint`.

    Devices are named ``cpu``, ``gpu:0 NVIDIA …``.
    """

    name: str
    version: str | None
    devices: tuple[str, ...] = ()
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Consecutive updates within an epoch, sent as one command.

    `first_step` counts updates from the start of the run, from 0. `learning_rates` float64 [count]. After a resume `skip` counts the
    epoch's examples consumed before, `first_in_epoch` the updates after them; `arranged` is the order until then, for the sampler.
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
    """Consecutive updates that the framework carried out as a group.

    `losses` float32 [count]: the mean over each update's (global or worker) batch, before it. `seconds`: wall time of all. `staleness`
    int64 [count], async: updates applied between read and application. `profiled`: traced, so the time does not show the speed.
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
    """Sums of an objective over a split, each example counted once.

    `updates_applied` are those in the evaluated parameters.
    """

    split: Split
    sums: Mapping[str, float]
    seconds: float
    updates_applied: int

    @classmethod
    def of(cls, objective: Objective, split: Split, size: int, sums: Sequence[float], seconds: float, updates_applied: int) -> EvalResult:
        """Return the result of a split of `size` examples.

        Raises RuntimeError where another number was counted.
        """
        named = objective.named(sums)
        if named[COUNTED] != size:
            raise RuntimeError(f"the evaluation counted {named[COUNTED]:g} examples of the {size} in split {split!r}")
        return cls(split, named, seconds, updates_applied)

    @property
    def examples(self) -> int:
        """Number of examples counted."""
        return int(self.sums[COUNTED])


@dataclass(frozen=True, slots=True)
class State:
    """All that training changes, in numpy, by canonical name and in canonical layouts.

    `slots` by slot (`core.update_rules`) and parameter. `updates`: Adam's t. `scalars`: ``loss_scale``, ``clean_steps`` with fp16.
    """

    parameters: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    updates: int = 0
    buffers: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def to_evaluate(self) -> State:
        """Return the weights to evaluate and translate with, and the buffers, without slots.

        Nothing is copied.
        """
        return State(weights_to_evaluate(self.parameters, self.slots), {}, self.updates, self.buffers)


StepComponent = Literal["data", "compute", "half", "communicate", "message", "direct", "direct_message", "direct_step"]
"""The components of a step that can be repeated by themselves:

``data``: gather, normalise a batch; ``compute``: forward, backward, (sync) update, ``half``: on half a batch; ``communicate``: exchange;
``message``: a few bytes instead; ``direct``, ``direct_message``: both with ``--exchange direct``, last; ``direct_step``: a whole step.
"""

DIRECT_COMPONENTS: tuple[StepComponent, ...] = ("direct", "direct_message", "direct_step")


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """Order to repeat a component `count` times, then until `seconds` have passed.

    `count` 0 comes first, to trace; `seconds` are 0 where ranks meet.
    """

    component: StepComponent
    count: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Number and total time of a worker's repetitions; `native`: the framework's own figures.

    `refused` answers the first ``direct`` order: why it is impossible, empty if another worker has the reason. No further one follows.
    """

    worker: Index
    count: Count
    seconds: Seconds  # by TensorFlow's wall clock: negative where it was set back
    native: Annotated[Mapping[str, float], msgspec.Meta(max_length=1000)] = field(default_factory=dict)
    refused: Annotated[str, msgspec.Meta(max_length=1 << 17)] | None = None


class Session(Protocol):
    """Leading task of a job.

    Its methods are called from the task's main thread, one at a time, in the same order on every rank in sync mode.
    """

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply exactly `plan.count` updates and yield results as they finish.

        Results cover each step exactly once. Sync: all are applied when the iterator ends. Async: it ends when the next plan can be queued
        without idle workers; later calls or `drain` yield the remaining results.
        """

    def drain(self) -> Iterator[StepResult]:
        """Make the cluster quiescent and yield everything outstanding.

        Called before `evaluate`, `state`, `load` and `close`.
        """

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate each example of a split once, with `weights_to_evaluate`.

        Raises RuntimeError where the count is wrong.
        """

    def state(self) -> State:
        """Return a copy of the state, in memory that the next call overwrites.

        It is complete on the first leading task.
        """

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Return logits of examples start … stop − 1, float32 [stop − start, classes].

        Called on a single sync worker only.
        """

    def translating(self) -> Translating:
        """Return the translator of this task's share, with the weights that `evaluate` uses.

        Called on every leading task before each use.
        """

    def load(self, state: State | None) -> None:
        """Replace the state; absent slots become zeros.

        Only the first leading task gets it; the backend broadcasts it.
        """

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Have every worker repeat a component, after training, which ruins the state.

        Sync: return this rank's figures, async: all.
        """

    def close(self) -> None:
        """Leave the cluster in good order; a second call does nothing."""


class ReplacesWorkers(Protocol):
    """Further interface of an async leading session whose workers rejoin.

    See `Capabilities.rejoins`.
    """

    on_stalled_worker: Callable[[int], None] | None  # called on the main thread with a worker that others wait for; None: StalledRunError


class Server(Protocol):
    """A task that only serves: an async worker or parameter server."""

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set or the chief ends it.

        Waits in Python, so that signals keep working.
        """


class Backend(Protocol):
    """A framework; it is given no job beyond its capabilities."""

    @property
    def name(self) -> str:
        """The value of ``--backend``."""

    @property
    def capabilities(self) -> Capabilities:
        """What it supports; known without the framework."""

    def probe(self) -> Availability:
        """Import the framework and report its version and devices. Called in a separate process."""

    def placement(self, job: Job) -> list[TaskSpec]:
        """Return every task of the job: role, index, node.

        Called again with fewer nodes (from 0); UsageError for an impossible number.
        """

    def preload(self, job: Job) -> None:
        """Import the framework; depends on ``deterministic`` and ``threads`` only.

        With `forks` also called before the fork.
        """

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up on throw-away state.

        Return a Session on a leading task, a Server on every other.
        The state is the model's initial one with zero updates. Raises OSError with errno EADDRINUSE if a reserved port was taken.
        """


def make_sampler(job: Job, data: Dataset, weight: str = COUNTED) -> Sampler:
    """Return the run's data order, the same in every task.

    Raises UsageError if data do not fit or an example has no weight.
    """
    weights = None if weight == COUNTED else _example_weights(job, data, weight)
    changes = augmentation(job.augment, data.info)
    lengths = batch_lengths(job, data)
    try:
        return Sampler(data.info.sizes["train"], job.seed, batch_rule(job), job.workers, changes, weights, lengths)
    except ValueError as error:
        raise UsageError(f"data: the training examples of {data.info.name!r} cannot be weighted by {weight}: {error}") from error


def _example_weights(job: Job, data: Dataset, weight: str) -> NDArray[np.integer] | NDArray[np.floating]:
    if weight != CLASS_WEIGHTS:
        return data.weights("train", weight)
    weights: NDArray[np.float64] = np.array(class_weights(job.loss, data.info))[data.column("train", data.info.target).values]
    return weights


def batch_lengths(job: Job, data: Dataset) -> dict[str, NDArray[np.int64]] | None:
    """Return the lengths by which training batches are filled.

    Raises UsageError for batches by tokens of data without tokens.
    """
    lengths = example_lengths(data)
    if job.batch_tokens is not None and (lengths is None or min(int(column.min()) for column in lengths.values()) < 1):
        raise UsageError(
            f"batch_tokens: got {job.batch_tokens}, but the examples of {data.info.name!r} are no sequences of tokens; "
            "give --batch-size, or choose a dataset of text: trainer data list"
        )
    return lengths


def refuse_unweighted(job: Job, data: Dataset, weight: str = COUNTED) -> None:
    """Raise UsageError where losses cannot be divided by a weight.

    That is where a training example, or all test examples together, have none.
    """
    make_sampler(job, data, weight)
    if weight not in (COUNTED, CLASS_WEIGHTS) and not data.weights("test", weight).any():
        raise UsageError(
            f"data: the test examples of {data.info.name!r} have no {weight} at all, so that no evaluation can be divided by them"
        )


def calibration_batches(sampler: Sampler, rank: int | None = None) -> Batches:
    """Return the first full batches of an epoch, at least one.

    They are slices of sync rank `rank`, or batches of async workers.
    """
    steps = min(CALIBRATION_BATCHES, sampler.steps_per_epoch)
    if sampler.rule.buckets is not None:
        return sampler.whole(0, 0, steps) if rank is None else sampler.for_rank(0, 0, steps, rank)
    sizes = np.diff([sampler.examples_before(step) for step in range(steps + 1)])
    full = sizes == sizes[0] if rank is not None else sizes >= sizes[: sampler.workers].min()
    count = steps if full.all() else int(np.argmin(full))
    return sampler.whole(0, 0, count) if rank is None else sampler.for_rank(0, 0, count, rank)


def find_interface(address: str) -> str:
    """Return the network interface that has the address (all of 127.0.0.0/8 are the loopback's).

    Raises RunFailedError where none has.
    """
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback and ":" not in address else address
    held: dict[str, str] = {entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if wanted not in held:
        raise RunFailedError(f"no network interface of this node has the address {address}; there are: {', '.join(sorted(held))}")
    return held[wanted]


def set_nccl_interface(address: str) -> None:
    """Restrict nccl to the interface with the address, unless NCCL_SOCKET_IFNAME is set.

    Raises RunFailedError without one.
    """
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={find_interface(address)}"  # = is exact: plain eth1 also matches eth10


def ranks_placement(job: Job) -> list[TaskSpec]:
    """Place sync workers: consecutive ranks on each node, all leading."""
    return [TaskSpec("worker", rank, node, leading=True) for rank, node in enumerate(node_by_worker(job.workers_by_node))]


def parameter_server_placement(job: Job, *, chief_is_first_ps: bool) -> list[TaskSpec]:
    """Place chief, parameter servers and workers.

    The chief and the first ps (the chief itself with `chief_is_first_ps`) are on node 0, further ps round robin.
    """
    chief = [TaskSpec("chief", 0, 0, leading=True)]
    first = 1 if chief_is_first_ps else 0
    servers = [TaskSpec("ps", index, index % job.nodes, leading=False) for index in range(first, job.ps)]
    workers = [TaskSpec("worker", index, node, leading=False) for index, node in enumerate(node_by_worker(job.workers_by_node))]
    return chief + servers + workers


@dataclass(frozen=True, slots=True)
class TensorFunctions:
    """Conversions on the CPU.

    Whole numbers become what forward functions are given: int32 on TensorFlow, int64 on torch.
    """

    tensor: Callable[[NDArray[Any]], Any]
    array: Callable[[Any], NDArray[Any]]


class HasTensors(Protocol):
    """Further interface of a backend whose sequence models `conformance.model_suite` compares."""

    def tensor_functions(self) -> TensorFunctions:
        """Import the framework and return them."""
