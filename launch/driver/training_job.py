"""What a run trains: its job, the model, the data and the tasks that do it; and what ``job.json`` and ``summary.json`` say of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import batch_lengths, refuse_unweighted
from ...backends.capabilities import Exchange, refuse_unsupported
from ...backends.loading import load_backend
from ...checkpoint import described_data
from ...core.cluster import Role, TaskSpec
from ...core.errors import RunFailedError, TrainerError
from ...core.job import Job
from ...core.plugins import forward_plugin
from ...core.units import Target
from ...core.worker_layout import procs_per_node_of
from ...data.amounts import commonest_class_fraction, split_amounts
from ...data.augment import augmentation
from ...data.bucketing import longer_than
from ...data.sampler import Sampler, padding_share, run_sampler
from ...data.sources.translation.tokenizer import pieces_digest
from ...data.store.stored_dataset import StoredDataset, open_dataset
from ...engine.learning_rate import refuse_without_width
from ...engine.loop_interfaces import TrainingTotals
from ...engine.translation.decodings import described, refuse_idle
from ...metrics.recorded import described_metrics
from ...models.base import ModelSpec
from ...models.build import build_model
from ...models.decoding.translation import refuse_unscorable
from ...models.metric_trials import refuse_uncomputable
from ...records.schema import Clock
from ...records.store.run_directory import RunState
from ...records.summary.summary import summarise
from .cluster_setup import refuse_empty_servers
from .recorder import PROFILE

__all__ = ["TrainingJob"]


@dataclass(frozen=True)
class TrainingJob:
    """A job that can be carried out, with its data open. `placed` are its tasks; `packages` those whose releases are recorded.

    `survives`: the roles of those tasks whose death training goes on without; `rejoins`: those of tasks that can be started anew alone.
    `places` are the numbers of the nodes that it is for, in order. `job` is what the tasks are told, whose nodes are these; `asked` is what
    the user asked for, which the run's records have. `gpu_advice` says how the backend's framework comes to see GPUs. `exchanges` are those
    that the backend has.
    """

    asked: Job
    job: Job
    model: ModelSpec
    data: StoredDataset
    placed: Sequence[TaskSpec]
    packages: Sequence[str]
    survives: frozenset[Role]
    places: tuple[int, ...]
    gpu_advice: str = ""
    rejoins: frozenset[Role] = frozenset()
    exchanges: frozenset[Exchange] = frozenset({"native"})

    @classmethod
    def of(cls, job: Job) -> TrainingJob:
        """Open a job's data and build its model. What cannot be met is refused here, before anything is started: UsageError."""
        data = open_dataset(job.data, job.data_dir)
        augmentation(job.augment, data.info)
        model = build_model(job.model, data.info)
        refuse_unweighted(job, data, model.objective.weight)
        model.objective.check(Target.parse(job.until) if job.until else None, job.keep_best)
        refuse_idle(job, model.objective)
        described(job, model.objective, data.info.sizes["test"])  # raises where translations cannot be scored here
        refuse_uncomputable(model.objective)
        if model.objective.translation is not None:
            refuse_unscorable(data, model.objective.translation)
        refuse_without_width(job, model.width)
        forward_plugin(job.model, job.backend)
        refuse_empty_servers(job, model)
        backend = load_backend(job.backend)
        refuse_unsupported(job, job.backend, backend.capabilities)
        declared = backend.capabilities
        placed, packages = backend.placement(job), sorted(declared.packages)
        rejoins: frozenset[Role] = declared.rejoins if job.mode == "async" else frozenset()
        places = tuple(range(job.nodes))
        given = (declared.survives, places, declared.gpu_install, rejoins, declared.exchanges)
        return cls(job, job, model, data, placed, packages, *given)

    def resized(self, places: Sequence[int]) -> TrainingJob:
        """Return what trains the same on those of all nodes alone that have these numbers. Raises RunFailedError where nothing can.

        An update is of as many examples, so that learning rates and the number of updates stay what they were: of the global batch in sync
        mode, of a worker's batch in async mode, of the larger one where workers had batches of two sizes. Where batches are filled by
        tokens, an update has as many tokens. Micro-batches stay as small, so that there are more of them where a worker has a larger share.
        """
        asked, limits = self.asked, self.asked.cores_per_node
        if len(places) == asked.nodes:
            return self
        by_node = tuple(asked.workers_by_node[node] for node in places)
        workers, tokens = sum(by_node), asked.batch_tokens
        batch: tuple[int | None, int | None] = (None, asked.global_batch) if asked.mode == "sync" else (asked.per_worker_batch, None)
        if asked.mode == "async" and asked.accumulate > 1:
            batch = (None, asked.per_worker_batch * workers)
        share = asked.per_worker_batch if asked.mode == "async" else math.ceil(asked.global_batch / workers)
        accumulate = math.ceil(share / asked.micro_batch) if asked.accumulate > 1 else 1
        if tokens is not None:
            batch = (None, None)
            tokens = tokens if asked.mode == "async" else tokens * asked.workers * asked.accumulate // (workers * accumulate)
        changed = {
            "nodes": len(places),
            "procs_per_node": procs_per_node_of(by_node),
            "batch_size": batch[0],
            "global_batch_size": batch[1],
            "batch_tokens": tokens,
            "accumulate": accumulate,
            "cores_per_node": limits if limits is None or len(limits) == 1 else tuple(limits[node] for node in places),
        }
        job = asked.model_copy(update=changed)
        backend = load_backend(job.backend)
        try:
            refuse_unsupported(job, job.backend, backend.capabilities)
            placed = backend.placement(job)
        except (TrainerError, ValueError) as error:
            count = "1 node" if len(places) == 1 else f"{len(places)} nodes"
            raise RunFailedError(f"the run cannot go on with {count} ({error})") from error
        return replace(self, job=job, placed=[replace(task, node=places[task.node]) for task in placed], places=tuple(places))

    @property
    def lengths(self) -> dict[str, NDArray[np.int64]] | None:
        """The lengths of the training examples, by which batches may be filled; None for data that is no text."""
        return batch_lengths(self.job, self.data)

    @property
    def node_of_worker(self) -> dict[int, int]:
        """The node of each worker, by its index."""
        return {task.index: task.node for task in self.placed if task.role == "worker"}

    @property
    def data_description(self) -> dict[str, Any]:
        """What ``job.json`` and checkpoints say of the data."""
        return described_data(self.data.info, self.data.digest, self.asked.data_dir, pieces_digest(self.data))

    @property
    def document(self) -> dict[str, Any]:
        """What ``job.json`` says of it, whoever asked for it and wherever it runs."""
        return {
            **self.asked.recorded(),
            "global_batch_size_resolved": self.asked.global_batch if self.asked.batch_tokens is None else None,
            "dataset": {
                **self.data_description,
                "commonest_class_fraction": commonest_class_fraction(self.data, "test"),
                "stored": {split: split_amounts(self.data, split) for split in self.data.info.sizes},
            },
            "framework_packages": list(self.packages),
            "metrics": described_metrics(self.model.objective.infos),
            "translation_metrics": self.model.objective.translation_names,
            "translation_signatures": described(self.asked, self.model.objective, self.data.info.sizes["test"]),
        }

    def summary(
        self,
        run: Path,
        clock: Clock,
        state: RunState,
        totals: TrainingTotals,
        *,
        nodes_sharing_cores: int | None,
        precision_used: str,
        compiled: bool | None,
        device_used: str | None,
        machines: Sequence[str] | None,
    ) -> dict[str, Any]:
        """Return the summary of a run of it that ended in this state; see `records.summary.summary`."""
        summary = summarise(
            run,
            clock,
            state=state,
            updates_scheduled=totals.updates_scheduled,
            updates_applied=totals.updates_applied,
            examples_per_epoch=self.data.info.sizes["train"],
            nodes_sharing_cores=nodes_sharing_cores,
            precision_used=precision_used,
            compiled=compiled,
            device_used=device_used,
            synthetic=self.data.info.synthetic,
            machines=machines,
            padding_share=padding_share(self.sampler, self.asked.accumulate),
        )
        return {**summary, "profile": PROFILE if (run / PROFILE).is_dir() else None, **self._mean_batches}

    @property
    def sampler(self) -> Sampler:
        """The order of the training examples, for counting."""
        return run_sampler(self.asked, self.data.info.sizes["train"], batch_lengths(self.asked, self.data))

    @property
    def too_long(self) -> str | None:
        """A sentence for people on training examples that have more tokens than a batch may; None where there are none."""
        tokens, lengths = self.asked.batch_tokens, self.lengths
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
        """Examples of a worker's batch: of the largest one, or, where batches are filled by tokens, the mean over an epoch, rounded.

        Where an update would be of more than all training examples, it is of those.
        """
        job, sampler = self.asked, self.sampler
        sharing = job.workers if job.mode == "sync" else 1
        if job.batch_tokens is None:
            return min(job.per_worker_batch, math.ceil(sampler.size / sharing))
        return max(1, round(sampler.size / sampler.steps_per_epoch / sharing))

    @property
    def _mean_batches(self) -> dict[str, int]:
        """What a summary says of the size of batches, where they are filled by tokens."""
        if self.asked.batch_tokens is None:
            return {}
        mean = self.mean_worker_batch
        return {"batch_size": mean, "global_batch_size": mean * self.asked.workers}
