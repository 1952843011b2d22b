"""``python -m fault_injection``: inject what is missing in the results, print the table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from itertools import groupby
from pathlib import Path
from statistics import median

from .plan import COMBINATIONS, KINDS, planned
from .trial import tried, undisturbed


def main() -> int:
    """Return 1 where anything was not as it should be, 0 where all was."""
    parser = argparse.ArgumentParser(prog="fault_injection", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="this kind alone; may be given more than once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-kill", type=int, default=25, help="how many of each kind of kill")
    parser.add_argument("--minutes", type=float, default=90, help="begin no run later than this")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="folder of the runs and of results.jsonl")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the run which is under way is ended
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    os.environ.setdefault("CROSSTRAIN_TEST_MARK", "none")
    plan = planned(options.seed, options.per_kill, options.kind or KINDS)
    known = {(line["seed"], line["key"]): line for line in _read(results)}
    by_name = {combination.name: combination for combination in COMBINATIONS}
    until = time.monotonic() + 60 * options.minutes
    for run, faults in groupby(plan, key=lambda fault: fault.run):
        wanted = list(faults)
        if all((options.seed, fault.key) in known for fault in wanted):
            continue
        if time.monotonic() > until:
            print("the time is over; the same command continues", file=sys.stderr)
            break
        combination = by_name[wanted[0].combination]
        print(f"{run}: {', '.join(fault.kind for fault in wanted)}", file=sys.stderr)
        for outcome in tried(combination, wanted, undisturbed(combination, options.out), options.out):
            line = {"seed": options.seed, **outcome}
            known[options.seed, outcome["key"]] = line
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if outcome["problem"]:
                print(f"  {outcome['key']} at step {outcome['step']}: {outcome['problem']}", file=sys.stderr)
    done = [known[options.seed, fault.key] for fault in plan if (options.seed, fault.key) in known]
    print(_table(done))
    print(f"{len(done)} of {len(plan)} faults of seed {options.seed}")
    return int(len(done) < len(plan) or any(line["problem"] for line in done))


def _read(results: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _table(lines: list[dict[str, object]]) -> str:
    rows = [
        "| run | fault | injected | as it should be | noticed after, median (most) | trains again after, median (most) |",
        "|---|---|---|---|---|---|",
    ]
    for combination in COMBINATIONS:
        for kind in KINDS:
            lines_of_kind = [line for line in lines if (line["combination"], line["kind"]) == (combination.name, kind)]
            if lines_of_kind:
                good = sum(not line["problem"] for line in lines_of_kind)
                noticed, again = (_spread([line[name] for line in lines_of_kind]) for name in ("noticed_seconds", "training_again_seconds"))
                rows.append(f"| {combination.name} | {kind} | {len(lines_of_kind)} | {good} | {noticed} | {again} |")
    return "\n".join(rows)


def _spread(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{median(known):.2f} s ({max(known):.2f} s)" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
