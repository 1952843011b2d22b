"""``trainer compare``: a comparison of finished runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ...core.console import json_text
from ...core.errors import UsageError
from ...core.setting import LEARNT, SPEED, STEPS, TARGET, TIME
from ...report.analysis.conclusion import conclude
from ...report.analysis.configurations import FIGURES, SPEED_FIGURE, TARGET_FIGURE
from ...report.analysis.sentences import as_lines, closing_text, render_conclusion
from ...report.analysis.sentences import as_text as conclusion_as_text
from ...report.compare.comparison import compare_runs, setting_rule
from ...report.compare.formats import as_csv, as_markdown, as_text
from ...report.pages.paper_table import as_latex
from ...report.runs.columns import column, metric_columns
from ...report.runs.run import Run
from ..options import GivenPath, IntegerRange, NumberRange, check_choice
from ..run_request import finished_runs

_LAYOUTS = ("auto", "columns", "rows")
_RANKED_FOR = {SPEED_FIGURE: {SPEED, STEPS, TIME}, TARGET_FIGURE: {TARGET}}  # figures of --metric to kinds ranked by


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN…")
@click.option("--by", metavar="SETTING[,…]", help="One row per value of a setting: nodes, batch_size, mode, backend, lr, ….")
@click.option("--metric", metavar="METRIC[,…]", help="Only these figures: examples_per_second, loss, a metric such as accuracy, memory, ….")
@click.option(
    "--fold/--no-fold", default=True, help="Runs that differ by seed alone in one row: mean ± half its 95 % interval. [default: fold]"
)
@click.option("--layout", metavar="|".join(_LAYOUTS), default="auto", help="Layout: runs as columns or as rows. [default: auto]")
@click.option(
    "--curves",
    metavar="QUANTITY",
    help="Instead of a table: loss, a metric such as accuracy, steps_per_second or examples_per_second, on a grid.",
)
@click.option("--over", metavar="AXIS", help="Curves: over steps, examples or seconds. [default: steps]")
@click.option(
    "--smooth",
    type=NumberRange(0, 1, max_open=True),
    metavar="X",
    help="Curves: smoothing factor of an exponential moving average (0: none).",
)
@click.option("--points", type=IntegerRange(min=2), metavar="N", help="Curves: points of the grid. [default: 200]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with unrounded figures.")
@click.option("--csv", "csv_too", is_flag=True, help="Print comma-separated values, with unrounded figures.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--latex",
    is_flag=True,
    help="Print one LaTeX table for a paper: mean ± half the 95 % interval, with caption and label (package booktabs).",
)
@click.option("--out", type=GivenPath(), default=Path("runs"), envvar="TRAINER_OUT", help="Folder with the runs. [default: runs]")
def compare(
    runs: tuple[str, ...],
    by: str | None,
    metric: str | None,
    fold: bool,
    layout: str,
    curves: str | None,
    over: str | None,
    smooth: float | None,
    points: int | None,
    as_json: bool,
    csv_too: bool,
    markdown: bool,
    latex: bool,
    out: Path,
) -> None:
    """Compare finished runs and rank their configurations.

    Prints the significance of differences, confounding differences, and tables. RUN is a run directory, the name of one in the folder with
    the runs, or a folder of runs. Ratios are relative to the first run; † marks figures that are not comparable with the first run's.
    """
    forms = [name for name, is_given in (("--json", as_json), ("--csv", csv_too), ("--markdown", markdown), ("--latex", latex)) if is_given]
    if len(forms) > 1:
        raise UsageError(f"{forms[1]} cannot be combined with {forms[0]}; choose one of --json, --csv, --markdown and --latex.")
    check_choice("--layout", layout, _LAYOUTS)
    finished = finished_runs(runs, out)
    if curves is not None:
        if by is not None or metric is not None or markdown or latex:
            raise UsageError("--curves: goes with --over, --smooth, --points, --json and --csv alone.")
        _print_curves(finished, curves, over or "steps", smooth, points, as_json)
        return
    if over is not None or smooth is not None or points is not None:
        raise UsageError("--over, --smooth and --points: say what a curve is like; name it with --curves loss, for example.")
    rules = [setting_rule(text) for text in _split_list("--by", by, "settings, such as nodes or batch_size")]
    comparison = compare_runs(finished, fold=fold, by=rules)
    columns = [
        column(text, metric_columns(comparison.runs)) for text in _split_list("--metric", metric, "figures, such as accuracy or memory")
    ]
    if csv_too:
        click.echo(as_csv(comparison, columns), nl=False)
        return
    groups = {shown.group for shown in columns}
    figures = FIGURES if as_json or not columns else tuple(figure for figure in FIGURES if groups & _RANKED_FOR[figure])
    concluded = conclude(comparison.runs, figures=figures)
    words = render_conclusion(concluded) if concluded.is_conclusive and (figures or groups & LEARNT) else None
    if as_json:
        conclusion = None if words is None else concluded.to_json(words.sentences)
        click.echo(json_text({"conclusion": conclusion, **comparison.to_json()}, indent=1))
    elif markdown or latex:
        before = [] if words is None else as_lines(words)
        text = as_markdown(comparison, columns, before) if markdown else as_latex(finished, columns, before, by=rules, fold=fold)
        click.echo(text, nl=False)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("" if words is None else conclusion_as_text(words, width), nl=False)
        click.echo(as_text(comparison, columns, layout=layout, width=width), nl=False)
        click.echo("" if words is None else closing_text(words, width), nl=False)


def _split_list(option: str, text: str | None, allowed: str) -> list[str]:
    if text is None:
        return []
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError.of(option, text, f"one or several {allowed}, with commas between")
    return parts


def _print_curves(runs: Sequence[Run], quantity: str, over: str, smooth: float | None, points: int | None, as_json: bool) -> None:
    from ...report.pages.export import AXES, POINTS, quantities
    from ...report.pages.export import curves as curves_of

    known = quantities(runs)
    quantity = quantity.strip().lower().replace("-", "_")
    check_choice("--curves", quantity, known)
    if over not in AXES:
        raise UsageError.of("--over", over, ", ".join(AXES), AXES)
    drawn = curves_of(runs, quantity, over, smooth=smooth, points=points or POINTS)
    click.echo(json_text(drawn.to_json(), indent=1) if as_json else drawn.to_csv(), nl=as_json)
