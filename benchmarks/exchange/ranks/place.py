"""Rank and timing code that all all-reduce implementations share."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import counters

from crosstrain.core.cluster import Cluster, Task, TaskSpec
from crosstrain.core.process import die_with_parent

WORK_BYTES, MAX_ITERATIONS = 64 << 20, 200
"""An all-reduce is repeated until it has moved about this many bytes, up to a maximum."""

WARM_UP = 10


class Adder(Protocol):
    """An implementation of an all-reduce of float32 vectors."""

    def prepare(self, elements: int) -> Callable[[int], None]:
        """Return a function that sums vectors of this size, a given number of times, and waits."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...

    def close(self) -> None:
        """Leave in good order."""
        ...


@dataclass(frozen=True)
class Place:
    """A rank and its configuration."""

    rank: int
    ranks: int
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    secret: str

    @property
    def task(self) -> Task:
        """The rank as a worker of a cluster."""
        placed = tuple(TaskSpec("worker", rank, rank, leading=True) for rank in range(self.ranks))
        cluster = Cluster(placed, self.addresses, {spec.name: self.ports[spec.index] for spec in placed}, self.secret)
        return Task(placed[self.rank], cluster, threads=1)


def iterations_of(size_bytes: int) -> int:
    """Return how often an all-reduce of a size is repeated in one try; equal on all ranks."""
    return max(1, min(MAX_ITERATIONS, WORK_BYTES // size_bytes))


def time_runs(run: Callable[[int], None], barrier: Callable[[], None], iterations: int, tries: int) -> list[float]:
    """Return for each try the mean seconds of one of many all-reduces in a row."""
    run(min(iterations, WARM_UP))
    seconds = []
    for _ in range(tries):
        barrier()
        began = time.perf_counter()
        run(iterations)
        seconds.append((time.perf_counter() - began) / iterations)
    return seconds


def report(place: Place, results: Mapping[str, Any]) -> None:
    """Print the first rank's figures, in the one line that is read."""
    if place.rank == 0:
        print("RESULT " + json.dumps(results), flush=True)


def arguments() -> argparse.ArgumentParser:
    """Return the options that all ranks share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--marks", action="store_true")
    return parser


def read_place(options: argparse.Namespace) -> Place:
    """Return this rank from its variables; the process ends with the one that started it."""
    die_with_parent(options.parent)
    description = json.loads(os.environ["BENCHMARK_RANKS"])
    return Place(
        description["rank"], description["ranks"], tuple(description["addresses"]), tuple(description["ports"]), description["secret"]
    )


def main(join: Callable[[Place], Adder]) -> None:
    """Time all-reduces of all sizes, or with `--count` count their work.

    With `--marks` each is between two marks.
    """
    options = arguments().parse_args()
    place = read_place(options)
    adder = join(place)
    runs = ((size, adder.prepare(size // 4)) for size in options.sizes)
    if options.count:
        report(place, {str(size): counters.count(run, adder.barrier, options.count, options.marks) for size, run in runs})
    else:
        report(place, {str(size): time_runs(run, adder.barrier, iterations_of(size), options.tries) for size, run in runs})
    adder.barrier()
    adder.close()
