"""Comparisons of TensorFlow with torch: random modules by passes, named models by runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.conformance.runs import relative_difference, run_job

from .agreement import problem_of
from .plan import FOLDER, MODELS, MODULES

PASSES = FOLDER.parent / "imported" / "passes.py"
PASSES_SECONDS = 900.0
STEPS, FIRST = 20, 5
FIRST_LOSSES, LOSSES = 1e-4, 1e-3  # relative
DATA = "synthetic-images:size=64,classes=10,train=640,test=64"
SHIFT = "shift=1.2e-7"  # relative: the last bit of a pixel
JOB = {
    "data": DATA,
    "global_batch_size": 16,
    "steps": STEPS,
    "lr": 0.001,
    "deterministic": True,
    "eval_every": "end",
    "start_timeout": 300,
}


def computed(framework: str, references: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Compute the references on a framework; return a line for each in any case."""
    command = [sys.executable, str(PASSES), framework, str(folder)]
    try:
        done = subprocess.run(command, input="\n".join(references), text=True, check=False, capture_output=True, timeout=PASSES_SECONDS)
        output, ended = done.stdout, f"the process ended with {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as error:
        output, ended = (error.stdout or b"").decode(), f"took longer than {PASSES_SECONDS:.0f} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return lines + [{"problem": ended}] * (len(references) - len(lines))


def compared_modules(names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return a line of results for each random module."""
    lines = {framework: computed(framework, [MODULES[name] for name in names], folder) for framework in ("torch", "tf")}
    results = []
    for number, name in enumerate(names):
        problems = [f"{framework}: {lines[framework][number]['problem']}" for framework in lines if lines[framework][number]["problem"]]
        results.append({"name": name, "problem": problems[0] if problems else compared(folder, number)})
    return results


def compared(folder: Path, number: int) -> str:
    """Return how the passes of a number differ, "" where they agree."""
    expected, actual = (dict(np.load(folder / f"{framework}-{number}.npz")) for framework in ("torch", "tf"))
    return problem_of(actual, expected)


def trained_model(name: str, folder: Path) -> dict[str, Any]:
    """Train a named model on both frameworks; return its line of results.

    Where their losses differ, it is also said how far torch's own move when its pixels change in their last bits.
    """
    try:
        torch, tf = (_losses(backend, MODELS[name], folder) for backend in ("torch", "tf"))
        line = {"name": name, **_differences_between(tf, torch), "problem": ""}
        if line["first"] > FIRST_LOSSES or line["all"] > LOSSES:
            line["problem"] = f"losses differ: {torch.tolist()}, {tf.tolist()}"
            if "torchvision_model" in MODELS[name]:
                line["torch"] = _differences_between(_losses("torch", f"{MODELS[name]}&{SHIFT}", folder), torch)
    except AssertionError as error:
        return {"name": name, "problem": str(error).strip().splitlines()[-1][-600:]}
    return line


def _losses(backend: str, model: str, folder: Path) -> Any:
    losses = run_job(folder / "runs", backend=backend, model=model, tensorboard=False, **JOB).losses
    assert len(losses) == STEPS, f"{len(losses)} losses"
    return losses


def _differences_between(actual: Any, expected: Any) -> dict[str, float]:
    return {"first": relative_difference(actual[:FIRST], expected[:FIRST]), "all": relative_difference(actual, expected)}
