"""Hugging Face Accelerate on one CPU process, used as its documentation shows.

Model, optimiser and loader pass `prepare`. The data are tensors in memory; the dataset takes a whole batch of indices (torch's
`__getitems__`): one indexing for each batch, without collation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from workload import Timer, read_workload

Batch = tuple[torch.Tensor, ...]


class Resident(TensorDataset):
    """Tensors in memory that hand out whole batches."""

    def __getitems__(self, indices: torch.Tensor) -> Batch:
        """Return one batch."""
        return tuple(tensor[indices] for tensor in self.tensors)


class FixedOrder(BatchSampler):
    """The batches of the workload, in its order; int64 [updates, batch size]."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(work.inputs.shape[1], len(work.bias))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(work.weight))
        layer.bias.copy_(torch.from_numpy(work.bias))
    optimizer = torch.optim.SGD(layer.parameters(), lr=work.learning_rate)
    order = FixedOrder(torch.from_numpy(work.order()).to(torch.int64))
    data = Resident(torch.from_numpy(work.inputs), torch.from_numpy(work.labels))
    loader = DataLoader(data, batch_sampler=order, collate_fn=lambda batch: batch, num_workers=0)
    model, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
    losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == 1:
            timer.first_step()
        if len(losses) == work.warmup:
            timer.begin()
    timer.end()
    timer.report(work, torch.stack(losses).numpy())


main()
