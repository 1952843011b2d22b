"""Synchronous training: every rank takes its slice of the global batch, and one update follows from all of them together.

The gradient of an update is Σ losses / global batch size, exactly, however unevenly the batch is shared: DistributedDataParallel
averages over ranks, so each rank scales its summed losses by world size / global batch size. A rank with an empty slice takes part
with zeros.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from ...core.cluster import Task, split_evenly
from ...core.job import Job
from ...data.base import Dataset, Split
from ...data.sampler import Batches
from ...models.base import Array, ModelSpec
from ..base import EvalResult, Plan, State, StepResult, make_sampler
from .data import ResidentSplit, part
from .group import join_group, leave_group
from .model import DistributedLoss, Model
from .optimizers import make_rule, slot_names
from .state import pack, unpack

__all__ = ["SyncSession"]

GROUP_SECONDS = 0.5
"""A result is yielded about this often by a single process (ranks yield one a plan, since their losses are reduced together)."""


class SyncSession:
    """One rank; every rank is a leading task and calls the same methods in the same order."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> None:
        self._spec, self._job, self._device = model, job, device
        self._rank, self._world = task.rank, task.cluster.workers
        self._sampler = make_sampler(job, data)
        self._splits: dict[Split, ResidentSplit] = {split: ResidentSplit(data, split, device) for split in ("train", "test")}
        self._sizes = dict(data.info.sizes)
        self._model = Model.initial(job, model, device)
        self._rule = make_rule(job, self._model.values)
        self._slots = slot_names(job)
        self._steps_per_group = 64
        self._open, self._healthy = True, True
        self._distributed: torch.nn.Module | None = None
        if job.wrapped:
            join_group(task, job, device)
            self._distributed = self._wrap()
        self._warm_up()

    def _wrap(self) -> torch.nn.Module:
        """Wrap the model. A static graph is not promised: measured, it gains nothing here (0.9 to 1.1 times the steps per second)."""
        devices = [self._device] if self._device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(DistributedLoss(self._model), device_ids=devices, gradient_as_bucket_view=True)

    def _warm_up(self) -> None:
        """Run two steps that leave no trace: first kernels, and the rebuild of DDP's buckets after the first backward pass.

        The rebuild changes the order of summation, so that without it a run that is resumed would differ in the last bits.
        """
        x, y = self._splits["train"].span(0, min(self._job.per_worker_batch, self._sizes["train"]))
        initial = State(self._spec.initial(self._job.seed))
        for _ in range(2):
            self._update(x, y, 1.0, 0.0)
        self._model.sums(self._splits["test"], 0, min(len(y), self._sizes["test"]))
        if self._distributed is not None:
            dist.barrier()
        self._install(initial)

    def _update(self, x: torch.Tensor, y: torch.Tensor, scale: float, lr: float) -> torch.Tensor:
        """Apply one update and return the loss: the batch's mean, or the slice's sum times `scale` among several ranks."""
        leaves = self._model.leaves
        loss: torch.Tensor
        if self._distributed is None:
            loss = self._model.mean_loss(x, y)
            gradients = torch.autograd.grad(loss, leaves)
        else:
            for leaf in leaves:
                leaf.grad = None
            loss = self._distributed(x, y, scale)
            loss.backward()
            gradients = [leaf.grad for leaf in leaves]
        self._rule.step(gradients, lr)
        return loss.detach()

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan; see `Session.train`. A peer that dies raises RuntimeError here."""
        batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank)
        self._healthy = False
        first = 0
        while first < plan.count:
            count = self._group(plan.count - first)
            yield self._run(plan, batches, first, count)
            first += count
        self._healthy = True

    def _group(self, remaining: int) -> int:
        """Return how many updates the next result covers; the same on every rank."""
        if self._job.steps_per_call is not None:
            return min(remaining, self._job.steps_per_call)
        if self._distributed is not None or remaining <= 2 * self._steps_per_group:
            return remaining
        return self._steps_per_group

    def _run(self, plan: Plan, batches: Batches, first: int, count: int) -> StepResult:
        """Apply the updates first … first + count − 1 of a plan as one group."""
        began = time.perf_counter()
        data = self._splits["train"]
        data.wait_seconds = 0.0
        own = part(batches, first, count)
        scales = (self._world / own.global_sizes).tolist()
        rates = plan.learning_rates[first : first + count].tolist()
        losses: list[torch.Tensor] = []
        update = self._update
        for block in data.blocks(own):
            for x, y in block:
                position = len(losses)
                losses.append(update(x, y, scales[position], rates[position]))
        reduced = self._reduce(losses)
        seconds = time.perf_counter() - began
        self._steps_per_group = max(1, min(4 * count, int(count * GROUP_SECONDS / seconds)))
        wait = data.wait_seconds if self._device.type == "cpu" else None
        return StepResult(plan.first_step + first, reduced, int(own.global_sizes.sum()), seconds, data_wait_seconds=wait)

    def _reduce(self, losses: list[torch.Tensor]) -> Array:
        """Return the mean losses over the global batches, float32 [count]: one all-reduce for the group."""
        stacked = torch.stack(losses)
        if self._distributed is not None:
            stacked = stacked.to(torch.float64)
            dist.all_reduce(stacked)
            stacked /= self._world
        result: Array = stacked.cpu().numpy().astype(np.float32)
        return result

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate the rank's share of the split and add up over ranks; see `Session.evaluate`."""
        began = time.perf_counter()
        start, stop = split_evenly(self._sizes[split], self._world)[self._rank]
        sums = torch.tensor(self._model.sums(self._splits[split], start, stop), dtype=torch.float64, device=self._device)
        if self._distributed is not None:
            self._healthy = False
            dist.all_reduce(sums)
            self._healthy = True
        loss_sum, correct, examples = sums.tolist()
        if int(examples) != self._sizes[split]:
            raise RuntimeError(f"evaluation counted {int(examples)} examples of the {self._sizes[split]} in split {split!r}")
        return EvalResult(split, int(examples), loss_sum, int(correct), time.perf_counter() - began, self._rule.updates)

    def state(self) -> State:
        """Return a copy of the state; complete on every rank."""
        tensors = self._model.values + [tensor for slot in self._slots for tensor in self._rule.slots[slot]]
        flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu().numpy()
        return unpack(self._spec, flat, self._rule.updates, self._slots)

    def load(self, state: State | None) -> None:
        """Take over the first rank's state. Raises ValueError where it does not fit the model or the optimiser."""
        if self._distributed is None:
            if state is None:
                raise ValueError("load: the only rank was given no state")
            self._install(state)
            return
        width = self._spec.size * (1 + len(self._slots))
        flat = torch.empty(width) if state is None else torch.from_numpy(pack(self._spec, state, self._slots))
        flat, updates = flat.to(self._device), torch.tensor([state.updates if state else 0], device=self._device)
        dist.broadcast(flat, 0)
        dist.broadcast(updates, 0)
        self._install(unpack(self._spec, flat.cpu().numpy(), int(updates), self._slots))

    def _install(self, state: State) -> None:
        """Write a state into this rank's tensors."""
        tensors = self._model.values + [tensor for slot in self._slots for tensor in self._rule.slots[slot]]
        pieces = torch.from_numpy(pack(self._spec, state, self._slots)).split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))
        self._rule.updates = state.updates

    def close(self) -> None:
        """Leave together with the other ranks (at once where this one failed); a second call does nothing."""
        if self._open and self._distributed is not None:
            leave_group(healthy=self._healthy)
        self._open = False
