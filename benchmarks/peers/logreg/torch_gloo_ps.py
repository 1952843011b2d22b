"""A hand-written asynchronous parameter server on gloo send and recv.

Rank 0 serves, the other ranks work, started as by torchrun. One flat tensor each way: a worker sends its gradient and gets the parameters
after it. Each worker has a thread at the server, so a slow worker delays nobody; a lock makes updates atomic. Staleness is counted as in
the product.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear
from workload import Timer, Workload, read_workload


class Parameters:
    """The flat parameters at the server, and what happened to them."""

    def __init__(self, work: Workload, timer: Timer, flat: torch.Tensor) -> None:
        self._work, self._timer, self._flat = work, timer, flat
        self._lock = threading.Lock()
        self._version = 0
        self._read_at: dict[int, int] = {}
        self.staleness: list[int] = []

    def read(self, worker: int, into: torch.Tensor) -> None:
        """Copy the parameters for a worker."""
        with self._lock:
            into.copy_(self._flat)
            self._read_at[worker] = self._version

    def update(self, worker: int, gradient: torch.Tensor, into: torch.Tensor) -> None:
        """Apply one gradient and copy the parameters for the worker."""
        with self._lock:
            self._flat.sub_(gradient, alpha=self._work.learning_rate)
            self.staleness.append(self._version - self._read_at[worker])
            self._version += 1
            if self._version == 1:
                self._timer.first_step()
            if self._version == self._work.warmup:
                self._timer.begin()
            if self._version == self._work.updates:
                self._timer.end()
            into.copy_(self._flat)
            self._read_at[worker] = self._version


def share(updates: int, worker: int, workers: int) -> int:
    """Return how many of the updates a worker (from 0) computes."""
    return updates // workers + (worker < updates % workers)


def serve(work: Workload, workers: int) -> None:
    """Serve every worker from a thread of its own."""
    timer = Timer()
    parameters = Parameters(work, timer, flatten(work))

    def serve_one(worker: int) -> None:
        gradient, values = flatten(work), flatten(work)
        parameters.read(worker, values)
        dist.send(values, worker + 1)
        for _ in range(share(work.updates, worker, workers)):
            dist.recv(gradient, worker + 1)
            parameters.update(worker, gradient, values)
            dist.send(values, worker + 1)

    threads = [threading.Thread(target=serve_one, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = [torch.empty(share(work.updates, worker, workers)) for worker in range(workers)]
    for worker in range(workers):
        dist.recv(losses[worker], worker + 1)
    after = torch.cat([values[work.warmup // workers :] for values in losses])
    timer.report_mean(work, float(after.mean()), work.steps)


def compute(work: Workload, worker: int, workers: int) -> None:
    """Compute gradients of this worker's share of the updates."""
    inputs, labels = torch.from_numpy(work.inputs), torch.from_numpy(work.labels)
    flat, gradient = flatten(work), flatten(work)
    weight = flat[: work.weight.size].view(work.weight.shape).requires_grad_()
    bias = flat[work.weight.size :].requires_grad_()
    weight_gradient, bias_gradient = gradient[: work.weight.size].view(work.weight.shape), gradient[work.weight.size :]
    count = share(work.updates, worker, workers)
    batches = torch.from_numpy(work.order(workers, worker)).to(torch.int64).unbind()[:count]
    losses = []
    dist.recv(flat, 0)
    for batch in batches:
        loss = cross_entropy(linear(inputs[batch], weight, bias), labels[batch])
        gradients = torch.autograd.grad(loss, (weight, bias))
        weight_gradient.copy_(gradients[0])
        bias_gradient.copy_(gradients[1])
        dist.send(gradient, 0)
        dist.recv(flat, 0)
        losses.append(loss.detach())
    dist.send(torch.stack(losses), 0)


def flatten(work: Workload) -> torch.Tensor:
    """Return the initial parameters as one new vector."""
    return torch.cat([torch.from_numpy(work.weight).flatten(), torch.from_numpy(work.bias)])


def main() -> None:
    """Take the place that torchrun's variables give."""
    work = read_workload()
    torch.set_num_threads(work.threads)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        serve(work, workers)
    else:
        compute(work, rank - 1, workers)
    dist.barrier()
    dist.destroy_process_group()


main()
