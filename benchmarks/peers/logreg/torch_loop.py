"""A hand-written torch loop on tensors in memory: index, forward, backward, update by hand."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, linear
from workload import Timer, read_workload


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    inputs, labels = torch.from_numpy(work.inputs), torch.from_numpy(work.labels)
    weight = torch.from_numpy(work.weight).requires_grad_()
    bias = torch.from_numpy(work.bias).requires_grad_()
    batches = torch.from_numpy(work.order()).to(torch.int64).unbind()
    rate, losses = work.learning_rate, []

    def run(begin: int, end: int) -> None:
        for batch in batches[begin:end]:
            weight.grad = bias.grad = None
            loss = cross_entropy(linear(inputs.index_select(0, batch), weight, bias), labels.index_select(0, batch))
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=rate)
                bias.sub_(bias.grad, alpha=rate)
            losses.append(loss.detach())

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, torch.stack(losses).numpy())


main()
