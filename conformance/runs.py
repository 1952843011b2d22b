"""Runs a job as a user would, in processes of its own, and reads back what it wrote."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import find_checkpoint, list_checkpoints
from ..core.process import python
from ..launch.node.fork_server_client import POOL_VARIABLE
from ..records.schema import EvalRecord, StepRecord
from ..records.store.run_directory import RunReader

__all__ = [
    "LENT_SERVERS_VARIABLE",
    "FinishedRun",
    "environment_of_runs",
    "norm_wise_difference",
    "options_of",
    "read_run",
    "relative_difference",
    "run_job",
    "trainer",
]

TIMEOUT_SECONDS = 900.0

LENT_SERVERS_VARIABLE = "CROSSTRAIN_TEST_FORK_SERVERS"
"""Names a pool of fork servers that the commands started here may use (`fork_server_pool.py`), and nothing else that tests start."""


@dataclass(frozen=True)
class FinishedRun:
    """A run directory that has been read: losses float64 [updates] in step order, weights by canonical name, records, summary."""

    path: Path
    summary: Mapping[str, Any]
    losses: NDArray[np.float64]
    weights: Mapping[str, NDArray[np.float32]]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]


SET_BY_SCIKIT_LEARN = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Variables of a process that has imported it: the pool has not, and lends nothing to who differs from it."""


def trainer(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run the command ``trainer`` with this interpreter and wait for its end."""
    command = python("crosstrain.cli.main", *arguments)
    own = environment_of_runs(environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, env=own, stdin=subprocess.DEVNULL, check=False)


def environment_of_runs(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment, this process's by default, in which a command may use the pool of fork servers, where there is one."""
    own = dict(os.environ if environment is None else environment)
    if LENT_SERVERS_VARIABLE in own:
        own.setdefault(POOL_VARIABLE, own[LENT_SERVERS_VARIABLE])
        for name in SET_BY_SCIKIT_LEARN:
            own.pop(name, None)
    return own


def run_job(out: Path, environment: Mapping[str, str] | None = None, **options: object) -> FinishedRun:
    """Run one job with ``trainer run --json`` and read its directory. Options are the job's fields.

    Raises AssertionError with what the command printed where it failed.
    """
    arguments = ["run", "--json", "--quiet", "--out", str(out), *options_of(options)]
    done = trainer(*arguments, environment=environment)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return read_run(Path(json.loads(done.stdout)["path"]))


def options_of(fields: Mapping[str, object]) -> list[str]:
    """Return fields of a job as what is typed for them."""
    typed: list[str] = []
    for key, value in fields.items():
        flag = key.replace("_", "-")
        typed += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return typed


def read_run(path: Path) -> FinishedRun:
    """Read a finished run."""
    reader = RunReader(path)
    steps = tuple(reader.steps())
    ordered = sorted(steps, key=lambda record: record.step)
    losses = np.array([loss for record in ordered for loss in record.losses], dtype=np.float64)
    weights = find_checkpoint(path)[0].parameters if list_checkpoints(path) else {}
    return FinishedRun(path, reader.summary() or {}, losses, weights, steps, tuple(reader.evals()))


def relative_difference(ours: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Return max |a − b| / |b| over the steps."""
    return float(np.max(np.abs(ours - reference) / np.abs(reference)))


def norm_wise_difference(ours: Mapping[str, NDArray[Any]], reference: Mapping[str, NDArray[Any]]) -> float:
    """Return ‖a − b‖ / ‖b‖ over all parameters together; both must have the same names and shapes."""
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in reference.items()}:
        raise AssertionError(f"different parameters: {sorted(ours)} and {sorted(reference)}")
    difference = sum(float(np.sum((ours[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    norm = sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference)
    return math.sqrt(difference / norm)
