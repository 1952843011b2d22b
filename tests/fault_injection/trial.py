"""One run with its faults, and whether it came to the end of the undisturbed one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from processes import MarkedRun

from crosstrain.checkpoint import newest_sound
from crosstrain.records.store.run_directory import RunReader

from .injection import inject
from .plan import Combination, Fault
from .watched import Watched

RUN_SECONDS = 600.0
MAX_ACCURACY_APART = 0.02
LASTS_SECONDS = {"pause-task": 7, "pause-agent": 7, "pause-driver": 7, "cut": 6, "reset": 3}
"""Seconds to wait for a restart after a fault that needs none."""


def undisturbed(combination: Combination, folder: Path) -> Path:
    """Return a combination's run without faults; it is made on first use."""
    path = folder / f"undisturbed-{combination.name}"
    if path.exists() and (RunReader(path).summary() or {}).get("state") == "succeeded":
        return path
    shutil.rmtree(path, ignore_errors=True)
    with MarkedRun(_command(combination, folder, path.name), folder) as run:
        if run.wait(RUN_SECONDS):
            raise RuntimeError(run.stderr())
    return path


def _command(combination: Combination, folder: Path, name: str) -> list[str]:
    return ["run", *combination.arguments, "--max-restarts", "100", "--out", str(folder), "--name", name, "--quiet"]


def tried(combination: Combination, faults: Sequence[Fault], reference: Path, folder: Path) -> list[dict[str, Any]]:
    """Run with these faults, one after another; return their results.

    A problem at the end is recorded with each of them.
    """
    path = folder / faults[0].run
    shutil.rmtree(path, ignore_errors=True)
    watched = Watched(path)
    outcomes: list[dict[str, Any]] = []
    with MarkedRun(_command(combination, folder, path.name), folder) as run:
        for fault in faults:
            outcome = _inject(fault, watched, run, workers_rejoin=combination.workers_rejoin)
            outcomes.append({**fault.to_json(), **outcome})
            if outcome["problem"]:
                break
        problems = [outcome["problem"] for outcome in outcomes if outcome["problem"]]
        wrong = problems[0] if problems else _end(run, faults[-1], combination, folder, path)
    wrong = wrong or same_end(combination, path, reference)
    for outcome in outcomes:
        outcome["problem"] = outcome["problem"] or wrong
    if not wrong:
        shutil.rmtree(path)
    return outcomes


def _inject(fault: Fault, watched: Watched, run: MarkedRun, *, workers_rejoin: bool) -> dict[str, Any]:
    """Inject a fault at its step and watch; return it with the ``problem``."""
    if watched.wait(lambda: watched.step >= fault.step or run.process.poll() is not None, RUN_SECONDS) is None:
        return _outcome(f"step {fault.step} was not reached in {RUN_SECONDS:g} s: {run.stderr()[-500:]}")
    if run.process.poll() is not None:
        return _outcome(f"the run had ended before step {fault.step}: {run.stderr()[-500:]}")
    failed, restarted = len(watched.failures()), len(watched.events("run_restarted")) + len(watched.events("task_restarted"))
    for _ in range(100):
        try:
            done = inject(fault, watched, run.process.pid, workers_rejoin=workers_rejoin)
            break
        except LookupError as error:
            problem = str(error)
            time.sleep(0.05)
    else:
        return _outcome(f"nothing to do it to: {problem}")
    began = time.monotonic()
    if fault.kind == "driver":
        gone = watched.wait(lambda: not run.alive(), 20)
        return _outcome("" if gone is not None else f"still there after 20 s: {run.alive()}", done.victim, gone, None)
    limit = 60 if done.restarts else LASTS_SECONDS.get(fault.kind, 20)
    noticed = watched.wait(lambda: len(watched.failures()) > failed or run.process.poll() is not None, limit)
    if noticed is None or run.process.poll() is not None:
        lasted = "" if done.restarts is not True else f"nothing was noticed in {limit} s"
        if run.process.poll() not in (None, 0):
            lasted = f"the run ended: {run.stderr()[-800:]}"
        return _outcome(lasted, done.victim, None, None)
    alone, cause = watched.failures()[-1]
    returns = ("task_restarted", "run_restarted")  # all tasks may have to restart before that one is back

    def came() -> bool:
        return sum(len(watched.events(name)) for name in returns) > restarted

    again = watched.wait(lambda: came() or run.process.poll() is not None, 90)
    blamed = "" if done.blamed in cause else f"blamed was: {cause}"
    if alone and not came() and run.process.poll() is not None:
        return _outcome(blamed, done.victim, noticed, None)  # the others reached the end before it was back
    if again is None or not came():
        return _outcome(f"noticed ({cause}), and did not continue: {run.stderr()[-500:]}", done.victim, noticed, None)
    size = (watched.path / "steps.jsonl").stat().st_size
    watched.wait(lambda: (watched.path / "steps.jsonl").stat().st_size > size, 30)
    if done.alone and not alone:
        blamed = f"all tasks restarted, although one was enough: {cause}"
    if done.restarts is False:
        blamed = f"it was no reason to restart: {cause}"
    return _outcome(blamed, done.victim, noticed, time.monotonic() - began)


