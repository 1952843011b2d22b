"""``python -m imported_coverage``: run what is missing in the results, print the table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .plan import MODELS, MODULES
from .trial import compared_modules, trained_model

CHUNK = 20  # random modules of one process per framework
MIN_AGREEING_MODULES = 0.95


def main() -> int:
    """Return 0 where all models and 95% of the modules agree, else 1."""
    parser = argparse.ArgumentParser(prog="imported_coverage", description=__doc__)
    parser.add_argument("--only", action="append", help="a model, or 'module NUMBER'; may be given more than once")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing later than this")
    parser.add_argument("--out", type=Path, default=Path("runs/imported-coverage"), help="folder of the runs and of results.jsonl")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    os.environ["TRAINER_DATA_CACHE"] = str((options.out / "cache" / "data").absolute())
    known = {line["name"]: line for line in _read(results)}
    until = time.monotonic() + 60 * options.minutes
    wanted = [name for name in (*MODULES, *MODELS) if not options.only or name in options.only]
    missing = [name for name in wanted if name not in known]
    modules = [name for name in missing if name in MODULES]
    parts = [modules[first : first + CHUNK] for first in range(0, len(modules), CHUNK)]
    for part in [*parts, *([name] for name in missing if name in MODELS)]:
        if time.monotonic() > until:
            print("the time is over; the same command continues", file=sys.stderr)
            break
        lines = compared_modules(part, options.out) if part[0] in MODULES else [trained_model(part[0], options.out)]
        with results.open("a") as file:
            for line in lines:
                known[line["name"]] = line
                file.write(json.dumps(line) + "\n")
                print(f"{line['name']}: {line['problem'] or 'agrees'}", file=sys.stderr)
    done = [known[name] for name in wanted if name in known]
    print(_table(done))
    good = [line for line in done if line["name"] in MODULES and not line["problem"]]
    count = sum(name in MODULES for name in wanted)
    models = all(not known.get(name, {"problem": "missing"})["problem"] for name in wanted if name in MODELS)
    return int(not models or len(good) < MIN_AGREEING_MODULES * count)


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _table(lines: list[dict[str, Any]]) -> str:
    head = (
        "| model | largest difference of a loss, relative: of 5 updates | of 20 updates | torch by itself, last bits of pixels | problem |"
    )
    rows = [head, "|---|---|---|---|---|"]
    for line in lines:
        if line["name"] in MODELS:
            parts = line.get("first"), line.get("all"), line.get("torch", {}).get("all")
            figures = " | ".join("-" if part is None else f"{part:.1e}" for part in parts)
            rows.append(f"| {line['name']} | {figures} | {line['problem']} |")
    modules = [line for line in lines if line["name"] in MODULES]
    rows.append("")
    rows += [f"{line['name']}: {line['problem']}" for line in modules if line["problem"]]
    rows.append(f"{sum(not line['problem'] for line in modules)} of {len(modules)} random modules agree")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
