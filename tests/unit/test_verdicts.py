"""Who is fastest is decided once, by job: a comparison, a report and the end of a sweep say the same of the same runs."""

from __future__ import annotations

import json
import re
import tempfile
from html import escape
from pathlib import Path

import pytest
from click.testing import CliRunner
from comparison_samples import made, starved_node, written
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.cli.compare_command import compare
from crosstrain.cli.sweep_table import points_text
from crosstrain.core.sweeps import Grid, plan
from crosstrain.report.comparison import compare_paths, compare_runs
from crosstrain.report.notes import below
from crosstrain.report.page import render
from crosstrain.report.shown import show_runs


def speeds_of(**jobs):
    """A run for each speed of each backend, which differ by their seeds."""
    return [
        made(f"{backend}-seed={seed}", backend=backend, seed=seed, summary={"examples_per_second": speed})
        for backend, speeds in jobs.items()
        for seed, speed in enumerate(speeds)
    ]


SCATTERED = speeds_of(tf=[1000.0, 1210.0], torch=[1030.0, 990.0])
"""The fastest single run is 1.17 times as fast as the fastest of the other job; the means are 1.09x, and the scatter is larger."""


@pytest.mark.parametrize("options", [{}, {"fold": False}, {"by": ["seed"]}, {"by": ["seed"], "fold": False}])
def test_repeats_are_judged_by_their_means_however_the_table_shows_them(options):
    (verdict,) = compare_runs(SCATTERED, **options).verdicts
    assert verdict == ("Fastest by examples/s: tf ×2 (1,105/s, 1.09x torch ×2); the difference is within the scatter of the repeats.")


def test_a_table_of_single_runs_says_that_its_verdict_is_on_jobs():
    said = "Verdicts are on jobs: runs that differ by their seed alone count as one (×N), by their mean."
    assert said in below(compare_runs(SCATTERED, fold=False))
    assert said not in below(compare_runs(SCATTERED))
    assert said not in below(compare_runs(SCATTERED[::2], fold=False))


@pytest.mark.parametrize("options", [{}, {"fold": False}, {"by": ["seed"]}])
def test_runs_of_one_job_are_not_ranked(options):
    runs = speeds_of(tf=[1000.0, 1210.0])
    (verdict,) = compare_runs(runs, **options).verdicts
    assert verdict == "Fastest by examples/s: no verdict: they are 2 runs of one job, which differ by chance (1,105/s ± 148/s)."
    assert compare_runs(runs[:1], **options).verdicts == ()


@pytest.mark.parametrize(
    ("jobs", "caveat"),
    [
        ({"tf": [1000.0], "torch": [1180.0]}, "; one run each: repeats (--repeats) tell whether that is more than scatter"),
        (
            {"tf": [1000.0, 1010.0], "torch": [1180.0]},
            "; torch-seed=0 is one run: repeats (--repeats) tell whether that is more than scatter",
        ),
        ({"tf": [1000.0], "torch": [1020.0]}, "; runs of one job differ by as much as that (5%), which repeats would show"),
        ({"tf": [1000.0, 1010.0], "torch": [1180.0, 1190.0]}, ""),
    ],
)
def test_only_repeats_show_what_a_difference_is_worth(jobs, caveat):
    (verdict,) = compare_runs(speeds_of(**jobs)).verdicts
    assert re.search(r"x [^(;]+\)(.*)\.$", verdict)[1] == caveat


def test_a_starved_run_decides_nothing_and_spoils_no_mean():
    runs = speeds_of(tf=[1000.0, 1010.0], torch=[1200.0, 1210.0])
    starved = made("torch-seed=2", backend="torch", seed=2, summary={"examples_per_second": 90.0, "per_node": [starved_node(0.9)]})
    found = compare_runs([*runs, starved])
    assert [len(entry.runs) for entry in found.entries] == [2, 2, 1]
    assert found.verdicts == ("Fastest by examples/s: torch ×2 (1,205/s, 1.20x tf ×2). Not comparable, and left out: torch-seed=2.",)


CAVEATS = ("within the scatter", "one run each", "is one run", "differ by as much as that", "no verdict")


def judged(sentence):
    """What a verdict says, whatever it calls the jobs: speed and ratio, and the caveats."""
    return re.findall(r"\(([\d,.]+/s), ([\d.]+x)", sentence), [caveat for caveat in CAVEATS if caveat in " ".join(sentence.split())]


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    field=st.sampled_from(
        [("batch_size", [8, 32]), ("lr", [0.1, 0.2]), ("backend", ["tf", "torch"]), ("threads", [1, 2]), ("precision", ["fp32", "bf16"])]
    ),
    repeats=st.sampled_from([None, 2, 3]),
)
def test_compare_report_and_sweep_say_the_same_of_the_same_runs(data, field, repeats):
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
    assert apart.verdicts == compared.verdicts
    sentence = table[table.index("Fastest by") :]
    # A verdict names the jobs otherwise in a sweep, and puts them in the order of their values.
    assert judged(sentence) == judged(compared.verdicts[0])


def test_a_sweep_marks_what_it_swept_as_compare_does_and_says_how_to_have_it_without(tmp_path):
    points = plan(Grid({"precision": ["fp32", "bf16"]}), {"backend": "torch"}, {}, None)
    runs = [made(point.name, folder=tmp_path, **point.job.model_dump(exclude={"out", "name"})) for point in points]
    paths = written(tmp_path, *runs)
    text = points_text([(tmp_path / point.name, point.settings) for point in points], repeats=False, width=None)
    compared = CliRunner().invoke(compare, paths, catch_exceptions=False).output
    no_verdict = "Fastest by examples/s: no verdict: no two of them can be compared."
    assert no_verdict in text
    assert no_verdict in compared
    assert "† not to be compared with" in text
    assert text.splitlines()[-1] == "`trainer compare --by precision` takes that for what is compared, and marks nothing for it."
    assert "no verdict" not in CliRunner().invoke(compare, [*paths, "--by", "precision"], catch_exceptions=False).output


def test_the_page_has_the_verdict_of_compare(tmp_path):
    """From run directories as the driver writes them; the fastest single run is no job's verdict."""
    paths = []
    for backend, speeds in (("tf", (1000.0, 1210.0)), ("torch", (1030.0, 990.0))):
        for seed, speed in enumerate(speeds):
            path = make_run(tmp_path, f"{backend}-seed={seed}", backend=backend, seed=seed, steps=40)
            file = path / "summary.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "examples_per_second": speed}))
            paths.append(path)
    page = render(show_runs(paths))
    for verdict in compare_paths(paths).verdicts:
        assert escape(verdict) in page
    assert "1.09x torch ×2); the difference is within the scatter of the repeats." in page
