"""Charts as files: which ones, their formats, reproducible bytes, and no other file touched."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from explained_runs import explained_run
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from imported_later import ImportedLater
from PIL import Image
from report_runs import make_run

from crosstrain.cli.group import invoke
from crosstrain.report.pages.figure import COLOURS, DASHES, Curve, Panel, Stroke, colour, dash, end_labels, marker, stroke
from crosstrain.report.pages.pictures import pictures
from crosstrain.report.pages.plotly_renderer import plots as drawn_by_plotly
from crosstrain.report.runs.run import Run, started_runs

renderer = ImportedLater("crosstrain.report.pages.matplotlib_renderer")
fonts = ImportedLater("matplotlib.font_manager")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return [make_run(out, "one", calibrated=True, steps=80), make_run(out, "_$x_1$ %", mode="async", bad=(5,), steps=80)]


@pytest.fixture(scope="module")
def drawn(runs):
    """One chart of each kind: dots, curves, bars, a stack."""
    charts = pictures(started_runs(map(Run, runs)))
    assert [picture.name for picture in charts] == [
        "decision",
        "loss",
        "accuracy",
        "test-loss",
        "speed",
        "time-shares",
        "resources-one",
        "resources-_$x_1$ %",
    ]
    return [charts[0], charts[1], charts[5], charts[7]]


@pytest.mark.thorough
@pytest.mark.parametrize(("image", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats_are_valid_and_reproducible(drawn, tmp_path, image, begins):
    first = renderer.write_figures(drawn, tmp_path, image)
    assert [path.name for path in first] == [f"{name}.{image}" for name in ("decision", "loss", "time-shares", "resources-__x_1_")]
    written = [path.read_bytes() for path in first]
    assert all(content.startswith(begins) for content in written)
    again = renderer.write_figures(drawn, tmp_path, image)  # each file is recognised and replaced
    assert [path.read_bytes() for path in again] == written


@pytest.mark.thorough
def test_pdf_fonts_are_truetype(drawn, tmp_path):
    """Many journals refuse Type 3 fonts."""
    for path in renderer.write_figures(drawn, tmp_path, "pdf"):
        kinds = set(re.findall(rb"/Subtype /(Type3|Type0|TrueType|CIDFontType\d)", path.read_bytes()))
        assert b"CIDFontType2" in kinds, path.name
        assert b"Type3" not in kinds, path.name


@pytest.fixture
def private_font(tmp_path):
    """Return a function that installs a font with a square for one private character."""
    pen = TTGlyphPen(None)
    for place, move in (((100, 0), pen.moveTo), ((100, 800), pen.lineTo), ((900, 800), pen.lineTo), ((900, 0), pen.lineTo)):
        move(place)
    pen.closePath()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder([".notdef", "square"])
    font.setupCharacterMap({ord(PRIVATE): "square"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (1000, 0), "square": (1000, 100)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": "Privately Ours", "styleName": "Regular"})
    font.setupOS2(usWeightClass=400)
    font.setupPost()
    font.save(tmp_path / "private.ttf")
    manager = fonts.fontManager
    before = list(manager.ttflist)
    yield lambda: manager.addfont(tmp_path / "private.ttf")
    manager.ttflist[:] = before


PRIVATE = "\U0010fabc"


@pytest.mark.quick_cases("png")
@pytest.mark.parametrize("image", ["png", "pdf"])
@pytest.mark.filterwarnings("error")
def test_character_uses_a_font_that_has_it_or_is_named(tmp_path, capsys, private_font, image):
    first, second = make_run(tmp_path, "one", steps=8), make_run(tmp_path, "two", steps=8, state="failed", summary=False)
    shown = pictures(started_runs(map(Run, [first, second.rename(tmp_path / f"two{PRIVATE}")])))[:1]
    (boxes,) = renderer.write_figures(shown, tmp_path / "boxes", image)
    output = capsys.readouterr().err
    assert output.startswith(f"no installed font has {PRIVATE}: boxes stand for them;")
    assert output.count("\n") == 1
    private_font()
    (drawn,) = renderer.write_figures(shown, tmp_path / "drawn", image)
    assert capsys.readouterr().err == ""
    assert drawn.read_bytes() != boxes.read_bytes()


@pytest.mark.thorough
def test_chinese_names_cause_no_warnings(tmp_path):
    make_run(tmp_path, "中文运行", steps=8)
    command = [sys.executable, "-m", "crosstrain.cli.main", "plot", "中文运行", "--out", str(tmp_path), "-o", str(tmp_path / "figures")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "" or done.stderr.startswith("no installed font has 中文行运: ")
    assert done.stderr.count("\n") <= 1


@pytest.mark.thorough
def test_charts_use_the_colours_of_the_runs(drawn, tmp_path):
    for path in renderer.write_figures(drawn, tmp_path, "png"):
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        assert image.width == 1350
        painted = {"#{:02X}{:02X}{:02X}".format(*pixel) for _, pixel in image.getcolors(1 << 24)}
        assert {COLOURS[0], COLOURS[1]} <= painted, path.name


@pytest.mark.parametrize("name", ["20261122-131600-logreg-torch-sync-3n-162d", "x" * 90])
def test_long_names_leave_room_for_the_bars(tmp_path, name):
    paths = [make_run(tmp_path, name, calibrated=True, steps=8)]  # a single run is labelled by its name
    (shares,) = (picture for picture in pictures(started_runs(map(Run, paths))) if picture.name == "time-shares")
    (file,) = renderer.write_figures([shares], tmp_path, "svg")
    text = file.read_text()
    whole = float(re.search(r'width="([\d.]+)pt"', text)[1])
    grounds = re.findall(r'<g id="axes_\d">\s*<g id="patch_\d+">\s*<path d="([^"]+)"', text)
    assert len(grounds) == len(re.findall(r'<g id="axes_\d+">', text)) > 0
    for ground in grounds:
        edges = [float(number) for number in re.findall(r"[ML] ([\d.]+) ", ground)]
        assert max(edges) - min(edges) > 0.5 * whole


@pytest.mark.parametrize("name", ["{}-131600-logreg-torch-sync-3n-162d", "{}" + "x" * 150])
def test_legend_of_long_names_fits_the_figure(tmp_path, name):
    paths = [make_run(tmp_path, name.format(number), steps=8, state="failed", summary=False) for number in range(4)]
    (file,) = renderer.write_figures([pictures(started_runs(map(Run, paths)))[0]], tmp_path, "png")
    image = Image.open(file).convert("L")
    edges = [image.getpixel((x, y)) for x in (*range(4), *range(image.width - 4, image.width)) for y in range(image.height)]
    assert min(edges) == 255  # nothing is clipped


@pytest.mark.thorough
def test_equal_file_names_are_made_unique(drawn, tmp_path):
    twins = [replace(drawn[0], name=name) for name in ("resources-a b", "resources-a/b", "resources-a_b-2")]
    assert [path.name for path in renderer.write_figures(twins, tmp_path, "svg")] == [
        "resources-a_b.svg",
        "resources-a_b-2.svg",
        "resources-a_b-2-2.svg",
    ]


def test_thirty_runs_look_different():
    assert len({stroke(number) for number in range(len(COLOURS) * len(DASHES))}) == 30
    assert all(colour(number) != colour(number + 1) and dash(number) != dash(number + 1) for number in range(29))


def test_neighbouring_styles_have_different_markers():
    for number, dash_number in product(range(len(COLOURS)), range(len(DASHES))):
        shapes = [
            marker(point_stroke)
            for point_stroke in (Stroke(number, dash_number), Stroke(number + 1, dash_number), Stroke(number, dash_number + 1))
        ]
        assert len(set(shapes)) == 3


def test_runs_with_one_evaluation_have_different_markers(tmp_path):
    paths = [make_run(tmp_path, name, lr=rate) for name, rate in (("one", 0.1), ("other", 0.2))]
    (accuracy,) = (picture for picture in pictures(started_runs(map(Run, paths))) if picture.name == "accuracy")
    assert len({trace["marker"]["symbol"] for plot in drawn_by_plotly(accuracy) for trace in plot["data"] if "marker" in trace}) == 2


def shown_as(name, shown):
    return next((picture for picture in pictures(started_runs(map(Run, shown))) if picture.name == name), None)


@pytest.mark.quick_cases("None")
@pytest.mark.parametrize(
    "axes", [{"backend": ("torch", "tf"), "batch_size": (8, 16, 32, 64, 128)}, {"lr": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)}, None]
)
def test_ten_configurations_are_distinct_without_colour(tmp_path, axes):
    """By dash, marker and a label at each line's end; also ten runs without figures."""
    if axes is None:
        paths = [make_run(tmp_path, f"r{number}", steps=40, state="failed", summary=False) for number in range(10)]
    else:
        settings = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        paths = [make_run(tmp_path, f"r{number}", steps=40, until=None, **config) for number, config in enumerate(settings)]
    loss = shown_as("loss", paths)
    for panel in loss.panels:
        lines = [config for config in panel.curves if config.kind == "line"]
        assert len({marker(config.stroke) for config in lines}) == len(lines)
        for apart in (0.05, 0.09):
            labels = end_labels(panel, apart, 20)
            assert len({label.text for label in labels}) == len(lines) == len({label.curve.name for label in labels})
            places = [label.y_label for label in labels]
            height = max(config.y.max() for config in lines) - min(config.y.min() for config in lines)
            assert all(later - earlier >= apart * height * 0.999 for earlier, later in pairwise(places))
            assert all((label.x, label.y) == (label.curve.x[-1], label.curve.y[-1]) for label in labels)
    assert sum(len(panel.curves) for panel in loss.panels) >= 10
    data = [trace for plot in drawn_by_plotly(loss) for trace in plot["data"]]
    assert all("marker" in trace for trace in data if trace["meta"]["kind"] == "line")
    assert sum(trace["meta"]["kind"] == "label" for trace in data) == sum(trace["meta"]["kind"] == "line" for trace in data)
    (file,) = renderer.write_figures([loss], tmp_path / "figures", "svg")
    written = re.findall(r"<!-- (.*?) -->", file.read_text())
    assert all(written.count(label.text) >= 1 for label in end_labels(loss.panels[0], 0.05, 20))


