"""Conclusions of compare, report and sweep agree on the same runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from dataclasses import astuple
from html import escape
from pathlib import Path

import pytest
from click.testing import CliRunner
from comparison_samples import compare_paths, made, starved_node, written
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.cli.commands.compare import compare
from crosstrain.cli.commands.sweep import points_text
from crosstrain.core.errors import UsageError
from crosstrain.core.setting import GROUPS
from crosstrain.core.settings.sweeps import Grid, plan
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.configurations import FIGURES
from crosstrain.report.analysis.sentences import QUESTION, as_text, closing_text, render_conclusion
from crosstrain.report.compare.cells import cell
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import difference_lines
from crosstrain.report.pages.page import render
from crosstrain.report.runs.columns import column
from crosstrain.report.runs.run import Run, started_runs

EQUAL_JOBS = [
    made("a"),
    made("b", summary={"examples_per_second": 1210.0}),
    made("c", backend="tf", summary={"examples_per_second": 1150.0}),
]
"""Two runs of one job and seed, the fastest and the slowest; their mean is below the run of the other job."""


def configuration_sizes(runs):
    """Return the number of runs of each configuration, by its label."""
    return {configuration.label: len(configuration.runs) for configuration in conclude(runs).configurations.all}


def test_runs_of_one_seed_are_repeats():
    assert configuration_sizes(EQUAL_JOBS) == {"torch": 2, "tf": 1}
    (best,) = conclude(EQUAL_JOBS).best
    assert best.configuration.label == "tf"
    assert best.over_worst.ratio == pytest.approx(1150 / math.sqrt(1000 * 1210))
    (sentence,) = render_conclusion(conclude(EQUAL_JOBS)).best
    assert "; significance unknown (not every configuration has repeats); runs of one job differ by up to 5%" in sentence


def copied(folder, runs, copies):
    """Write runs, and copies of the first one; return all paths, the copies first."""
    paths = [Path(path) for path in written(folder, *runs)]
    for name in copies:
        shutil.copytree(paths[0], folder / name)
    return [*(folder / name for name in copies), *paths]


def test_copies_of_a_run_count_once(tmp_path):
    """Any number of copies is neither ranked nor weighted, and is reported."""
    paths = copied(tmp_path, EQUAL_JOBS, ["x", "y"])
    alone = compare_paths(paths[:3])
    assert not conclude(alone.runs).is_conclusive
    assert alone.copies == (("x", "y", "a"),)
    assert difference_lines(alone)[0] == "Copies of one run, which count once: x, y, a."
    assert alone.to_json()["copies"] == [["x", "y", "a"]]
    assert compare_paths(paths[3:]).copies == ()
    conclusion = conclude(compare_paths(paths).runs)
    assert {configuration.label: len(configuration.runs) for configuration in conclusion.configurations.all} == {"torch": 2, "tf": 1}
    assert conclusion.best[0].over_worst.ratio == pytest.approx(1150 / math.sqrt(1000 * 1210))


def test_page_and_sweep_count_copies_once(tmp_path):
    points = plan(Grid({"backend": ["torch", "tf"]}), {}, {}, None)
    runs = [made(point.name, folder=tmp_path, **point.job.model_dump(exclude={"out", "name"})) for point in points]
    paths = copied(tmp_path, runs, ["x", "y"])
    points_with_paths = [(path, point.settings) for path, point in zip(paths, (points[0], points[0], *points), strict=True)]
    table = points_text(points_with_paths, repeats=False, width=None)
    assert "Copies of one run, which count once: x, y, backend=torch." in table
    assert table.count("has the highest throughput") == 1
    original = make_run(tmp_path, "one")
    shutil.copytree(original, tmp_path / "copy")
    page = render(started_runs(map(Run, [original, tmp_path / "copy"])))
    assert "Copies of one run, which count once: one, copy." in page
    assert QUESTION not in page


def speeds_by_backend(runs):
    """Return the examples/s that a conclusion is based on."""
    return {
        configuration.values.get("backend"): sorted(configuration.figures(FIGURES[1]))
        for configuration in conclude(runs).configurations.all
    }


@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.integers(500, 2000), min_size=1, max_size=6),
    seeds=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_verdict_is_independent_of_order_and_copies(speeds, seeds, order):
    runs = [
        made(
            f"r{index}",
            seed=seed,
            backend=("tf", "torch")[index % 2],
            summary={"examples_per_second": float(speed), "run_seconds": 9.0 + index},
        )
        for index, (speed, seed) in enumerate(zip(speeds, seeds, strict=False))
    ]
    more = [
        *runs,
        *(
            Run.of_documents(run.summary, run.job, run.nodes, path=Path("copies") / run.name, label=f"copy of {run.name}")
            for run in runs[::2]
        ),
    ]
    order.shuffle(more)
    assert speeds_by_backend(more) == speeds_by_backend(runs)
    assert len(conclude(more).rankings) == len({run.summary["backend"] for run in runs}) - 1


def speeds_of(**jobs):
    """Make a run for each speed of each backend, with different seeds."""
    return [
        made(f"{backend}-seed={seed}", backend=backend, seed=seed, summary={"examples_per_second": speed})
        for backend, speeds in jobs.items()
        for seed, speed in enumerate(speeds)
    ]


SCATTERED = speeds_of(tf=[1000.0, 1210.0], torch=[1030.0, 990.0])
"""The fastest run is 1.17 times as fast as the fastest of the other job, the means 1.09 times; the variance is larger."""


def test_repeats_are_judged_together():
    conclusion = conclude(SCATTERED)
    assert conclusion.rankings[0].ratio.ratio == pytest.approx(math.sqrt(1000 * 1210) / math.sqrt(1030 * 990))
    assert "not significant; needs about" in render_conclusion(conclusion).best[0]


def test_runs_of_one_job_are_not_ranked():
    runs = speeds_of(tf=[1000.0, 1210.0])
    conclusion = conclude(runs)
    assert conclusion.rankings == ()
    assert conclusion.best == ()  # nothing is best without a comparison
    assert render_conclusion(conclusion).best == ("There is only one configuration, with a throughput of 1,100 examples/s (n = 2).",)
    assert not conclude(runs[:1]).is_conclusive


@pytest.mark.parametrize(
    ("jobs", "ending"),
    [
        ({"tf": [1000.0], "torch": [1180.0]}, "significance unknown (one run each); use --repeats 3"),
        ({"tf": [1000.0, 1010.0], "torch": [1180.0]}, "significance unknown (not every configuration has repeats); use --repeats 3"),
        (
            {"tf": [1000.0], "torch": [1020.0]},
            "significance unknown (one run each); runs of one job differ by up to 5%; use --repeats 3",
        ),
        ({"tf": [1000.0, 1010.0], "torch": [1180.0, 1190.0]}, "significant"),
    ],
)
def test_significance_needs_repeats(jobs, ending):
    (best,) = render_conclusion(conclude(speeds_of(**jobs))).best
    assert best.endswith(f"; {ending}.")


def test_starved_run_affects_neither_rank_nor_mean():
    runs = speeds_of(tf=[1000.0, 1010.0], torch=[1200.0, 1210.0])
    starved = made("torch-seed=2", backend="torch", seed=2, summary={"examples_per_second": 90.0, "per_node": [starved_node(0.9)]})
    comparison = compare_runs([*runs, starved])
    assert [len(entry.runs) for entry in comparison.entries] == [2, 3]
    assert comparison.entries[1].figures["examples_per_second"] == 1205.0
    assert comparison.entries[1].counts["examples_per_second"] == 2
    assert cell(comparison.entries[1], column("examples_per_second")).endswith("(n=2)")
    words = render_conclusion(conclude(comparison.runs))
    assert words.best[0].startswith("torch has the highest throughput, 1,205 examples/s (geometric mean; 95 % CI ")
    assert any("torch-seed=2 needed; its speed and times are not used" in text for text in words.caveats)


def test_all_runs_starved_is_reported():
    runs = [made(name, backend=name, summary={"per_node": [starved_node(0.9)]}) for name in ("tf", "torch")]
    words = render_conclusion(conclude(runs))
    assert words.head.startswith("2 runs: ")
    assert words.best == (
        "Throughput is not compared: CPU contention from other programs leaves no two configurations to compare; repeat tf, torch.",
    )


DIVERGED = [
    ({"non_finite_from_step": 3, "final_train_loss": "NaN"}, "from step 3 on"),
    ({"final_train_loss": "NaN", "eval": {"examples": 360, "loss": "Infinity", "accuracy": 0.1}}, "at the end"),
]


@pytest.mark.parametrize(("lost", "since"), DIVERGED)
def test_run_with_lost_loss_is_marked_and_not_best(lost, since):
    runs = [*speeds_of(tf=[1000.0], torch=[1200.0]), made("nan", nodes=2, summary={"examples_per_second": 9000.0, **lost})]
    comparison = compare_runs(runs)
    (best,) = conclude(runs).best
    assert (best.configuration.runs[0].name, best.worst.runs[0].name) == ("torch-seed=0", "tf-seed=0")
    assert comparison.marks[2] == set(GROUPS)
    assert f"  loss NaN or infinite (nan: {since}): all figures are not comparable; its speed is not that of training." in difference_lines(
        comparison
    )


def test_repeat_with_lost_loss_affects_no_mean():
    runs = [made(f"r{seed}", seed=seed, summary={"non_finite_from_step": seed - 1 if seed > 1 else None}) for seed in range(4)]
    assert [[run.name for run in entry.runs] for entry in compare_runs(runs).entries] == [["r0", "r1"], ["r2", "r3"]]


def test_recovered_loss_affects_nothing():
    came_back = made("b", backend="tf", summary={"final_train_loss": "NaN", "non_finite_losses": 1})
    assert compare_runs([made("a"), came_back]).marks == (frozenset(), frozenset())


def of_torch(text):
    """Return the ratios and their sentences without the names of jobs."""
    return re.findall(r"([\d.]+ ×(?: \([^)]*\))? in throughput)", " ".join(text.split()))


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    field=st.sampled_from(
        [("batch_size", [8, 32]), ("lr", [0.1, 0.2]), ("backend", ["tf", "torch"]), ("threads", [1, 2]), ("precision", ["fp32", "bf16"])]
    ),
    repeats=st.sampled_from([None, 2, 3]),
)
def test_compare_report_and_sweep_agree(data, field, repeats):
    name, values = field
    points = plan(Grid({name: values}, (), repeats), {"backend": "torch"} if name != "backend" else {}, {}, None)
    speeds = data.draw(st.lists(st.integers(500, 2000), min_size=len(points), max_size=len(points)))
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for point, speed in zip(points, speeds, strict=True):
            job = point.job.model_dump(exclude={"out", "name"})
            threads = {"described": {"threads_per_task": [point.job.threads or 1]}}
            runs.append(made(point.name, folder=Path(folder), summary={"examples_per_second": float(speed)}, **threads, **job))
        paths = written(Path(folder), *runs)
        compared, apart = compare_paths(paths), compare_paths(paths, fold=False)
        table = points_text([(Path(folder, point.name), point.settings) for point in points], repeats=repeats is not None, width=None)
    assert render_conclusion(conclude(apart.runs)) == render_conclusion(conclude(compared.runs))
    assert of_torch(table) == of_torch(as_text(render_conclusion(conclude(compared.runs)), 200))


def test_sweep_marks_axes_like_compare(tmp_path):
    points = plan(Grid({"precision": ["fp32", "bf16"]}), {"backend": "torch"}, {}, None)
    runs = [made(point.name, folder=tmp_path, **point.job.model_dump(exclude={"out", "name"})) for point in points]
    paths = written(tmp_path, *runs)
    text = points_text([(tmp_path / point.name, point.settings) for point in points], repeats=False, width=None)
    compared = CliRunner().invoke(compare, paths, catch_exceptions=False).output
    assert ": 1.00 × as fast as precision " in text
    assert as_text(render_conclusion(conclude(compare_paths(paths).runs)), None) in compared
    assert "† not comparable with" in text
    assert text.splitlines()[-1] == "`trainer compare --by precision` takes that for what is compared, and marks nothing for it."


@pytest.mark.parametrize(
    ("option", "text", "allowed"),
    [
        ("--by", ",", "one or several settings, such as nodes or batch_size, with commas between"),
        ("--metric", "", "one or several figures, such as accuracy or memory, with commas between"),
    ],
)
def test_empty_name_in_a_list_is_refused(tmp_path, option, text, allowed):
    result = CliRunner().invoke(compare, [*written(tmp_path, *EQUAL_JOBS), option, text])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == f"{option}: got {text!r}; allowed: {allowed}."


def test_page_has_the_sentences_of_compare(tmp_path):
    """From run directories as the driver writes them."""
    paths = []
    for backend, speeds in (("tf", (1000.0, 1210.0)), ("torch", (1030.0, 990.0))):
        for seed, speed in enumerate(speeds):
            path = make_run(tmp_path, f"{backend}-seed={seed}", backend=backend, seed=seed, steps=40)
            file = path / "summary.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "examples_per_second": speed}))
            paths.append(path)
    page = render(started_runs(map(Run, paths)))
    words = render_conclusion(conclude(compare_paths(paths).runs))
    for sentence in (words.head, *words.best, *words.bottlenecks, *words.caveats, *(part for line in words.axes for part in astuple(line))):
        assert escape(sentence) in page
    printed = " ".join(CliRunner().invoke(compare, list(map(str, paths)), catch_exceptions=False).output.split())
    for sentence in words.sentences[:2]:
        assert sentence in printed
    document = json.loads(CliRunner().invoke(compare, [*map(str, paths), "--json"], catch_exceptions=False).output)
    assert document["conclusion"]["sentences"] == words.sentences


def test_terminal_output_ends_with_the_conclusion(tmp_path):
    """Tables may have scrolled off the screen; a file or a pipe has it once."""
    words = render_conclusion(conclude(EQUAL_JOBS))
    assert closing_text(words, None) == ""
    assert closing_text(words, 500).split() == " ".join(words.best).split()
    assert CliRunner().invoke(compare, written(tmp_path, *EQUAL_JOBS)).output.count(words.best[0][:60]) == 1
