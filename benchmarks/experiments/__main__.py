"""Entry point of the experiments.

Usage: ``python -m benchmarks.experiments [--only NAME …] [--shorter N] [--out FOLDER] [--page-only]``
Each is a ``trainer sweep`` in its folder; another start runs only what is missing. Then the page's tables and plots are made from the
summaries.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from crosstrain.core.process import command_ending_with_parent
from crosstrain.core.settings.sources import resolve
from crosstrain.core.suggestions import nearest

from ..processes import environment
from .catalog import EXPERIMENTS, Experiment
from .page import fill, machine_text, measured_text
from .results import Results, read_results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/experiments.md"
MAX_PICTURE_BYTES = 200_000
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the page and return the exit code.

    Codes: 0, 1 if a point failed, 130 after Ctrl-C.
    """
    options = parse(arguments)
    names = options.only or list(EXPERIMENTS)
    failed: list[str] = []
    if not options.page_only:
        for name in names:
            _log(f"== {name}")
            code = _trainer("sweep", *sweep_arguments(name, options.out, options.shorter))
            if code == INTERRUPTED:
                return INTERRUPTED
            if code != 0:
                failed.append(name)
    write_page(options.page, options.out)
    if failed:
        _log(f"not all points succeeded: {', '.join(failed)}")
    return 1 if failed else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description="The experiments of docs/experiments.md.")
    parser.add_argument("--only", nargs="+", type=_name, metavar="NAME", help=f"these experiments: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--shorter", type=_divisor, default=1, metavar="N", help="divide epochs or steps by this; the page shows it")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/experiments"), metavar="FOLDER", help="where the sweeps are (runs/experiments)"
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page to fill in (docs/experiments.md)")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from what is there")
    options = parser.parse_args(arguments)
    if not options.page.is_file():
        parser.error(f"--page: there is no file {str(options.page)!r} with places to fill in")
    return options


def sweep_arguments(name: str, out: Path, shorter: int) -> list[str]:
    """Return the arguments of the ``trainer sweep`` that is an experiment."""
    experiment = EXPERIMENTS[name]
    job = resolve({}, {}, experiment.config).job
    budget: list[str] = []
    if shorter > 1:
        field, configured = ("steps", job.steps) if job.steps is not None else ("epochs", job.epochs)
        assert configured is not None, "the configuration of an experiment has epochs or steps"
        budget = [f"--{field}", str(max(1, configured // shorter))]
    return [experiment.config, *experiment.options, *budget, "--out", str(out), "--name", name]


def write_page(page: Path, out: Path) -> None:
    """Fill in the page for all experiments with results below `out`."""
    text = page.read_text(encoding="utf-8")
    measured: Results | None = None
    for name, experiment in EXPERIMENTS.items():
        results = read_results(out / name)
        if results is None or not results.points:
            continue
        measured = measured or results
        drawn = _draw(name, experiment, results, page.parent / "figures")
        text = fill(text, name, measured_text(experiment, results, [path.relative_to(page.parent).as_posix() for path in drawn]))
    if measured is not None:
        text = fill(text, "machine", machine_text(measured.points[0]))
    page.write_text(text, encoding="utf-8")


def _draw(name: str, experiment: Experiment, results: Results, folder: Path) -> list[Path]:
    """Draw an experiment's pictures; return their files. Those that are large as SVG become PNG."""
    runs = [str(point.path) for point in results.select(**(experiment.pictured or {}))]
    if not experiment.pictures or not runs:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="trainer-figures-") as scratch:
        drawn = _plot(name, runs, Path(scratch), "svg")
        for picture in experiment.pictures:
            for old in folder.glob(f"{name}-{picture}*"):
                old.unlink()
            for path in sorted(drawn.glob(f"{picture}*")):
                small = path
                if path.stat().st_size > MAX_PICTURE_BYTES:
                    _log(f"{name}: {path.stem} has {path.stat().st_size:,} bytes as SVG and becomes a PNG")
                    small = _plot(name, runs, Path(scratch), "png") / f"{path.stem}.png"
                kept.append(folder / f"{name}-{small.name}")
                kept[-1].write_bytes(small.read_bytes())
    return kept


def _plot(name: str, runs: Sequence[str], scratch: Path, form: str) -> Path:
    """Draw runs with ``trainer plot``, once for each form; return the folder."""
    folder = scratch / form
    if not folder.exists() and _trainer("plot", *runs, "-o", str(folder), "--format", form, quiet=True) != 0:
        raise SystemExit(f"the pictures of {name} cannot be drawn")
    return folder


def _trainer(*arguments: str, quiet: bool = False) -> int:
    """Run the product as a user does, without settings from this environment.

    The terminal sends Ctrl-C to it as well.
    """
    command = [str(Path(sys.executable).with_name("trainer")), *arguments]
    with subprocess.Popen(command_ending_with_parent(command), env=environment({}), stdout=subprocess.DEVNULL if quiet else None) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def _name(text: str) -> str:
    if text in EXPERIMENTS:
        return text
    near = nearest(text, EXPERIMENTS)
    raise argparse.ArgumentTypeError(
        f"no experiment {text!r}; " + (f"did you mean {near!r}?" if near else f"there are: {', '.join(EXPERIMENTS)}")
    )


def _divisor(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
