"""``trainer plot`` for a paper's column: width, font size and selection of figures."""

import re

import pytest
from click.testing import CliRunner
from imported_later import ImportedLater
from report_runs import make_run

from crosstrain.core.errors import UsageError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [str(make_run(folder, name, calibrated=True, backend=backend)) for name, backend in (("one", "tf"), ("two", "torch"))]


def drawn(runs, folder, *options):
    result = CliRunner().invoke(ImportedLater("crosstrain.cli.commands.plot").plot, [*runs, "-o", str(folder), *options])
    return result, sorted(path.name for path in folder.glob("*"))


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "points"), [("8.5cm", 8.5 / 2.54 * 72), ("170mm", 17 / 2.54 * 72), ("3.3in", 3.3 * 72)])
def test_width_is_as_requested(runs, tmp_path, width, points):
    result, files = drawn(runs, tmp_path, "--width", width, "--format", "pdf", "--font-size", "8")
    assert result.exit_code == 0, result.output
    assert "loss.pdf" in files
    for name in files:
        (box,) = set(re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ", (tmp_path / name).read_bytes()))
        assert float(box) == pytest.approx(points, abs=0.01), name


def sizes(file):
    """Return the font sizes of an SVG, in px of 72 to the inch."""
    return set(re.findall(r"font: (?:\w+ )?([\d.]+)px|scale\(([\d.]+) -", file.read_text()))


def test_font_size_is_as_requested(runs, tmp_path):
    for size in ("7", "12"):
        drawn(runs, tmp_path / size, "--pick", "loss", "--format", "svg", "--font-size", size)
    small, large = ((tmp_path / size / "loss.svg") for size in ("7", "12"))
    assert sizes(small) != sizes(large)
    assert {float(scale) for _, scale in sizes(small) if scale} >= {0.07}
    assert {float(scale) for _, scale in sizes(large) if scale} >= {0.12}


def test_only_selected_figures_are_drawn(runs, tmp_path):
    _, files = drawn(runs, tmp_path, "--pick", "loss", "--pick", "speed")
    assert files == ["loss.png", "speed.png"]
    result, _ = drawn(runs, tmp_path / "none", "--pick", "losss")
    assert isinstance(result.exception, UsageError)
    assert "Did you mean 'loss'?" in str(result.exception)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("width", ["8.5", "1cm", "3m", "nan", "1e3cm", "-8cm", "", "99999in", "8,5cm"])
def test_invalid_width_is_refused(runs, tmp_path, width):
    result, files = drawn(runs, tmp_path / "none", "--width", width)
    assert result.exit_code == 2
    assert "is no width" in result.output
    assert files == []
