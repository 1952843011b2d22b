"""``trainer report``: runs side by side as one page."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from ...core.errors import UsageError
from ...core.untrusted.console import note
from ...report.catalog.locate import find_places
from ...report.catalog.run import started_runs
from ...report.page.page import write_page
from ..interrupts import INTERRUPTED, RememberedInterrupts
from ..options import GivenPath
from ..run_arguments import readable_runs
from ..streams import output_is_a_copy

__all__ = ["report"]

NICENESS = 10
"""Added to that of `--live`, so that runs at work on the same machine come first: about a tenth of a core where they want all of it."""


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The HTML file; replaces only an earlier report.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Serve a live page on this machine until Ctrl-C, instead of writing a file. The address is printed.",
)
@click.option(
    "--out",
    type=GivenPath(),
    default=Path("runs"),
    envvar="TRAINER_OUT",
    show_default=True,
    help="Folder for run directories.",
)
@click.pass_context
def report(ctx: click.Context, /, runs: tuple[str, ...], output: Path, live: bool, out: Path) -> int:
    """Write one HTML page about runs that opens offline: tables, curves, resources, where the time went.

    RUN is a run directory, or the name of one below --out; a folder of runs includes all of them. Failed and unfinished runs are marked as
    such. Prints the path of the page.

    With --live a browser on this machine shows the same page during the runs, including runs that appear later in a folder. Only someone
    with the address can read it. Ctrl-C ends it with exit code 130.
    """
    if not live:
        output_is_a_copy()
        click.echo(write_page(started_runs(readable_runs(runs, out)), output))
        return 0
    if ctx.get_parameter_source("output") is not ParameterSource.DEFAULT:
        raise UsageError("--output: --live writes no file; leave one of the two out.")
    return _serve(runs, out)


def _serve(runs: Sequence[str], out: Path) -> int:
    from ...report.live_page.serving import serve

    places = find_places(runs, out)
    os.nice(NICENESS)
    try:
        with RememberedInterrupts() as interrupts:
            serve(places, _announce, note, interrupts.check)
    except KeyboardInterrupt:
        note("the page is no longer served; what a browser still shows of it stays as it is")
        gc.freeze()  # an interpreter that ends goes through all that is in memory: 0.3 s of CPU, of which there may be little
        return INTERRUPTED


def _announce(address: str) -> None:
    click.echo(address)
    sys.stdout.flush()
    note("the page at this address is refreshed as records come; Ctrl-C ends it")
