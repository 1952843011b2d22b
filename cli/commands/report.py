"""``trainer report``: runs side by side as one page."""

from __future__ import annotations

from pathlib import Path

import click

from ...report.catalog.run import started_runs
from ...report.page.page import write_page
from ..options import GivenPath
from ..run_arguments import readable_runs

__all__ = ["report"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The page; an earlier report is replaced, another file never.",
)
@click.option(
    "--out",
    type=GivenPath(),
    default=Path("runs"),
    envvar="TRAINER_OUT",
    show_default=True,
    help="Folder in which run directories are made.",
)
def report(runs: tuple[str, ...], output: Path, out: Path) -> None:
    """Write runs side by side as one page that opens in a browser, without a network: tables, curves, resources, where the time went.

    RUN is a run directory, or the name of one below --out; a folder of runs stands for all of them. Runs that failed or have not ended are
    shown as such. The path of the page is printed.
    """
    click.echo(write_page(started_runs(readable_runs(runs, out)), output))
