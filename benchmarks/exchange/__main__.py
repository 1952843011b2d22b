"""Benchmark of all-reduces without training.

Usage: ``python -m benchmarks.exchange [--bandwidth RATE] [--repeats N] [--most BYTES] [--out FOLDER] [--page] …``
The direct exchange, gloo and TensorFlow's ring take turns, each alone on the machine; so do bare sockets, from which the bound follows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from crosstrain.core.errors import TrainerError
from crosstrain.core.units import parse_bandwidth

from .. import machine
from ..kept_results import KeptFiles
from ..processes import MeasurementError
from .bounds import Line, sizes
from .group import ADDERS, run_ranks
from .table import Series, markdown, write_page

MIN_BYTES, MAX_BYTES, FACTOR = 1 << 10, 256 << 20, 4
SOCKETS = "sockets"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit code: 0, or 1 where a run failed."""
    options = parse(arguments)
    facts = machine.describe(options.network, None)
    print(machine.sentence(facts), flush=True)
    wanted = sizes(MIN_BYTES, options.most, FACTOR)
    settings = {"bandwidth": options.bandwidth, "sizes": wanted, "ranks": options.ranks, "tries": options.tries}
    measured: dict[str, list[Any]] = {name: [] for name in (SOCKETS, *options.only)}
    try:
        kept = KeptFiles(options.out, facts, **settings)
        for repeat in range(options.repeats):
            for name, results in measured.items():
                definition = {"exchange": name, "repeat": repeat}
                result = kept.find(definition)
                if result is None:
                    result = _run(name, wanted, options)
                    kept.keep(definition, result)
                results.append(result)
                _log(f"{repeat + 1}/{options.repeats} {name}")
    except MeasurementError as error:
        _log(f"benchmarks.exchange: {name}: {error}")
        return 1
    except TrainerError as error:
        _log(f"benchmarks.exchange: {error}")
        return error.exit_code
    network = network_of(measured[SOCKETS], options.bandwidth)
    series = Series(options.ranks, wanted, network, {name: _medians(measured[name], wanted) for name in options.only})
    text = markdown(series)
    print(text)
    if options.page:
        write_page(series, text, facts, options.bandwidth, options.repeats)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description="All-reduces by themselves; see docs/benchmarks.md.")
    parser.add_argument("--only", nargs="+", choices=tuple(ADDERS), default=list(ADDERS), help="these exchanges (default: all)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved repeats (default 5)")
    parser.add_argument("--tries", type=int, default=3, metavar="N", help="tries of each size in a repeat, whose median counts (default 3)")
    parser.add_argument("--most", type=int, default=MAX_BYTES, metavar="BYTES", help="the largest vector (default 256 MiB)")
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="nodes with a rank each (default 3)")
    parser.add_argument("--bandwidth", type=parse_bandwidth, metavar="RATE", help="speed of each node's link, such as 1gbit")
    parser.add_argument("--network", choices=("isolated", "host"), default="isolated", help="virtual nodes, or loopback")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep what is finished there, and take it up next time")
    parser.add_argument("--page", action="store_true", help="write table and picture into docs/benchmarks.md")
    return parser.parse_args(arguments)


def network_of(runs: Sequence[dict[str, list[float]]], bits_per_second: float | None) -> Line:
    """Return α and β of a network from its ping-pongs and its streams.

    α is half the median ping-pong; β is the speed of the link or, without a limit, of plain sockets.
    """
    latency = median(value for run in runs for value in run["latency_seconds"])
    reached = median(value for run in runs for value in run["bytes_per_second"])
    return Line(latency, reached if bits_per_second is None else bits_per_second / 8)


def _run(name: str, wanted: Sequence[int], options: argparse.Namespace) -> Any:
    arguments = ["--sizes", ",".join(map(str, wanted)), "--tries", str(options.tries)]
    script = "sockets.py" if name == SOCKETS else ADDERS[name]
    return run_ranks(
        script, arguments, ranks=options.ranks, network=options.network, bits_per_second=options.bandwidth, timeout_seconds=600.0
    )


def _medians(runs: Sequence[dict[str, list[float]]], wanted: Sequence[int]) -> list[float]:
    """Return for each size the median over the repeats of the median of a repeat's tries."""
    return [median(median(run[str(size)]) for run in runs) for size in wanted]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
