"""``trainer plot``: the report's plots as files."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ...report.pages.matplotlib_renderer import FORMATS, MIN_WIDTH_INCHES, Format, Look, write_figures
from ...report.pages.pictures import pictures
from ...report.runs.run import started_runs
from ..options import NumberRange, check_choice, out_option
from ..run_request import readable_runs
from ..streams import output_is_a_copy

INCHES = {"cm": 1 / 2.54, "mm": 1 / 25.4, "in": 1.0}
WIDEST_INCHES = 200 / 2.54


def _inches(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,4})?)(cm|mm|in)", value)
    inches = 0.0 if match is None else float(match[1]) * INCHES[match[2]]
    if not MIN_WIDTH_INCHES <= inches <= WIDEST_INCHES:
        raise click.BadParameter(f"{value!r} is no width; allowed: 5.08cm to 200cm, in cm, mm or in, such as 8.5cm.")
    return inches


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("figures"),
    show_default=True,
    help="Folder for the plots; replaces only earlier plots of this command.",
)
@click.option("--format", "image", type=click.Choice(FORMATS), default="png", show_default=True, help="File format.")
@click.option("--pick", "picked", multiple=True, metavar="FIGURE", help="Only this plot, by its file name; repeatable.")
@click.option(
    "--width", callback=_inches, metavar="LENGTH", default="9in", show_default=True, help="Width of the figures, as 8.5cm, 85mm or 3.3in."
)
@click.option("--font-size", type=NumberRange(4, 30), default=9.0, show_default=True, metavar="POINTS", help="Font size.")
@out_option("Folder for run directories.")
def plot(runs: tuple[str, ...], output: Path, image: Format, picked: tuple[str, ...], width: float, font_size: float, out: Path) -> None:
    """Write plots of runs for papers and slides.

    They show loss, metrics, speed, resources, and where the time went. RUN is a run directory, or the name of one below --out; a folder of
    runs includes all of them. Prints one path per line.
    """
    output_is_a_copy()
    drawn = pictures(started_runs(readable_runs(runs, out)))
    if picked:
        names = [picture.name for picture in drawn]
        for name in picked:
            check_choice("--pick", name, names)
        drawn = [picture for picture in drawn if picture.name in picked]
    for path in write_figures(drawn, output, image, Look(width, font_size)):
        click.echo(path)