def test_too_many_lines_have_no_end_labels():
    curves = [Curve(f"line {number}", stroke(number), np.arange(3.0), np.full(3, float(number)), number) for number in range(30)]
    assert len(end_labels(Panel("", "", "", tuple(curves)), 0.03, 20)) == 30
    assert end_labels(Panel("", "", "", tuple(curves)), 0.05, 20) == []
    assert end_labels(Panel("", "", "", tuple(curves[:1])), 0.03, 20) == []


def test_learning_rates_are_drawn_if_they_vary(tmp_path):
    same = [make_run(tmp_path, name, steps=40, lr=rate) for name, rate in (("one", 0.1), ("other", 0.2))]
    assert shown_as("learning-rate", same) is None
    falling = make_run(tmp_path, "falling", steps=40, lr=0.4, rate=lambda step: 0.1 / (step + 1))
    (panel,) = shown_as("learning-rate", [falling]).panels
    (drawn,) = panel.curves
    assert drawn.x.tolist() == list(range(1, 41))
    assert drawn.y == pytest.approx([0.1 / step for step in range(1, 41)])
    higher = [make_run(tmp_path, f"higher-{seed}", steps=40, lr=0.3, seed=seed, rate=lambda _step: 0.2) for seed in (0, 1)]
    (panel,) = shown_as("learning-rate", [same[0], *higher]).panels
    assert {(curve.name, *curve.y.tolist()) for curve in panel.curves} == {
        ("learning rate 0.1 (n=1)", *[0.05] * 40),
        ("learning rate 0.3 (n=2)", *[0.2] * 40),
    }