def _outcome(problem: str, victim: str = "", noticed: float | None = None, again: float | None = None) -> dict[str, Any]:
    return {"problem": problem, "victim": victim, "noticed_seconds": noticed, "training_again_seconds": again}


def _end(run: MarkedRun, last: Fault, combination: Combination, folder: Path, path: Path) -> str:
    """Await the run's end, after its driver's death that of a resumed one; return the problem."""
    if last.kind == "driver":
        run.process.wait()
        command = ["run", "--resume", str(path), "--quiet", "--force"]
        with MarkedRun(command, folder) as resumed:
            code = resumed.wait(RUN_SECONDS)
            return f"resumed, it ended with {code}: {resumed.stderr()[-500:]}" if code else ""
    code = run.wait(RUN_SECONDS)
    if code:
        return f"it ended with {code}: {run.stderr()[-800:]}"
    deadline = time.monotonic() + 5
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"left behind: {run.alive()}" if run.alive() else ""


def same_end(combination: Combination, path: Path, reference: Path) -> str:
    """Return the differences at the end.

    Sync runs: any bit of a loss or weight. Async: an accuracy difference above 0.02.
    """
    run, undisturbed = RunReader(path), RunReader(reference)
    if combination.mode == "async":
        accuracy, expected = (reader.summary()["eval"]["accuracy"] for reader in (run, undisturbed))
        applied = json.loads((path / "summary.json").read_text())["updates_applied"]
        if applied != combination.steps:
            return f"{applied} updates were applied of {combination.steps}"
        if sorted(step for step, _ in _losses(run)) != list(range(combination.steps)):
            return "steps are missing, or there twice"
        return "" if abs(accuracy - expected) <= MAX_ACCURACY_APART else f"accuracy {accuracy}, undisturbed {expected}"
    losses = [_losses(reader) for reader in (run, undisturbed)]
    if [step for step, _ in losses[0]] != list(range(combination.steps)):
        return "steps are missing, or there twice"
    if losses[0] != losses[1]:
        first = next(index for index, pair in enumerate(zip(*losses, strict=True)) if pair[0] != pair[1])
        return f"losses differ from step {first} on: {losses[0][first][1]} and {losses[1][first][1]}"
    weights = [newest_sound(folder)[0].arrays for folder in (path, reference)]
    differ = [name for name in weights[1] if not np.array_equal(weights[0][name], weights[1][name])]
    return f"weights differ: {differ}" if differ else ""


def _losses(reader: RunReader) -> list[tuple[int, float]]:
    return [(record.step + place, loss) for record in reader.steps() for place, loss in enumerate(record.losses)]
