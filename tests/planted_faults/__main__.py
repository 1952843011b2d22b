"""``python -m planted_faults``: plant each fault, compare, and print what was found.

A case is a fault on a model; the faulty side is TensorFlow or torch in turn. A line is right if update, part, layer and side are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from crosstrain.core.errors import TrainerError
from crosstrain.core.job import Job
from crosstrain.lockstep.compare import Comparer
from crosstrain.lockstep.jobs import on_this_machine
from crosstrain.lockstep.processes import SideProcesses

from .faults import FAULTS, MODELS, Fault

SITE = Path(__file__).parent / "site"
BACKENDS = ("torch", "tf")
UPTO = 4
MIN_RIGHT, MIN_CAUSES = 0.98, 0.8


class SoundSide:
    """The processes of the side without fault, the same for all cases of a job in turn."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._processes: SideProcesses | None = None

    def processes_of(self, job: Job) -> SideProcesses:
        """Return the processes of a job."""
        if self._processes is None or job != self._job:
            self.close()
            self._job, self._processes = job, SideProcesses("A", "sound")
        return self._processes

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.kill()
        self._processes = None


def both_jobs(fault: Fault, model: str, faulty: str) -> tuple[Job, Job]:
    """Return the jobs of the sound and of the faulty side."""
    settings = {"steps": 40, **MODELS[model], **fault.settings, "seed": 3}
    sound = BACKENDS[1 - BACKENDS.index(faulty)]
    first, second = (on_this_machine(Job.model_validate({**settings, "backend": name}), deterministic=True) for name in (sound, faulty))
    return first, second


def case(fault: Fault, model: str, faulty: str, sound_side: SoundSide) -> dict[str, object]:
    """Compare a clean side with a faulty one; return a line of results."""
    jobs = both_jobs(fault, model, faulty)
    planted = {"TRAINER_PLANTED_FAULT": fault.name, "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    line: dict[str, object] = {"fault": fault.name, "model": model, "on": faulty}
    faulty_side = SideProcesses("B", "faulty", environment=planted)
    try:
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparer(jobs, ("sound", "faulty"), Path(folder), UPTO).compare_in([sound_side.processes_of(jobs[0]), faulty_side])
    except TrainerError as error:
        sound_side.close()
        return {**line, "problem": str(error)[:300]}
    finally:
        faulty_side.kill()
    finding = comparison.begins
    seconds = round(time.monotonic() - began, 1)
    if finding is None:
        return {**line, "found": None, "seconds": seconds}
    return {**line, "found": [finding.update, finding.part, finding.layer, finding.side, finding.cause], "seconds": seconds}


def faulty_backend(number: int, fault: Fault, model: str) -> str:
    """Return the backend with the fault: each in turn.

    But torch carries a module out itself, not the nodes of its graph.
    """
    return "tf" if model == "imported" and fault.part in ("forward", "backward", "buffers") else BACKENDS[number % 2]


def is_right(fault: Fault, line: dict[str, Any]) -> bool:
    """Return whether a line has the update, the part, the layer and the side of a fault."""
    model = line["model"]
    side = "" if fault.part == "weights" else "faulty"  # of other initial values neither is wrong
    return (line.get("found") or [])[:4] == [fault.updates.get(model, fault.update), fault.part, fault.layers[model], side]


def has_cause(fault: Fault, line: dict[str, Any]) -> bool:
    """Return whether a line names a fault's cause."""
    return fault.cause is not None and fault.cause in (line.get("found") or [""])[-1]


def table(lines: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: a fault a row, a model a column."""
    rows = ["| fault | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    known = {(line["fault"], line["model"]): line for line in lines}
    for fault in FAULTS.values():
        cells = []
        for model in MODELS:
            line = known.get((fault.name, model))
            words = "" if line is None else "right" if is_right(fault, line) else "wrong"
            cells.append(f"{words}, cause" if line is not None and has_cause(fault, line) else words)
        rows.append(f"| {fault.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Return 0 where enough cases are right."""
    parser = argparse.ArgumentParser(prog="planted_faults", description=__doc__)
    parser.add_argument("--only", action="append", help="a fault or a model; may be given more than once")
    parser.add_argument("--out", type=Path, default=Path("runs/planted-faults.jsonl"), help="file of the results; those in it are kept")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if options.out.exists():
        known = {(line["fault"], line["model"]): line for line in map(json.loads, options.out.read_text().splitlines())}
    wanted = [(fault, model) for fault in FAULTS.values() for model in fault.layers]
    if options.only:
        names = set(options.only)
        wanted = [(fault, model) for fault, model in wanted if fault.name in names or model in names]
    cases = [(fault, model, faulty_backend(number, fault, model)) for number, (fault, model) in enumerate(wanted)]
    with closing(SoundSide()) as sound_side:
        for fault, model, on in sorted(cases, key=lambda case: repr(both_jobs(*case)[0])):  # equal sound sides together
            if (fault.name, model) not in known:
                line = known[fault.name, model] = case(fault, model, on, sound_side)
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), file=sys.stderr)
    lines = [known[fault.name, model] for fault, model in wanted]
    right = sum(is_right(FAULTS[line["fault"]], line) for line in lines)
    in_catalogue = [line for line in lines if FAULTS[line["fault"]].cause is not None]
    causes = sum(has_cause(FAULTS[line["fault"]], line) for line in in_catalogue)
    print(table(lines))
    print(f"{right} of {len(lines)} right in update, part, layer and side; {causes} of {len(in_catalogue)} causes named")
    return int(right < MIN_RIGHT * len(lines) or causes < MIN_CAUSES * len(in_catalogue))


if __name__ == "__main__":
    sys.exit(main())
