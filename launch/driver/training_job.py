"""The training of a run, and its part of ``job.json`` and ``summary.json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import State, batch_lengths, refuse_unweighted
from ...backends.capabilities import Exchange, refuse_unsupported
from ...backends.loading import load_backend
from ...checkpoint import described_data
from ...checkpoint.initial_weights import read_initial_weights
from ...core.cluster import Role, TaskSpec, to_procs_per_node
from ...core.errors import RunFailedError, TrainerError
from ...core.job import Job
from ...core.patterns import refuse_unmatched
from ...core.plugins import available, forward_plugin
from ...core.units import Target
from ...core.update_rules import check_model_width
from ...data.base import commonest_class_fraction, split_amounts
from ...data.batching import longer_than
from ...data.preprocessing import augmentation
from ...data.sampler import Sampler, padding_share, run_sampler
from ...data.sources.translation.tokenizer import pieces_digest
from ...data.store.stored_dataset import StoredDataset, open_dataset
from ...engine.loop_interfaces import TrainingTotals
from ...engine.translation import described, refuse_idle
from ...metrics.base import described_metrics
from ...models.base import ModelSpec
from ...models.build import build_model
from ...models.check.agreement import check_translation, known_cost, needs_check
from ...models.decoding import refuse_unscorable
from ...models.losses import resolved_loss
from ...models.objectives import refuse_uncomputable
from ...records.store.run_directory import RunState
from ...records.store.schema import Clock
from ...records.summary import DriverFacts, summarise
from .cluster_setup import refuse_empty_servers
from .recorder import PROFILE


@dataclass(frozen=True)
class TrainingJob:
    """A valid job with its data open and its tasks `placed`."""

    requested: Job  # the user's, for the records
    job: Job  # that of the tasks, on the nodes `places`
    model: ModelSpec
    data: StoredDataset
    placed: Sequence[TaskSpec]
    packages: Sequence[str]
    survives: frozenset[Role]  # the death of such a task does not end training
    places: tuple[int, ...]
    gpu_advice: str = ""  # how the framework finds GPUs
    rejoins: frozenset[Role] = frozenset()  # such tasks can restart alone
    exchanges: frozenset[Exchange] = frozenset({"native"})
    initial: State | None = None  # of a new run with ``--initial-weights``; otherwise the seed decides

    @classmethod
    def from_job(cls, job: Job, *, begins: bool = True) -> TrainingJob:
        """Open a job's data and build its model. Raises UsageError for an impossible job.

        A run that `begins` reads its initial weights; a resumed one has a checkpoint's.
        """
        data = open_dataset(job.data, job.data_dir)
        augmentation(job.augment, data.info)
        resolved = job.model_copy(update={"loss": resolved_loss(job.loss, data)})
        model = build_model(job.model, data.info, resolved.loss)
        refuse_unweighted(resolved, data, model.objective.weight)
        model.objective.check(Target.parse(job.until) if job.until else None, job.keep_best)
        refuse_idle(job, model.objective)
        described(job, model.objective, data.info.sizes["test"])  # raises if translations cannot be scored
        refuse_uncomputable(model.objective)
        if model.objective.translation is not None:
            refuse_unscorable(data, model.objective.translation)
        check_model_width(job, model.width)
        refuse_unmatched("weight_decay_except", job.weight_decay_except, [parameter.name for parameter in model.parameters])
        forward_plugin(job.model, job.backend)
        model.refuse(job)
        refuse_empty_servers(job, model)
        backend = load_backend(job.backend)
        declared = backend.capabilities
        refuse_unsupported(job, job.backend, declared)
        placed, packages = backend.placement(job), sorted(declared.packages)
        rejoins: frozenset[Role] = declared.rejoins if job.mode == "async" else frozenset()
        places = tuple(range(job.nodes))
        facts = (declared.survives, places, declared.gpu_install, rejoins, declared.exchanges)
        initial = None
        if begins and job.initial_weights is not None:
            weights = read_initial_weights(job.initial_weights, job.initial_weights_except, model, job.seed)
            initial = State(weights.parameters, buffers=weights.buffers)
            job = job.model_copy(update={"initial_weights": weights.file})
        return cls(job, resolved, model, data, placed, packages, *facts, initial)

    def check_translation(self, show: Callable[[str], None]) -> bool:
        """Compare a model's translation with the model itself, once.

        Return whether it was necessary. Raises UsageError if they differ.
        """
        job = self.requested
        if not needs_check(self.model, job.backend):
            return False
        if not available("backend")[job.backend].installed:
            show(f"{self.model.name} is not checked, as {job.backend} is not installed on this machine")
            return False
        show(f"checking once that {self.model.name} computes the same on {job.backend}")
        check_translation(job.model, job.data, job.data_dir, self.model, job.backend)
        return True

    def resized(self, places: Sequence[int]) -> TrainingJob:
        """Return the same training on these nodes. Raises RunFailedError if that is not possible.

        Learning rate, number of updates and examples (or tokens) per update stay the same: of the global batch in sync mode, of a worker's
        larger batch in async mode. Micro-batches keep their size and grow in number.
        """
        job, limits = self.requested, self.requested.cores_per_node
        if len(places) == job.nodes:
            return self
        by_node = tuple(job.workers_by_node[node] for node in places)
        workers, tokens = sum(by_node), job.batch_tokens
        batch: tuple[int | None, int | None] = (None, job.global_batch) if job.mode == "sync" else (job.per_worker_batch, None)
        if job.mode == "async" and job.accumulate > 1:
            batch = (None, job.per_worker_batch * workers)
        share = job.per_worker_batch if job.mode == "async" else math.ceil(job.global_batch / workers)
        accumulate = math.ceil(share / job.micro_batch) if job.accumulate > 1 else 1
        if tokens is not None:
            batch = (None, None)
            tokens = tokens if job.mode == "async" else tokens * job.workers * job.accumulate // (workers * accumulate)
        changed = {
            "nodes": len(places),
            "procs_per_node": to_procs_per_node(by_node),
            "batch_size": batch[0],
            "global_batch_size": batch[1],
            "batch_tokens": tokens,
            "accumulate": accumulate,
            "loss": self.job.loss,
            "cores_per_node": limits if limits is None or len(limits) == 1 else tuple(limits[node] for node in places),
        }
        resized = job.model_copy(update=changed)
        backend = load_backend(resized.backend)
        try:
            refuse_unsupported(resized, resized.backend, backend.capabilities)
            placed = backend.placement(resized)
        except (TrainerError, ValueError) as error:
            count = "1 node" if len(places) == 1 else f"{len(places)} nodes"
            raise RunFailedError(f"the run cannot go on with {count} ({error})") from error
        return replace(self, job=resized, placed=[replace(task, node=places[task.node]) for task in placed], places=tuple(places))

    @property
    def lengths(self) -> dict[str, NDArray[np.int64]] | None:
        """Token counts of the training examples, to fill batches; None without text."""
        return batch_lengths(self.job, self.data)

    @property
    def node_of_worker(self) -> dict[int, int]:
        """The node of each worker, by its index."""
        return {task.index: task.node for task in self.placed if task.role == "worker"}

    @property
    def data_description(self) -> dict[str, Any]:
        """The data as in ``job.json`` and checkpoints."""
        return described_data(self.data.info, self.data.digest, self.requested.data_dir, pieces_digest(self.data))

    @property
    def document(self) -> dict[str, Any]:
        """The part of ``job.json`` that depends on neither command nor cluster."""
        return {
            **self.requested.recorded(),
            "global_batch_size_resolved": self.requested.global_batch if self.requested.batch_tokens is None else None,
            "dataset": {
                **self.data_description,
                "commonest_class_fraction": commonest_class_fraction(self.data, "test"),
                "stored": {split: split_amounts(self.data, split) for split in self.data.info.sizes},
            },
            "framework_packages": list(self.packages),
            **self._carried_out,
            "metrics": described_metrics(self.model.objective.infos),
            "translation_metrics": self.model.objective.translation_names,
            "translation_signatures": described(self.requested, self.model.objective, self.data.info.sizes["test"]),
        }

    @property
    def _carried_out(self) -> dict[str, Any]:
        """How the backend carries the model out, and what that costs, if a check has measured it."""
        backend = self.requested.backend
        return {"model_method": self.model.method(backend), "adapter_cost": known_cost(self.model, backend)}

    def summary(self, run: Path, clock: Clock, state: RunState, totals: TrainingTotals, facts: DriverFacts) -> dict[str, Any]:
        """Return the summary of a run in this state; see `records.summary.summarise`."""
        summary = summarise(
            run,
            clock,
            state=state,
            updates_scheduled=totals.updates_scheduled,
            updates_applied=totals.updates_applied,
            examples_per_epoch=self.data.info.sizes["train"],
            facts=replace(
                facts,
                padding_share=padding_share(self.sampler, self.requested.accumulate),
                synthetic=self.data.info.synthetic,
                **self._carried_out,
            ),
        )
        summary["profile"] = PROFILE if (run / PROFILE).is_dir() else None
        if self.requested.batch_tokens is not None:  # then batch sizes are means
            mean = self.mean_worker_batch
            summary |= {"batch_size": mean, "global_batch_size": mean * self.requested.workers}
        return summary

    @property
    def sampler(self) -> Sampler:
        """The order of the training examples, for counting."""
        return run_sampler(self.requested, self.data.info.sizes["train"], batch_lengths(self.requested, self.data))

    @property
    def too_long(self) -> str | None:
        """A message about training examples longer than a batch, if any."""
        tokens, lengths = self.requested.batch_tokens, self.lengths
        if tokens is None or lengths is None:
            return None
        count, longest = longer_than(lengths, tokens)
        if not count:
            return None
        sampler = self.sampler
        return (
            f"batch_tokens: {count:,} of {sampler.size:,} training examples are longer than {tokens:,} tokens (up to {longest:,}), "
            f"and each of these is computed by itself; an epoch takes {sampler.steps_per_epoch:,} updates"
        )

    @property
    def mean_worker_batch(self) -> int:
        """Examples of the largest worker's batch, or the mean if batches are filled by tokens."""
        job, sampler = self.requested, self.sampler
        sharing = job.workers if job.mode == "sync" else 1
        if job.batch_tokens is None:
            return min(job.per_worker_batch, math.ceil(sampler.size / sharing))
        return max(1, round(sampler.size / sampler.steps_per_epoch / sharing))
