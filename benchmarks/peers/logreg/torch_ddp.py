"""A hand-written DistributedDataParallel loop on gloo, started by torchrun.

One process for each worker.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from workload import Timer, read_workload


def main() -> None:
    """Train as one of the ranks that torchrun started."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    inputs, labels = torch.from_numpy(work.inputs), torch.from_numpy(work.labels)
    layer = torch.nn.Linear(inputs.shape[1], len(work.bias))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(work.weight))
        layer.bias.copy_(torch.from_numpy(work.bias))
    model = torch.nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    batches = torch.from_numpy(work.order(workers, rank)).to(torch.int64).unbind()
    losses = []

    def run(begin: int, end: int) -> None:
        for batch in batches[begin:end]:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    means = torch.stack(losses)
    dist.all_reduce(means)
    if rank == 0:
        timer.report(work, (means / workers).numpy())
    dist.barrier()
    dist.destroy_process_group()


main()
