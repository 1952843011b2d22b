"""Entry point of the benchmarks.

Usage: ``python -m benchmarks [--group GROUP …] [--only ROW …] [--repeats N] [--quick] [--json FILE] …``
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

from crosstrain.core.errors import TrainerError
from crosstrain.core.suggestions import nearest

from . import machine
from .kept_results import KeptResults
from .rows import CONTESTANTS, GROUPS, ROWS
from .session import Session, needed, prepare, work_of
from .table import Result, compute, render

QUICK_DIVISOR = 10


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and return the exit code.

    Codes: 0 (a missed target included), 1 if a run failed, 130 after a signal.
    """
    options = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background has it ignored
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    facts = machine.describe(options.network, options.threads)
    print(machine.sentence(facts), flush=True)
    rows = chosen_rows(options, gpu=bool(facts["gpu"]))
    shorter = QUICK_DIVISOR if options.quick else 1
    try:
        kept = KeptResults(options.out, facts, shorter)
        session = Session(options.repeats, shorter, options.network, options.threads, options.timeout, _log, kept)
        prepare({work_of(CONTESTANTS[name]).data for name in needed(rows)})
        session.run(needed(rows))
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 130
    except TrainerError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code
    results = [compute(name, ROWS[name], session.runs) for name in rows]
    took = f"; took {(time.monotonic() - began) / 60:.0f} min"
    print(
        f"medians [smallest–largest] of {options.repeats} interleaved repeats{took}" + (", SHORT RUNS (--quick)" if options.quick else "")
    )
    print()
    print(render(results))
    for problem in session.problems:
        print(f"\nfailed: {problem}")
    if options.json is not None:
        options.json.write_text(_to_json(facts, options, session, results) + "\n", encoding="utf-8")
    return 1 if session.problems else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="The speed of trainer compared with its peers; see docs/benchmarks.md."
    )
    parser.add_argument("--group", nargs="+", choices=tuple(GROUPS), help="the rows of these groups (default: all)")
    parser.add_argument(
        "--only", nargs="+", type=_rows, metavar="ROW", help=f"these rows, or all that fit a pattern such as 'alexnet-*': {', '.join(ROWS)}"
    )
    parser.add_argument("--repeats", type=_positive, default=5, metavar="N", help="interleaved repeats (default 5)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: to see that everything works, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures as well")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep finished results there, and take up those of the same machine, versions and code"
    )
    parser.add_argument("--network", choices=("isolated", "host"), default="isolated", help="three nodes: virtual nodes, or loopback")
    parser.add_argument("--threads", type=_positive, metavar="N", help="compute threads a task, on both sides (default: trainer's choice)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="most that one run may take (default 300)")
    return parser.parse_args(arguments)


def chosen_rows(options: argparse.Namespace, *, gpu: bool) -> list[str]:
    """Return the selected rows; without a GPU its rows only if they were named."""
    if options.only:
        return list(dict.fromkeys(row for rows in options.only for row in rows))
    groups = options.group or list(GROUPS)
    if "gpu" in groups and not gpu:
        _log("no GPU that torch finds: the rows of group gpu are skipped")
        groups = [group for group in groups if group != "gpu"]
    return list(dict.fromkeys(row for group in groups for row in GROUPS[group]))


def _rows(name: str) -> list[str]:
    matches = [row for row in ROWS if fnmatchcase(row, name)]
    if matches:
        return matches
    near = nearest(name, ROWS)
    raise argparse.ArgumentTypeError(f"no row {name!r}; " + (f"did you mean {near!r}?" if near else f"rows: {', '.join(ROWS)}"))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def _to_json(facts: dict[str, object], options: argparse.Namespace, session: Session, results: list[Result]) -> str:
    runs = {name: [run and run.to_json() for run in repeats] for name, repeats in session.runs.items()}
    document = {
        "machine": facts,
        "repeats": options.repeats,
        "quick": options.quick,
        "rows": [result.to_json() for result in results],
        "runs": runs,
        "problems": session.problems,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
