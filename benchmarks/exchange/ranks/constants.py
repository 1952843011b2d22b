"""One rank of the direct exchange with other constants.

Constants: size of pieces, maximum size of whole vectors, and buckets during a backward pass.
What is asked comes as ``--constant NAME --values …``; ranks set the constant of exchange/mesh before each try, in turns, and rank 0
reports for each size and value the seconds of each try.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from place import Place, arguments, iterations_of, read_place, report

from crosstrain.exchange import all_reduce as bucket_layout
from crosstrain.exchange import all_reduce as sums
from crosstrain.exchange.all_reduce import cut_into_buckets
from crosstrain.exchange.mesh import Mesh

MODULES = {"PIECE_BYTES": sums, "MAX_FURTHER_BYTES": sums, "BUCKET_BYTES": bucket_layout}

TENSORS = {
    "alexnet": (
        *(23_232, 64, 307_200, 192, 663_552, 384, 884_736, 256, 589_824, 256),
        *(37_748_736, 4_096, 16_777_216, 4_096, 4_096_000, 1_000),
    ),
    "layers": (262_144,) * 64,
}
"""Elements of gradients from the first layer to the last: AlexNet's 244 MB, most of them in three layers; and 64 layers of 1 MiB."""

WORK_SHARES = {"alexnet": (0.11, 0.0, 0.3, 0.0, 0.16, 0.0, 0.2, 0.0, 0.14, 0.0, 0.05, 0.0, 0.03, 0.0, 0.01, 0.0), "layers": (1 / 64,) * 64}
"""Fractions of a backward pass: for AlexNet about as its layers' multiplications."""

Make = Callable[[], tuple[Callable[[int], None], int]]
"""Makes a function that repeats the work, with the current constants, and the number of repeats of a try."""

MATRIX = 256
WARM_UP = 3


class Backward:
    """A backward pass that submits its gradients in buckets.

    It multiplies matrices for `seconds` on one core; the gradients are zeros.
    """

    def __init__(self, mesh: Mesh, model: str, seconds: float) -> None:
        self._mesh, self._sizes = mesh, TENSORS[model]
        self._gradients = [np.zeros(size, np.float32) for size in self._sizes]
        self._matrix = np.ones((MATRIX, MATRIX), np.float32)
        products = round(seconds / self._product_seconds())
        products = int(mesh.broadcast(np.array([products]) if mesh.rank == 0 else None, (1,), np.float64)[0])  # the same work on all ranks
        self._products = [round(products * share) for share in WORK_SHARES[model]]

    def _product_seconds(self, products: int = 200) -> float:
        self._compute(products)
        began = time.process_time()
        self._compute(products)
        return (time.process_time() - began) / products

    def _compute(self, products: int) -> None:
        for _ in range(products):
            np.matmul(self._matrix, self._matrix)

    def runner(self) -> Callable[[int], None]:
        """Return a pass with the constants that hold now."""
        buckets = cut_into_buckets([4 * size for size in self._sizes])
        flat = [np.zeros(sum(self._sizes[place] for place in bucket), np.float32) for bucket in buckets]

        def run(iterations: int) -> None:
            for _ in range(iterations):
                for bucket, vector in zip(buckets, flat, strict=True):
                    first = 0
                    for place in bucket:
                        self._compute(self._products[place])
                        vector[first : first + self._sizes[place]] = self._gradients[place]
                        first += self._sizes[place]
                    self._mesh.submit(vector)
                self._mesh.wait()

        return run


def adder(mesh: Mesh, elements: int) -> Callable[[int], None]:
    """Return what adds up so many elements, with the constants that hold now."""
    vector = np.zeros(elements, np.float32)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            mesh.all_reduce(vector)

    return run


def adder_and_iterations(mesh: Mesh, size_bytes: int) -> tuple[Callable[[int], None], int]:
    """Return what adds up so many bytes, and how often it does so in a try."""
    return adder(mesh, size_bytes // 4), iterations_of(size_bytes)


def forget(mesh: Mesh) -> None:
    """Reload the mesh's constants."""
    mesh._sum_for.cache_clear()


def measured(place: Place, mesh: Mesh, name: str, values: list[int], runners: dict[str, Make], tries: int) -> None:
    """Time all values in turns, for each runner by name; report the seconds of all tries."""
    seconds: dict[str, dict[str, list[float]]] = {key: {str(value): [] for value in values} for key in runners}
    for key, make in runners.items():
        for _ in range(tries):
            for value in values:
                setattr(MODULES[name], name, value)
                forget(mesh)
                run, iterations = make()
                run(min(iterations, WARM_UP))
                mesh.barrier()
                began = time.perf_counter()
                run(iterations)
                seconds[key][str(value)].append((time.perf_counter() - began) / iterations)
    report(place, seconds)


def main() -> None:
    """Measure what is asked."""
    parser = arguments()
    parser.add_argument("--constant", choices=tuple(MODULES), required=True)
    parser.add_argument("--values", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--model", choices=tuple(TENSORS), default="alexnet")
    parser.add_argument("--compute-seconds", type=float, default=0.3)
    options = parser.parse_args()
    place = read_place(options)
    mesh = Mesh(place.task, 60.0, 10.0)
    runners: dict[str, Make] = {}
    if options.constant == "BUCKET_BYTES":
        backward = Backward(mesh, options.model, options.compute_seconds)
        runners[options.model] = lambda: (backward.runner(), 1)
    else:
        runners = {str(size): partial(adder_and_iterations, mesh, size) for size in options.sizes}
    measured(place, mesh, options.constant, options.values, runners, options.tries)
    mesh.barrier()
    mesh.close()


main()
