"""The report as a file: content, escaping and replacement; browser tests check its looks."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shlex
import tomllib
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from imported_later import ImportedLater
from report_runs import loss_at, make_run

from crosstrain.cli.commands.report import report
from crosstrain.cli.group import invoke
from crosstrain.core.console import shown
from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.analysis.diagnosis_text import answers
from crosstrain.report.compare.run_tables import SYNTHETIC
from crosstrain.report.pages.page import render
from crosstrain.report.pages.pictures import pictures
from crosstrain.report.runs.run import Run, started_runs

renderer = ImportedLater("crosstrain.report.pages.matplotlib_renderer")

HOSTILE = "<script>alert(1)<!--<img src=x onerror=alert(2)>'\"&amp;{{7*7}}${a}$"


class Page(HTMLParser):
    """The text of a page by tag, and every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append((self._open[-1], data))

    @property
    def text(self):
        return " ".join(" ".join(data for _, data in self.texts).split())


def page_of(*paths):
    return render(started_runs(map(Run, paths)))


def plots_of(text):
    (texts,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    return {plot["id"]: plot for plot in json.loads(texts)}


def unpacked(array):
    return np.frombuffer(base64.b64decode(array["bdata"]), {"f4": "<f4", "f8": "<f8"}[array["dtype"]])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    return [make_run(out, "one", calibrated=True), make_run(out, "two", mode="async", bad=(50, 51, 120))]


@pytest.fixture(scope="module")
def page(two):
    return page_of(*two)


def test_charts_hold_the_records(two, page):
    plots = plots_of(page)
    kinds = [(trace["meta"]["line"], trace["meta"]["kind"], trace["name"]) for trace in plots["plot-loss-0"]["data"]]
    lines = [(0, "line", "async"), (0, "crosses", "async"), (1, "line", "sync")]
    assert kinds[:3] == lines
    assert sorted(kinds[3:]) == [(0, "label", "async"), (1, "label", "sync")]
    raw, smooth = plots_of(page_of(two[0]))["plot-loss-0"]["data"]  # of one run each update too
    assert unpacked(raw["x"]).tolist() == list(range(1, 201))
    assert unpacked(raw["y"]) == pytest.approx([loss_at(step) for step in range(200)], rel=1e-6)
    assert (raw["meta"], smooth["meta"]) == ({"line": 0, "kind": "faint"}, {"line": 0, "kind": "line"})
    accuracy = plots["plot-accuracy-1"]["data"][0]
    evals = list(RunReader(two[1]).evals())
    assert unpacked(accuracy["y"]) == pytest.approx([record.metrics["accuracy"] for record in evals])
    assert unpacked(accuracy["x"]) == pytest.approx([record.time_seconds for record in evals])
    assert {shape["y0"] for shape in plots["plot-accuracy-0"]["layout"]["shapes"]} == {0.95}
    sent = [trace for trace in plots["plot-resources-one-0"]["data"] if trace["yaxis"] == "y3"]
    assert [set(unpacked(trace["y"])[1:].tolist()) for trace in sent] == [{1e6}, {2e6}]


def test_diverged_loss_is_a_gap_and_a_cross(two, page):
    plot = plots_of(page)["plot-loss-0"]
    smooth, crosses = (trace for trace in plot["data"] if trace["meta"]["line"] == 0 and trace["meta"]["kind"] != "label")
    raw = plots_of(page_of(two[1]))["plot-loss-0"]["data"][0]
    assert np.flatnonzero(np.isnan(unpacked(raw["y"]))).tolist() == [50, 51, 120]
    assert np.isnan(unpacked(smooth["y"])[[50, 51, 120]]).all()
    assert unpacked(crosses["x"]).tolist() == [51, 52, 121]
    assert unpacked(crosses["y"]) == pytest.approx([loss_at(49), loss_at(49), loss_at(119)], rel=1e-6)
    assert "3 of them not finite" in Page(page).text


def test_resources_share_an_axis_and_events_are_marked(two, page):
    plot = plots_of(page)["plot-resources-one-0"]
    layout = plot["layout"]
    assert sorted(key for key in layout if key.startswith("yaxis")) == ["yaxis", "yaxis2", "yaxis3", "yaxis4"]
    assert [key for key in layout if key.startswith("xaxis")] == ["xaxis"]
    events = [(event.event, event.time_seconds) for event in RunReader(two[0]).events()]
    evals = [record.time_seconds for record in RunReader(two[0]).evals()]
    assert sorted(shape["x0"] for shape in layout["shapes"]) == pytest.approx(sorted([*(seconds for _, seconds in events), *evals]))
    text = Page(page).text
    assert all(kind in text for kind in ("run start and end", "epoch end", "evaluation"))


def test_clock_time_is_shown_or_marked_as_unknown(page):
    plots = plots_of(page)
    clock, step = plots["plot-time-shares-0"], plots["plot-time-shares-1"]
    assert [unpacked(bar["x"]).tolist() for bar in clock["data"]] == [[2.0, 2.0], [1.0, 1.0], [0.0, 0.25], [0.0, 0.25]]
    shares = [unpacked(bar["x"]) for bar in step["data"]]
    assert [values[2:].tolist() for values in shares] == [[10, 10], [50, 50], [10, 10], [30, 30]]
    assert all(np.isnan(values[:2]).all() for values in shares)
    labels = [note["text"] for note in step["layout"]["annotations"]]
    assert labels.count("not calibrated") == 2
    assert "sync, node 0 (10 ms)" in labels


@pytest.mark.thorough
def test_node_without_updates_is_labelled(tmp_path):
    path = make_run(tmp_path, "idle", calibrated=True, steps=8)
    summary = json.loads((path / "summary.json").read_text())
    summary["time_shares"]["nodes"][1] = {name: 1 if name == "node" else None for name in summary["time_shares"]["nodes"][1]}
    (path / "summary.json").write_text(json.dumps(summary))
    step = plots_of(page_of(path))["plot-time-shares-1"]
    assert [note["text"] for note in step["layout"]["annotations"]] == ["node 0 (10 ms)", "node 1", "made no updates"]
    renderer.write_figures(pictures(started_runs([Run(path)])), tmp_path, "svg")


def test_name_is_escaped_everywhere(tmp_path):
    path = make_run(tmp_path, HOSTILE, steps=40)
    text = page_of(path)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("img") == 0
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert ("h1", f"Run {HOSTILE}") in page.texts
    assert "49" not in "".join(data for tag, data in page.texts if tag == "h1")
    (trace, *_) = plots_of(text)["plot-loss-0"]["data"]
    assert trace["name"] == HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert "A <b>processor</b>" in page.text
    assert not any(tag == "b" for tag, _ in page.tags)


def test_page_loads_nothing(page):
    tags = Page(page).tags
    for tag, attributes in tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
    (policy,) = (attributes["content"] for tag, attributes in tags if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_page_is_accessible_to_screen_readers(page):
    parsed = Page(page)
    tags = parsed.tags
    assert [tag for tag, _ in tags].count("h1") == 1
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in tags}
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
    drawn = [attributes["aria-label"] for _, attributes in tags if attributes.get("role") == "img"]
    assert len(drawn) == len(plots_of(page))
    assert all(re.search(r"\d", label) for label in drawn)
    assert [tag for tag, _ in tags].count("table") == [tag for tag, _ in tags].count("caption")
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")


def test_runs_have_the_command_that_repeats_them(two):
    page = Page(page_of(two[1]))
    written = [data for tag, data in page.texts if tag == "pre"]
    assert written[0] == "trainer run --backend torch --name two"
    assert shlex.split(written[1])[:2] == ["trainer", "run"]
    config = tomllib.loads(written[2])
    job = RunReader(two[1]).job()
    again = Job.model_validate({**config, "out": job["out"], "name": job["name"]})
    assert again == Job.model_validate({name: job[name] for name in Job.model_fields})


def test_failed_run_is_shown_as_failed(tmp_path):
    failed = make_run(tmp_path, "broken", state="failed", summary=False, steps=40)
    page = page_of(make_run(tmp_path, "fine", steps=40), failed)
    text = Page(page).text
    assert "broken: failed (worker-1 was killed by signal 9). What is shown of it is what was recorded until then." in text
    drawn = [trace["name"] for trace in plots_of(page)["plot-loss-0"]["data"] if trace["meta"]["kind"] != "label"]
    assert drawn == ["fine", "broken"]
    assert any(mark.kind == "failure" for mark in pictures(started_runs([Run(failed)]))[-1].marks)
    assert "as it ended without one (state: failed): all figures are from its records" in text
    alone = page_of(failed)
    assert "Questions that people ask of a run" in Page(alone).text
    assert "Side by side" not in alone
    assert "plot-time-shares-0" not in plots_of(alone)


def test_runs_have_the_answers_of_explain(tmp_path):
    path = make_run(tmp_path, "asked", steps=40)
    answered = answers(Run(path), diagnose(Run(path)))
    text = Page(page_of(path)).text
    assert len(answered) >= 3
    for answer in answered:
        assert answer.question in text
        assert shown(answer.text) in text


def test_run_without_updates_is_shown(tmp_path):
    path = make_run(tmp_path, "empty", steps=0, state="failed", summary=False)
    (path / "system.jsonl").unlink()
    assert plots_of(page_of(path)) == {}


def test_synthetic_data_is_marked(tmp_path):
    path = make_run(tmp_path, "random", steps=40, data="synthetic-images:8")
    assert SYNTHETIC not in Page(page_of(path)).text
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "synthetic": True}))
    text = Page(page_of(path)).text
    assert SYNTHETIC in text
    assert "synthetic-images:8 (synthetic)" in text


