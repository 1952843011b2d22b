"""Comparison of other constants for the direct exchange.

Usage: ``python -m benchmarks.exchange.constants NAME [--values …] [--sizes …] [--bandwidth RATE] …``
NAME is PIECE_BYTES, MAX_FURTHER_BYTES or BUCKET_BYTES (exchange/mesh). All values take turns within the same processes; the table marks
the fastest median of each row. For MAX_FURTHER_BYTES compare 0 (always shares) with a large value (always whole vectors).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from crosstrain.core.units import parse_bandwidth

from .. import machine
from ..processes import MeasurementError
from .group import run_ranks
from .table import size_text, time_text

KIB, MIB = 1 << 10, 1 << 20
VALUES = {
    "PIECE_BYTES": [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB],
    "MAX_FURTHER_BYTES": [0, 1 << 40],
    "BUCKET_BYTES": [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 1 << 40],
}
SIZES = {
    "PIECE_BYTES": [MIB, 4 * MIB, 16 * MIB, 64 * MIB],
    "MAX_FURTHER_BYTES": [4 * KIB, 16 * KIB, 32 * KIB, 48 * KIB, 64 * KIB, 96 * KIB, 128 * KIB, 256 * KIB, 512 * KIB],
    "BUCKET_BYTES": [4],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit code: 0, or 1 where the run failed."""
    parsed = parse(arguments)
    print(machine.sentence(machine.describe(parsed.network, None)), flush=True)
    values, sizes = parsed.values or VALUES[parsed.constant], parsed.sizes or SIZES[parsed.constant]
    options = ["--constant", parsed.constant, "--values", ",".join(map(str, values)), "--sizes", ",".join(map(str, sizes))]
    options += ["--tries", str(parsed.repeats), "--model", parsed.model, "--compute-seconds", str(parsed.compute_seconds)]
    try:
        measured = run_ranks(
            "constants.py",
            options,
            ranks=parsed.ranks,
            network=parsed.network,
            bits_per_second=parsed.bandwidth,
            timeout_seconds=1800.0,
        )
    except MeasurementError as error:
        print(f"benchmarks.exchange.constants: {error}", file=sys.stderr)
        return 1
    print(render(parsed.constant, values, measured))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.constants", description=__doc__)
    parser.add_argument("constant", choices=tuple(VALUES))
    parser.add_argument("--values", type=int, nargs="+", metavar="BYTES", help="values of the constant (default: some around today's)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="sizes of the vector")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved repeats (default 5)")
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="nodes with a rank each (default 3)")
    parser.add_argument("--model", choices=("alexnet", "layers"), default="alexnet", help="BUCKET_BYTES: whose gradients (default alexnet)")
    parser.add_argument(
        "--compute-seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="BUCKET_BYTES: what a backward pass computes on a core (default 0.3)",
    )
    parser.add_argument("--bandwidth", type=parse_bandwidth, metavar="RATE", help="speed of each node's link, such as 1gbit")
    parser.add_argument("--network", choices=("isolated", "host"), default="isolated", help="virtual nodes, or loopback")
    return parser.parse_args(arguments)


def render(name: str, values: Sequence[int], measured: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the table: a row for each size or model, a column for each value.

    The fastest of a row is bold.
    """
    lines = [f"| {name} | {' | '.join(map(size_text, values))} |", "|---:|" + "---:|" * len(values)]
    for key, of_values in measured.items():
        medians = [median(of_values[str(value)]) for value in values]
        texts = [f"**{time_text(value)}**" if value == min(medians) else time_text(value) for value in medians]
        lines.append(f"| {size_text(int(key)) if key.isdecimal() else key} | {' | '.join(texts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
