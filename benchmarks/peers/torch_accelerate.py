"""Hugging Face Accelerate on one CPU process: model, optimiser and loader go through `prepare`, as its documentation asks.

The data are tensors in memory; the loader's sampler yields whole batches of indices, so that a batch is one indexing and no collation.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workload import Timer, read_workload


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
    order = torch.from_numpy(work.order()).to(torch.int64)
    data = TensorDataset(torch.from_numpy(work.inputs), torch.from_numpy(work.labels))
    loader = DataLoader(data, sampler=order, batch_size=None, num_workers=0)
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
