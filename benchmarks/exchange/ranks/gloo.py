"""torch.distributed's all_reduce over gloo, as DistributedDataParallel calls it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from place import Place, main


class GlooAdder:
    """Adds up a tensor of zeros in place."""

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": place.addresses[0], "MASTER_PORT": str(place.ports[-1])}
        dist.init_process_group("gloo", rank=place.rank, world_size=place.ranks)
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

    def prepare(self, elements: int) -> Callable[[int], None]:
        """Return what adds up so many elements."""
        vector = torch.zeros(elements)

        def run(iterations: int) -> None:
            for _ in range(iterations):
                dist.all_reduce(vector)

        return run


main(GlooAdder)
