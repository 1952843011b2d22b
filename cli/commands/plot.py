"""``trainer plot``: the report's pictures as files."""

from __future__ import annotations

from pathlib import Path

import click

from ...report.catalog.run import started_runs
from ...report.plots.matplotlib_renderer import FORMATS, Format, write_figures
from ...report.plots.training_charts import pictures
from ..options import GivenPath
from ..run_arguments import readable_runs

__all__ = ["plot"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("figures"),
    show_default=True,
    help="Folder for the pictures; earlier ones of this command are replaced, other files never.",
)
@click.option("--format", "image", type=click.Choice(FORMATS), default="png", show_default=True, help="What the files are.")
@click.option(
    "--out",
    type=GivenPath(),
    default=Path("runs"),
    envvar="TRAINER_OUT",
    show_default=True,
    help="Folder in which run directories are made.",
)
def plot(runs: tuple[str, ...], output: Path, image: Format, out: Path) -> None:
    """Draw runs side by side as files for papers and slides: loss, metrics, speed, resources, where the time went.

    RUN is a run directory, or the name of one below --out; a folder of runs stands for all of them. The paths are printed, a line each.
    """
    for path in write_figures(pictures(started_runs(readable_runs(runs, out))), output, image):
        click.echo(path)
