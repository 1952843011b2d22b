"""A hand-written torch loop for any module that ``--model`` names: channels last, fused SGD."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from workload import Timer, read_workload

from crosstrain.models.imported.torch.forward import unadapted


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    call, _ = unadapted(work.spec.settings)
    module: torch.nn.Module = call.module
    values = {**work.initial, **work.spec.initial_buffers(work.seed)}
    module.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()}, strict=False)
    module.train().to(memory_format=torch.channels_last)
    inputs = torch.from_numpy(work.inputs_nchw).to(memory_format=torch.channels_last)
    labels = torch.from_numpy(work.labels)
    optimizer = torch.optim.SGD(module.parameters(), lr=work.learning_rate, fused=True)
    batches, losses = torch.from_numpy(work.order()).to(torch.int64).unbind(), []

    def run(begin: int, end: int) -> None:
        for batch in batches[begin:end]:
            optimizer.zero_grad()
            loss = cross_entropy(module(inputs.index_select(0, batch)), labels.index_select(0, batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, torch.stack(losses).numpy())


main()
