"""A hand-written torch loop for the small CNN: float32 images, `index_select`, fused SGD.

Before its clock starts it tries both memory formats, with one thread and with all threads, and uses the fastest.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from workload import Timer, Workload, read_workload

TRIAL_STEPS = 20


def build(work: Workload) -> nn.Module:
    """Return the model with the initial weights."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, work.spec.classes)),
    )
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), work.initial.values(), strict=True):
            parameter.copy_(torch.from_numpy(values))
    return model


class Loop:
    """The loop in one memory format, from the initial weights."""

    def __init__(self, work: Workload, model: nn.Module, inputs: torch.Tensor, memory_format: torch.memory_format) -> None:
        self._model = copy.deepcopy(model).to(memory_format=memory_format)
        self._inputs = inputs.to(memory_format=memory_format)
        self._labels = torch.from_numpy(work.labels)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=work.learning_rate, fused=True)

    def run(self, batches: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Take a step for each batch of indices; return the losses."""
        losses = []
        for batch in batches:
            self._optimizer.zero_grad()
            loss = cross_entropy(self._model(self._inputs.index_select(0, batch)), self._labels.index_select(0, batch))
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return losses


def fastest(work: Workload, model: nn.Module, inputs: torch.Tensor, batches: tuple[torch.Tensor, ...]) -> tuple[torch.memory_format, int]:
    """Return the memory format and the number of threads with which steps take least."""
    taken = {}
    threads = sorted({1, work.threads, len(os.sched_getaffinity(0))})
    for memory_format, count in itertools.product((torch.contiguous_format, torch.channels_last), threads):
        torch.set_num_threads(count)
        trial = Loop(work, model, inputs, memory_format)
        trial.run(batches[:TRIAL_STEPS])
        began = time.perf_counter()
        trial.run(batches[:TRIAL_STEPS])
        taken[memory_format, count] = time.perf_counter() - began
    return min(taken, key=taken.__getitem__)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    batches = torch.from_numpy(work.order()).to(torch.int64).unbind()
    model, inputs = build(work), torch.from_numpy(work.inputs_nchw)
    memory_format, threads = fastest(work, model, inputs, batches)
    torch.set_num_threads(threads)
    loop = Loop(work, model, inputs, memory_format)
    losses = loop.run(batches[: work.warmup])
    timer.begin()
    losses += loop.run(batches[work.warmup :])
    timer.end()
    timer.report(replace(work, threads=threads), torch.stack(losses).numpy())


main()
