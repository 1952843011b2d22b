"""``python -m planted_faults.clean_pairs``: compare equal trainings.

Each finding is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from crosstrain.core.job import Job
from crosstrain.lockstep.compare import Comparer
from crosstrain.lockstep.jobs import on_this_machine
from crosstrain.lockstep.rounding import UNIT

from .faults import ADAM, MODELS, SGD

CALIBRATION_SEEDS = (1, 2, 3)
TEST_SEEDS = {  # large models take minutes a pair
    "cnn": range(11, 14),
    "imported": range(12, 15),
    "transformer": range(11, 14),
    "resnet18": range(11, 13),
    "alexnet": range(11, 12),
}
PAIRS = {  # settings of the first side, and what is different on the second one
    "frameworks": ({"backend": "torch"}, {"backend": "tf"}),
    "two workers on tf": ({"backend": "tf"}, {"nodes": 2}),
    "three workers on torch": ({"backend": "torch"}, {"nodes": 3}),
    "direct exchange": ({"backend": "torch", "nodes": 2}, {"exchange": "direct"}),
    "threads": ({"backend": "tf", "threads": 1}, {"threads": 2}),
    "compiled": ({"backend": "tf"}, {"compile": "on"}),
}
STATISTICS_OF_WORKERS = ("resnet18", "imported")  # batch normalisation differs by design where workers differ
UNCOMPILED = ("imported", "alexnet", "transformer")  # refused, or with dropout, whose repeats XLA does not have for every operation


def pairs(*, calibrate: bool) -> Iterator[tuple[str, str, int, dict[str, object], dict[str, object]]]:
    """Yield name, model, seed and settings of both sides of the equal pairs."""
    for model, seeds in TEST_SEEDS.items():
        rule = ADAM if model == "transformer" else SGD
        for seed in CALIBRATION_SEEDS if calibrate else seeds:
            for name, (first, changes) in PAIRS.items():
                by_worker = "nodes" in changes
                if (by_worker and model in STATISTICS_OF_WORKERS) or ("compile" in changes and model in UNCOMPILED):
                    continue
                both = {**MODELS[model], **rule, "steps": 100, "seed": seed, **first}
                yield name, model, seed, both, {**both, **changes}


def main() -> int:
    """Return 0 without false alarms."""
    parser = argparse.ArgumentParser(prog="planted_faults.clean_pairs", description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="other seeds, to choose limits by")
    parser.add_argument("--upto", type=int, default=64)
    parser.add_argument("--only", action="append", help="a pair or a model; may be given more than once")
    parser.add_argument("--out", type=Path, default=Path("runs/clean-pairs.jsonl"), help="file of the results; those in it are kept")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for name, model, seed, *sides in pairs(calibrate=options.calibrate):
        known = any((line["pair"], line["model"], line["seed"]) == (name, model, seed) for line in lines)
        if known or (options.only and not {name, model} & set(options.only)):
            continue
        jobs = [on_this_machine(Job.model_validate(settings), deterministic=name != "compiled") for settings in sides]
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparer((jobs[0], jobs[1]), ("A", "B"), Path(folder), options.upto).compare((None, None))
        largest = max((max(row.first, row.second) for row in comparison.layers), default=0.0) / UNIT
        alarms = [f"{finding.part} {finding.layer} {finding.tensor} {finding.error:.2g}" for finding in comparison.findings]
        line = {"pair": name, "model": model, "seed": seed, "tensors": comparison.tensors, "largest": largest, "alarms": alarms}
        lines.append({**line, "seconds": round(comparison.seconds, 1)})
        with options.out.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(json.dumps(lines[-1]), file=sys.stderr)
    alarms = sum(len(line["alarms"]) for line in lines)
    print(f"{alarms} false alarms in {sum(line['tensors'] for line in lines):,} tensors of {len(lines)} equal pairs")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
