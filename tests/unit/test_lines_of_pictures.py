"""Lines in charts of several runs: configurations, folded repeats, distinguished by axes."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
from comparison_samples import made, starved_node
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.report.pages.figure import COLOURS, NEUTRAL, REPEATS, Dots, Panel, make_lines
from crosstrain.report.pages.pictures import pictures
from crosstrain.report.runs.run import Run, labelled, started_runs
from crosstrain.report.runs.series import on_a_grid, one_by_one

AXES = {
    "backend": ("torch", "tf"),
    "mode": ("sync", "async"),
    "nodes": (1, 2, 3, 4, 6, 8, 12),
    "batch_size": (5, 10, 20, 30, 40, 60, 80, 100),
    "lr": (0.01, 0.02, 0.05, 0.1),
}


def grid(**axes):
    """Make a run for each combination of values."""
    names = list(axes)
    return labelled(
        [
            made(f"run-{number}", summary={"examples_per_second": 100.0 + number}, **dict(zip(names, values, strict=True)))
            for number, values in enumerate(itertools.product(*axes.values()))
        ]
    )


@pytest.mark.thorough
@given(sizes=st.fixed_dictionaries({name: st.integers(1, len(values)) for name, values in AXES.items()}))
def test_lines_of_a_panel_are_distinct(sizes):
    """Colours and dashes distinguish the lines of each small multiple, for any axes."""
    while np.prod(list(sizes.values())) > 60:
        largest = max(sizes, key=lambda name: sizes[name])
        sizes = {**sizes, largest: sizes[largest] - 1}
    runs = grid(**{name: values[: sizes[name]] for name, values in AXES.items()})
    lines = make_lines(runs)
    assert sorted(run.name for line in lines.all for run in line.runs) == sorted(run.name for run in runs)
    assert [line.number for line in lines.all] == list(range(len(lines.all)))
    for part in lines.parts:
        looks = [line.stroke for line in lines.all if line.part == part]
        assert len(set(looks)) == len(looks)
    if len(lines.all) > 1:
        assert all(line.label for line in lines.all)


def test_colour_shows_one_axis_and_dash_the_other():
    lines = make_lines(grid(mode=("sync", "async"), batch_size=(10, 20, 40)))
    assert (lines.coloured, lines.dashed) == ("mode", "global_batch_size")
    for line in lines.all:
        assert line.configuration is not None
        assert line.stroke.colour == (0 if line.configuration.values["mode"] == "async" else 1)
    assert len({line.stroke.dash for line in lines.all}) == 3
    assert lines.parts == ("",)


def test_third_axis_makes_small_multiples():
    lines = make_lines(grid(backend=("torch", "tf"), mode=("sync", "async"), lr=(0.1, 0.2)))
    assert lines.parts == ("learning rate 0.1", "learning rate 0.2")


def test_more_names_than_colours_make_small_multiples():
    """Only their names distinguish them."""
    runs = labelled([made(f"run-{number}", data=f"images:{'x' * (number + 1)}") for number in range(len(COLOURS) + 1)])
    lines = make_lines(runs)
    assert len(lines.all) == 7
    assert len({(line.part, line.stroke) for line in lines.all}) == 7


def test_contended_run_is_drawn_over_updates_only():
    runs = [made(f"t-{seed}", seed=seed) for seed in range(2)] + [made("f", backend="tf")]
    runs.append(made("busy", seed=3, backend="tf", summary={"per_node": [starved_node(0.5)]}))
    lines = make_lines(labelled(runs))
    assert [(len(line.runs), len(line.timed)) for line in lines.all] == [(2, 1), (2, 2)]
    assert lines.contention_note == "Not drawn over time, because of CPU contention from other programs: busy."
    alone = make_lines(labelled(runs[-1:]))  # there is nothing else to show
    assert [line.label for line in alone.all] == ["busy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two backends with two repeats each at three batch sizes, and a failed run."""
    out = tmp_path_factory.mktemp("runs")
    for backend, batch, seed in itertools.product(("tf", "torch"), (5, 10, 20), (0, 1)):
        path = make_run(out, f"{backend}-{batch}-{seed}", backend=backend, batch_size=batch, seed=seed, steps=40, until="accuracy>=0.6")
        summary = json.loads((path / "summary.json").read_text())
        speed = batch * (200.0 if backend == "torch" else 100.0) + seed
        reached = (backend, batch, seed) != ("tf", 5, 1)
        times = {"target_reached": reached, "time_to_target_seconds": 1000.0 / speed if reached else None}
        (path / "summary.json").write_text(json.dumps({**summary, "examples_per_second": speed, **times}))
    return out


@pytest.fixture(scope="module")
def drawn(folder):
    charts = pictures(started_runs(Run(path) for path in sorted(folder.iterdir())))
    return {picture.name: picture for picture in charts}


def test_first_chart_ranks_the_configurations(drawn):
    dots, learnt = drawn["decision"].panels
    assert isinstance(dots, Dots)
    assert dots.title == "Time to accuracy>=0.6"
    assert dots.rows[0] == "torch, global batch 40 (n=2)"
    assert dots.rows[-1] == "tf, global batch 10 (n=2)"
    assert dots.missing[-1] == "1 of 2 reached accuracy>=0.6"
    assert (dots.values[-1], dots.means[-1], dots.intervals[-1]) == ((), None, None)
    means = [mean for mean in dots.means if mean is not None]
    assert means == sorted(means)
    assert all(len(values) == 2 for values in dots.values[:-1])
    assert isinstance(learnt, Panel)
    assert learnt.level == (0.6, "goal 0.6")
    assert {curve.name for curve in learnt.curves} == set(dots.rows)
    assert drawn["decision"].place == "first"


