"""Speed of one's own data, and of calls from Python, against pandas and the command line.

``python -m benchmarks.own_data [--rows 1000000] [--repeats 3]``. Medians of interleaved repeats; nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import crosstrain as ct

COLUMNS = 30
PANDAS = """
import sys
import numpy, pandas
frame = pandas.read_csv(sys.argv[1])
x = pandas.get_dummies(frame.drop(columns="y")).astype("float32")
numpy.savez(sys.argv[2], x=(x - x.mean()) / x.std(), y=frame["y"])
"""
RUN = {"model": "logreg", "data": "digits", "backend": "torch", "steps": 50, "eval_every": "end"}


def write_table(path: Path, rows: int) -> None:
    """Write numbers of six digits, two columns of categories, and a class."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join([*(f"c{number}" for number in range(COLUMNS - 3)), "kind", "city", "y"]) + "\n")
        for first in range(0, rows, 10_000):
            count = min(10_000, rows - first)
            numbers = draw.normal(size=(count, COLUMNS - 3)).round(6).tolist()
            kinds, cities = draw.integers(0, 4, count).tolist(), draw.integers(0, 30, count).tolist()
            file.writelines(
                f"{','.join(map(repr, values))},k{kind},city{city},{int(values[0] > 0)}\n"
                for values, kind, city in zip(numbers, kinds, cities, strict=True)
            )


def measured(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds of a command, and the peak memory of its largest process in bytes."""
    script = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=2).returncode; "
    script += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}, check=True
    )
    return time.perf_counter() - began, 1024.0 * int(done.stdout)


def trainer(*arguments: str) -> list[str]:
    """Return a command of trainer."""
    return [sys.executable, "-m", "crosstrain.cli.main", *arguments]


def preparation(table: Path, folder: Path, repeats: int) -> None:
    """Print how long the table takes to be prepared, and pandas for the same."""
    rows: dict[str, list[tuple[float, float]]] = {"trainer": [], "pandas": []}
    for number in range(repeats):
        cache = {"TRAINER_DATA_CACHE": str(folder / f"cache-{number}")}
        rows["trainer"].append(measured(trainer("data", "prepare", f"csv:{table}?target=y"), cache))
        rows["pandas"].append(measured([sys.executable, "-c", PANDAS, str(table), str(folder / "pandas.npz")], {}))
    for name, figures in rows.items():
        seconds, memory = (statistics.median(part) for part in zip(*figures, strict=True))
        print(f"prepared by {name}: {seconds:.1f} s, {memory / 1e6:.0f} MB", flush=True)


def epochs(table: Path, folder: Path, repeats: int) -> None:
    """Print the speed of logistic regression on the table, and on arrays of equal shape."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(sum(1 for _ in table.open()) - 1, COLUMNS - 3 + 34)).astype(np.float32)
    np.savez(folder / "arrays.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    speeds: dict[str, list[float]] = {f"csv:{table}?target=y": [], f"npz:{folder / 'arrays.npz'}": []}
    os.environ["TRAINER_DATA_CACHE"] = str(folder / "cache-0")
    for _ in range(repeats):
        for data, figures in speeds.items():
            run = ct.run(model="logreg", data=data, backend="torch", batch_size=256, epochs=1, out=folder / "runs", progress=False)
            figures.append(run.summary["examples_per_second"])
    of_table, of_arrays = (statistics.median(figures) for figures in speeds.values())
    print(f"an epoch: {of_table:,.0f} examples/s of the table, {of_arrays:,.0f} of arrays: {of_table / of_arrays:.2f}", flush=True)


def calls(folder: Path, repeats: int) -> None:
    """Print what a call from Python takes beyond the command."""
    arguments = [part for name, value in RUN.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [*trainer("run", *arguments), "--out", str(folder / "runs"), "--json", "--quiet"]

    def by_command() -> None:
        json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    ways: dict[str, Callable[[], object]] = {"command": by_command, "call": lambda: ct.run(**RUN, out=folder / "runs", progress=False)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    command_seconds, call_seconds = (statistics.median(figures) for figures in seconds.values())
    print(f"a run of 50 steps: {command_seconds:.2f} s by the command, {call_seconds:.2f} s by ct.run")


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_data", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = folder / "table.csv"
        write_table(table, options.rows)
        print(f"{options.rows:,} rows of {COLUMNS} columns, {table.stat().st_size / 1e6:.0f} MB", flush=True)
        preparation(table, folder, options.repeats)
        epochs(table, folder, options.repeats)
        calls(folder, max(5, options.repeats))


if __name__ == "__main__":
    main()
