"""Entry point of the simulation.

Usage: ``python -m benchmarks.simulated_agents [--nodes N …] [--seconds S] [--out FOLDER] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from .measured_run import Measured, measure
from .reading import read_an_hour


def main(arguments: list[str] | None = None) -> int:
    """Measure each number of nodes, print the table and return the exit code.

    1 if a run failed, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_agents", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 1000], help="how many nodes (default: 1 10 100 1000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each of them trains (default 60)")
    parser.add_argument("--processes", type=int, default=8, help="processes that the simulated nodes are shared out to (default 8)")
    parser.add_argument("--read", action="store_true", help="also time watch, explain and report on an hour's records of the largest run")
    parser.add_argument("--out", type=Path, help="keep the run directories there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="simulated-agents-") as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        measured = [measure(nodes, options.seconds, options.processes, out) for nodes in options.nodes]
        print(table(measured))
        reading = None
        if options.read:
            reading = read_an_hour(Path(measured[-1].run))
            print(reading)
    if options.json is not None:
        document = {"runs": [asdict(run) for run in measured], "reading": None if reading is None else asdict(reading)}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(run.exit_code == 0 for run in measured) else 1


_COLUMNS = (
    ("nodes", lambda run: f"{run.nodes:,}"),
    ("start", lambda run: f"{run.start_seconds:.1f} s"),
    ("driver CPU in the start", lambda run: f"{run.start_cpu_seconds:.1f} s"),
    ("plans/s", lambda run: f"{run.plans_per_second:.1f}"),
    ("samples/s", lambda run: f"{run.samples_per_second:.0f}"),
    ("driver", lambda run: f"{run.driver_cores:.2f} cores"),
    ("peak memory", lambda run: f"{run.driver_peak_bytes / 2**20:.0f} MiB"),
    ("records in an hour", lambda run: f"{run.bytes_in_an_hour / 1e6:.0f} MB"),
    ("end", lambda run: f"{run.end_seconds:.1f} s"),
)


def table(measured: list[Measured]) -> str:
    """Return the figures as a table in Markdown."""
    rows = [[name for name, _ in _COLUMNS], ["---"] * len(_COLUMNS), *([show(run) for _, show in _COLUMNS] for run in measured)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