def test_repeats_are_one_line(drawn):
    over_steps, over_seconds = drawn["loss"].panels
    assert len(over_steps.curves) == len(over_seconds.curves) == 6
    assert REPEATS in drawn["loss"].note
    assert over_steps.counts
    assert not over_seconds.counts


def test_numeric_setting_is_the_x_axis(drawn):
    panels = {panel.title: panel for panel in drawn["over-global_batch_size"].panels}
    assert list(panels) == ["Examples per second", "Time to the target", "Test accuracy at the end", "CPU", "Sent", "Memory"]
    speed = {curve.name: curve for curve in panels["Examples per second"].curves}
    assert speed["torch"].x.tolist() == [10.0, 20.0, 40.0]
    assert speed["torch"].y.tolist() == [1000.5, 2000.5, 4000.5]
    assert panels["Examples per second"].ticks == (10.0, 20.0, 40.0)
    times = {curve.name: curve for curve in panels["Time to the target"].curves}
    assert np.isnan(times["tf"].y[0])  # one of its repeats missed it
    band = panels["Examples per second"].bands[0]
    assert (band.high - band.low).tolist() == [1.0, 1.0, 1.0]


def test_speedup_and_efficiency_show_the_ideal(tmp_path):
    for nodes, speed in ((1, 100.0), (2, 150.0)):
        path = make_run(tmp_path, f"n{nodes}", nodes=nodes, steps=40)
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "examples_per_second": speed, "nodes": nodes}))
    (over,) = (chart for chart in pictures(started_runs(Run(path) for path in sorted(tmp_path.iterdir()))) if chart.name == "over-nodes")
    panels = {panel.title: panel for panel in over.panels}
    measured, ideal = panels["Speed-up"].curves
    assert measured.y.tolist() == [1.0, 1.5]
    assert (ideal.y.tolist(), ideal.stroke) == ([1.0, 2.0], NEUTRAL)
    assert panels["Efficiency"].curves[0].y.tolist() == [100.0, 75.0]


def test_many_configurations_hide_charts_behind_a_click(drawn):
    places = {name: picture.place for name, picture in drawn.items()}
    assert places["loss"] == "plots"
    assert {places["accuracy"], places["test-loss"], places["time-shares"]} == {"more"}
    assert {place for name, place in places.items() if name.startswith("resources-")} == {"run"}


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.lists(finite, min_size=1, max_size=6), min_size=2, max_size=5))
def test_mean_of_repeats_lies_within_their_band(curves):
    """Both ways of merging curves of different lengths; longer curves continue alone."""
    pairs = [(np.arange(1.0, len(curve) + 1), np.array(curve)) for curve in curves]
    shortest, longest = min(map(len, curves)), max(map(len, curves))
    grid, single = on_a_grid(pairs, 50), one_by_one(pairs)
    assert (grid is None) == (shortest == 1)
    for merged in (band for band in (grid, single) if band is not None):
        assert (merged.low <= merged.mean + 1e-6).all()
        assert (merged.mean <= merged.high + 1e-6).all()
        assert (np.diff(merged.x) > 0).all()
        assert merged.x[-1] == shortest
        assert len(merged.beyond) == sum(len(curve) > shortest for curve in curves)
        assert max((x[-1] for x, _ in merged.beyond), default=shortest) == longest
        for (x, y), curve in zip(merged.beyond, [curve for curve in curves if len(curve) > shortest], strict=True):
            assert x[0] == shortest
            assert y[1:].tolist() == curve[shortest:]


def test_longer_repeat_adds_no_mean():
    """The mean of two rising curves does not fall where the better one has ended."""
    short, long = (np.array([0.0, 1.0]), np.array([0.65, 0.96])), (np.array([0.0, 1.0, 2.0]), np.array([0.65, 0.80, 0.84]))
    merged = one_by_one([short, long])
    assert merged.mean == pytest.approx([0.65, 0.88])
    ((x, y),) = merged.beyond
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [0.80, 0.84])


def test_incomparable_runs_are_not_ranked(tmp_path):
    """Runs with another target are another race."""
    for name, job, seconds in (
        ("a", {"backend": "torch", "until": "accuracy>=0.9"}, 8.0),
        ("b", {"backend": "torch", "until": "accuracy>=0.9", "batch_size": 64}, 9.0),
        ("c", {"backend": "tf", "until": "accuracy>=0.5"}, 2.0),
    ):
        path = make_run(tmp_path, name, steps=40, **job)
        summary = json.loads((path / "summary.json").read_text())
        times = {"target_reached": True, "time_to_target_seconds": seconds}
        (path / "summary.json").write_text(json.dumps({**summary, **times}))
    first = pictures(started_runs(Run(path) for path in sorted(tmp_path.iterdir())))[0]
    dots = first.panels[0]
    assert dots.title == "Time to accuracy>=0.9"
    assert list(dots.values) == [(8.0,), (9.0,), ()]
    assert dots.missing[-1] == "not comparable with those above"


def test_chart_names_are_unique(folder, tmp_path):
    """Also where a metric has the name of another chart."""
    shutil.copytree(folder / "tf-5-0", tmp_path / "run")
    path = tmp_path / "run" / "evals.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "metrics": {"speed": 0.5, "loss2": 1.0, **line["metrics"]}}) + "\n" for line in lines))
    job = json.loads((tmp_path / "run" / "job.json").read_text())
    metrics = [{"name": name, "label": name, "better": "higher"} for name in ("accuracy", "speed")]
    (tmp_path / "run" / "job.json").write_text(json.dumps({**job, "metrics": metrics}))
    names = [picture.name for picture in pictures(started_runs([Run(tmp_path / "run")]))]
    assert len(set(names)) == len(names)
    assert "metric-speed" in names