def test_speeds_are_medians_over_pale_raw_values(tmp_path):
    """One slow update in 25 shows in the pale line only; of repeats in the band."""
    paths = [make_run(tmp_path, f"r{seed}", steps=1200, seed=seed, until=None) for seed in (0, 1)]
    for seed, path in enumerate(paths):
        lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
        clock = 0.0
        for number, line in enumerate(lines):
            line["seconds"] += 0.2 if number % 25 == 6 + 12 * seed else 0.0
            clock += line["seconds"]
            line["time_seconds"] = clock
        (path / "evals.jsonl").write_text("")  # without pauses
        (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    speed = shown_as("speed", paths[:1])
    assert "running median" in speed.note
    for panel in speed.panels:
        raw, line = panel.curves
        assert (raw.kind, line.kind) == ("faint", "line")
        assert np.nanmin(raw.y) < 0.5 * np.nanmedian(raw.y)
        assert np.nanmin(line.y) > 0.5 * np.nanmedian(raw.y)
    (panel, _) = shown_as("speed", [*paths, make_run(tmp_path, "other", steps=1200, lr=0.9, until=None)]).panels
    (band,) = panel.bands
    assert band.low.min() < 0.5 * np.median(band.high)


def test_nodes_that_differ_much_have_no_mean(tmp_path):
    """The second node sends twice, then 9 times as much: then both are drawn, with a note."""
    for factor, uneven in ((2.0, False), (9.0, True)):
        paths = []
        for size in (8, 16, 32):
            paths.append(make_run(tmp_path / str(factor), f"b{size}", steps=40, batch_size=size, until=None))
            summary = json.loads((paths[-1] / "summary.json").read_text())
            for node, sent in enumerate((1e5, factor * 1e5)):
                summary["per_node"][node]["network_sent_bytes_per_train_second"] = sent
            (paths[-1] / "summary.json").write_text(json.dumps(summary))
        over = shown_as("over-global_batch_size", paths)
        sent = next(panel for panel in over.panels if panel.title.startswith("Sent"))
        cpu = next(panel for panel in over.panels if panel.title.startswith("CPU"))
        expected = [[1e5] * 3, [9e5] * 3] if uneven else [[1.5e5] * 3]
        assert np.allclose([drawn.y for drawn in sent.curves], expected)
        assert [(band.low.tolist(), band.high.tolist()) for band in sent.bands] == ([([1e5] * 3, [9e5] * 3)] if uneven else [])
        assert ("Sent: nodes differ by a factor of 4 or more" in over.note) == uneven
        assert ("lowest and highest node" in sent.title, cpu.title) == (uneven, "CPU")


def test_resources_of_all_runs_share_their_scale(tmp_path):
    shown = started_runs(map(Run, [make_run(tmp_path, "small", steps=40), make_run(tmp_path, "large", steps=400)]))
    small, large = (picture for picture in pictures(shown) if picture.stacked)
    tops = [[panel.top for panel in picture.panels if isinstance(panel, Panel)] for picture in (small, large)]
    assert tops[0] == tops[1]
    assert tops[0][0] == pytest.approx(1.05 * 2)


def test_training_time_equals_the_clock_without_idle_time(tmp_path):
    """Async workers with steps of 10 ms: always busy in one run, a fifth of the time in another."""
    clock = {"train_seconds": 1.0, "eval_seconds": 0.0, "checkpoint_seconds": 0.0, "other_seconds": 0.0}
    paths = []
    for name, updates, lr in (("busy", 100, 0.1), ("idle", 20, 0.2)):
        figures = {"updates_by_worker": [updates] * 2}
        paths.append(explained_run(tmp_path, [{"compute": 0.01}] * 2, mode="async", name=name, figures=figures, lr=lr))
        summary = json.loads((paths[-1] / "summary.json").read_text())
        summary["time_shares"]["run"] = clock
        (paths[-1] / "summary.json").write_text(json.dumps(summary))
    for shown, expected in (
        (paths[:1], {"training": [1.0]}),
        (paths, {"training, workers busy": [1.0, 0.2], "training, workers idle": [0, 0.8]}),
    ):
        (shares,) = (picture for picture in pictures(started_runs(map(Run, shown))) if picture.name == "time-shares")
        shares_by_name = {segment.name: list(segment.values) for segment in shares.panels[0].segments}
        assert shares_by_name["coordination"] == pytest.approx([0.0] * len(shown))
        assert {name: values for name, values in shares_by_name.items() if name.startswith("training")} == {
            name: pytest.approx(values) for name, values in expected.items()
        }
        assert [sum(values) for values in zip(*shares_by_name.values(), strict=True)] == pytest.approx([1.0] * len(shown))


def test_samples_after_a_run_do_not_stretch_its_chart(tmp_path):
    path = make_run(tmp_path, "one", steps=40)
    (before,) = (picture for picture in pictures(started_runs([Run(path)])) if picture.stacked)
    lines = (path / "system.jsonl").read_text().splitlines(keepends=True)
    late = json.loads(lines[-1])
    late["time_seconds"] += 1000.0
    late["tasks"] = [{**task, "memory_rss_bytes": 10**15} for task in late["tasks"]]
    (path / "system.jsonl").write_text("".join(lines) + json.dumps(late) + "\n")
    (after,) = (picture for picture in pictures(started_runs([Run(path)])) if picture.stacked)
    assert [panel.top for panel in after.panels] == [panel.top for panel in before.panels]


@pytest.mark.thorough
def test_command_draws_without_display_and_prints_paths(runs, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MPLBACKEND")}
    command = [sys.executable, "-m", "crosstrain.cli.main", "plot", str(runs[0]), "-o", str(tmp_path / "figures")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    names = ["loss", "accuracy", "test-loss", "speed", "time-shares", "resources"]
    assert done.stdout.split() == [str(tmp_path / "figures" / f"{name}.png") for name in names]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in done.stdout.split())


def test_file_that_is_no_figure_is_kept(runs, tmp_path, capsys):
    (tmp_path / "speed.png").write_bytes(b"mine")
    assert invoke(["plot", str(runs[0]), "-o", str(tmp_path)]) == 2
    assert "speed.png' was not written by `trainer plot` and stays as it is" in capsys.readouterr().err
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("speed.png", b"mine")]


def test_invalid_folder_and_format_are_refused(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert invoke(["plot", str(runs[0]), "-o", str(tmp_path / "file" / "figures")]) == 2
    assert "cannot hold figures" in capsys.readouterr().err
    assert invoke(["plot", str(runs[0]), "-o", str(tmp_path), "--format", "gif"]) == 2
    assert "'gif' is not one of 'png', 'svg', 'pdf'" in capsys.readouterr().err


def test_description_of_resources_names_their_unit(tmp_path):
    path = make_run(tmp_path, "one", steps=40)
    summary = json.loads((path / "summary.json").read_text())
    figures = {"memory_rss_bytes": {"max": 3e8}, "memory_pss_bytes": {"max": 2e8}, "network_sent_bytes_per_second": 1e6}
    for node in summary["per_node"]:
        node.update(figures, network_sent_bytes_per_train_second=2e6, network_received_bytes_per_train_second=3e6)
    (path / "summary.json").write_text(json.dumps(summary))
    (picture,) = (picture for picture in pictures(started_runs([Run(path)])) if picture.stacked)
    expected = "RSS at most 300 MB, PSS 200 MB in its largest sample, sent 2.0 MB/s, received 3.0 MB/s over the training time"
    assert [words.partition("cores, ")[2] for words in picture.words.split("; ")] == [expected] * len(summary["per_node"])