def test_existing_gpus_have_a_panel(tmp_path):
    layout = plots_of(page_of(make_run(tmp_path, "fast", steps=40, gpus=True)))["plot-resources-0"]["layout"]
    assert "yaxis5" in layout


def test_runs_of_one_name_are_distinguished(tmp_path):
    paths = [make_run(tmp_path / folder, "same", steps=8) for folder in ("a", "b")]
    third = make_run(tmp_path, "other", steps=8)
    assert [run.label for run in started_runs(map(Run, [*paths, third]))] == ["a/same", "b/same", "other"]


def test_long_runs_and_events_are_thinned(tmp_path):
    path = make_run(tmp_path, "long", steps=20_000)
    with (path / "events.jsonl").open("a") as file:
        for epoch in range(200):
            file.write(json.dumps({"schema": 1, "event": "epoch_ended", "time_seconds": epoch * 1.0, "detail": {"epoch": epoch}}) + "\n")
    text = page_of(path)
    plots = plots_of(text)
    assert len(unpacked(plots["plot-loss-0"]["data"][0]["x"])) <= 2002
    assert "each 6th of 202 is marked" in Page(text).text


def test_command_replaces_only_a_report(tmp_path, capsys):
    path = make_run(tmp_path / "runs", "one", steps=8)
    target = tmp_path / "report.html"
    assert invoke(["report", str(path), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    before = target.read_bytes()
    assert invoke(["report", "one", "--out", str(tmp_path / "runs"), "-o", str(target)]) == 0
    assert target.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "runs"]
    capsys.readouterr()
    mine = tmp_path / "notes.html"
    mine.write_text("mine")
    for output, words in {
        mine: "was not written by `trainer report` and stays as it is",
        tmp_path / "no" / "page.html": "there is no folder",
    }.items():
        assert invoke(["report", str(path), "-o", str(output)]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
    assert mine.read_text() == "mine"


def test_invalid_runs_are_refused(tmp_path, capsys):
    make_run(tmp_path, "one", steps=8)
    assert invoke(["report", "onne", "--out", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "Did you mean 'one'?" in capsys.readouterr().err
    (tmp_path / "one" / "job.json").unlink()
    assert invoke(["report", "one", "--out", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "there is no job.json" in capsys.readouterr().err
    assert CliRunner().invoke(report, []).exit_code == 2


def test_damaged_records_are_named(tmp_path, capsys):
    path = make_run(tmp_path, "one", steps=8)
    (path / "system.jsonl").write_text('{"schema":1}\n{"schema":1}\n')
    assert invoke(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    assert re.search(r"system\.jsonl, line 1: not a SystemRecord", capsys.readouterr().err)


def test_code_of_a_run_is_shown_if_recorded(tmp_path):
    with_code, without_code = make_run(tmp_path, "one", steps=8), make_run(tmp_path, "other", steps=8)
    environment = json.loads((with_code / "env.json").read_text())
    tree = {"commit": "abc1234<b>" + 30 * "0", "changed": True}
    code = {"packages": {"crosstrain": "1.0&"}, "crosstrain": tree, "typed_in": None}
    nodes = [{**node, "cpu_flags": ["fpu", "avx2"]} for node in environment["nodes"]]
    (with_code / "env.json").write_text(json.dumps({**environment, "nodes": nodes, "code": code}))
    read = Page(page_of(with_code, without_code))
    assert "Code: crosstrain 1.0& at commit abc1234<b>00 (changed)." in read.text
    assert read.text.count("Code: ") == 1
    assert ("b", {}) not in read.tags
    assert read.text.count(", avx2") == 2
