"""``trainer report``: one page about runs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from ...core.console import note
from ...core.errors import UsageError
from ...report.pages.page import write_page
from ...report.runs.locate import find_places
from ...report.runs.run import started_runs
from ..interrupts import INTERRUPTED, RememberedInterrupts
from ..options import out_option
from ..run_request import readable_runs
from ..streams import output_is_a_copy

NICENESS = 10  # of `--live`, which then gets a tenth of a core that runs keep busy


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
@out_option("Folder for run directories.")
@click.pass_context
def report(ctx: click.Context, /, runs: tuple[str, ...], output: Path, live: bool, out: Path) -> int:
    """Write one HTML page about runs that opens offline.

    It has tables, curves, resources, and where the time went. RUN is a run directory, or the name of one below --out; a folder of runs
    includes all of them. Failed and unfinished runs are marked as such. Prints the path of the page.

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
    from ...report.pages.live_server import serve

    places = find_places(runs, out)
    os.nice(NICENESS)
    try:
        with RememberedInterrupts() as interrupts:
            serve(places, _announce, note, interrupts.check)
    except KeyboardInterrupt:
        note("the page is no longer served; what a browser still shows of it stays as it is")
        gc.freeze()  # the collection at the end would take 0.3 s of CPU
        return INTERRUPTED


def _announce(address: str) -> None:
    click.echo(address)
    sys.stdout.flush()
    note("the page at this address is refreshed as records come; Ctrl-C ends it")
