"""Check torch's computation in a process that imports torch."""

import torch
from computation_checks import CASES, check

from crosstrain.backends.torch.asynchronous import TorchComputation
from crosstrain.core.cluster import Cluster, Task, TaskSpec

PLACED = TaskSpec("worker", 0, 0, leading=False)


def make(job, spec, data, sampler):
    task = Task(PLACED, Cluster((PLACED,), ("127.0.0.1",), {PLACED.name: 1}, "00"), 1, 0)
    return TorchComputation(task, job, spec, data, sampler, torch.device("cpu"))


for options in CASES:
    check(make, options)
