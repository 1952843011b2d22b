"""Labels of compared runs: their current directory names, unique in tables and charts."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import tempfile
from pathlib import Path

from click.testing import CliRunner
from comparison_samples import compare_paths
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.cli.commands.compare import compare
from crosstrain.cli.group import invoke
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.pages.export import curves, table_of
from crosstrain.report.pages.page import render
from crosstrain.report.pages.pictures import pictures
from crosstrain.report.runs.run import Run, labels, started_runs

PARTS = st.lists(st.sampled_from(["a", "b", "runs", "seed=1"]), min_size=1, max_size=4)


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_labels_are_unique_and_end_with_the_directory(parts):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, *part) for part in parts]
        run_labels = labels(paths)
    assert len(set(run_labels)) == len(paths)
    for path, label in zip(paths, run_labels, strict=True):
        place = re.sub(r" #\d+$", "", label)
        assert path.resolve().parts[-len(place.split("/")) :] == tuple(place.split("/"))
        if sum(other_path.name == path.name for other_path in paths) == 1:
            assert label == path.name


def test_repeated_directory_is_numbered(tmp_path):
    assert labels([tmp_path / "a", tmp_path / "b", tmp_path / "a"]) == ["a", "b", "a #2"]


def renamed_and_copied(folder):
    """Make a renamed run, a copy next to it, and a run of the same name in another folder."""
    made = make_run(folder / "runs", "old", calibrated=True)
    paths = [folder / "runs" / "new", folder / "runs" / "copy", folder / "backup" / "new"]
    made.rename(paths[0])
    for path in paths[1:]:
        shutil.copytree(paths[0], path)
    return paths


EXPECTED = ["runs/new", "copy", "backup/new"]


def test_all_outputs_label_renamed_and_copied_runs_equally(tmp_path):
    paths = renamed_and_copied(tmp_path)
    compared = compare_paths(paths, fold=False)
    assert [entry.label for entry in compared.entries] == EXPECTED
    assert [run["run"] for run in compared.to_json()["runs"]] == EXPECTED
    assert [row["runs"] for row in compared.to_json()["rows"]] == [[label] for label in EXPECTED]
    assert list(curves([*map(Run, paths)], "loss", "steps").raw) == EXPECTED
    assert list(dict.fromkeys(row[0] for row in table_of("evals", [*map(Run, paths)]).rows)) == EXPECTED
    shown = started_runs(map(Run, paths))
    assert [run.label for run in shown] == EXPECTED
    assert {curve.name for curve in pictures(shown)[0].panels[0].curves} == {EXPECTED[0]}  # copies are represented by the first


def test_page_tables_and_charts_use_the_same_labels(tmp_path):
    """Also where a run without figures shares a name, and so is only in the charts."""
    paths = renamed_and_copied(tmp_path)[:2]
    failed = make_run(tmp_path / "other", "new", summary=False, state="failed")
    page = render(started_runs(map(Run, [*paths, failed])))
    tables = page[page.index('id="comparison"') : page.index('id="each"')]
    assert re.findall(r'<th scope="row"><a href="#run-.">([^<]+)</a></th>', tables) == ["runs/new", "copy", "other/new"]
    assert re.findall(r'<th scope="row">([^<]+)</th>', tables)[0] == "runs/new"
    assert "old" not in re.sub(r"<[^>]+>", " ", tables).split()


def test_commands_print_the_current_name(tmp_path, capsys):
    paths = renamed_and_copied(tmp_path)
    printed = CliRunner().invoke(compare, [*map(str, paths), "--csv", "--no-fold"], catch_exceptions=False).output
    assert [line["run"] for line in csv.DictReader(printed.splitlines())] == EXPECTED
    assert diagnose(Run(paths[0])).to_json()["run"] == "new"
    assert invoke(["runs", "show", str(paths[1]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["summary"]["run"]) == ("copy", "copy")


def test_directory_named_like_a_number_stays_distinct(tmp_path):
    once, twice = tmp_path / "x #2", tmp_path / "x"
    for path in (once, twice):
        path.mkdir()
    for order in itertools.permutations([once, twice, twice]):
        assert len(set(labels(order))) == 3


def test_names_that_look_equal_are_numbered(tmp_path):
    """An escaped line break and a backslash followed by its code look the same."""
    paths = [tmp_path / "a\nb", tmp_path / "a\\x0ab", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    run_labels = labels(paths)
    assert len(set(run_labels)) == 3
    assert run_labels[2] == "c"
