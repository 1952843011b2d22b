"""Finding a run by path, name or folder, with suggestions where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.report.runs.locate import find_readable_runs, find_run, find_runs, run_names

RUNS = ("logreg-a1b2", "logreg-c3d4", "sweep/batch_size=5,seed=0", "sweep/batch_size=10,seed=0", "sweep/twice", "other/twice")


@pytest.fixture
def out(tmp_path):
    for name in RUNS:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").write_text("{}")
    for name in ("empty", ".hidden", "sweep/exports", "logreg-a1b2/inner", "a/b/too-deep"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in (".hidden", "logreg-a1b2/inner", "a/b/too-deep"):
        (tmp_path / "runs" / name / "status.json").write_text("{}")
    (tmp_path / "runs" / "file").write_text("")
    return tmp_path / "runs"


def test_runs_are_found_one_level_deep(out):
    assert sorted(run_names(out)) == sorted(RUNS)
    assert list(run_names(out / "nothing")) == []
    assert list(run_names(out / "file")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logreg-a1b2", "logreg-a1b2"),
        ("runs/logreg-a1b2", "logreg-a1b2"),
        ("./runs/logreg-a1b2/", "logreg-a1b2"),
        ("sweep/twice", "sweep/twice"),
        ("batch_size=5,seed=0", "sweep/batch_size=5,seed=0"),
        ("runs/a/b/too-deep", "a/b/too-deep"),
    ],
)
def test_path_and_name_find_the_same_run(out, monkeypatch, text, expected):
    monkeypatch.chdir(out.parent)
    assert find_run(text, Path("runs")).resolve() == (out / expected).resolve()


def test_path_has_priority_over_a_name(out, monkeypatch):
    monkeypatch.chdir(out / "sweep")
    assert find_run("twice", out) == Path("twice")
    assert find_run(".", out / "sweep" / "twice") == out / "sweep" / "twice"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("logreg-a1b3", r"got 'logreg-a1b3'; allowed: .* Did you mean 'logreg-a1b2'"),
        ("runs/logreg-c3d5", r"Did you mean 'logreg-c3d4'"),
        ("c3d4", r"Did you mean 'logreg-c3d4'\?"),
        ("bach_size=5,seed=0", r"Did you mean 'sweep/batch_size=5,seed=0'"),
        ("twice", r"'twice' is the name of 2 runs; say which: .*other/twice, .*sweep/twice"),
        ("sweep", r"'.*sweep' is a folder of runs; give one of them, such as '.*sweep/batch_size=10,seed=0'"),
        ("empty", r"got 'empty'"),
        ("zzzzzz", r"allowed: .* in '.*runs'; trainer runs lists those in '.*runs'\."),
        ("", r"'' is not a run directory"),
        ("x" * 300, r"got 'x{300}'"),
    ],
)
def test_unknown_run_suggests_near_names(out, text, message):
    with pytest.raises(UsageError, match=message):
        find_run(text, out)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no folder '.*nowhere' \(--out, TRAINER_OUT\)"):
        find_run("x", tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"there are no runs in"):
        find_run("x", tmp_path)


def test_folder_gives_its_runs_without_duplicates(out):
    paths = find_runs(["logreg-c3d4", "sweep", "sweep/twice", str(out / "logreg-c3d4")], out)
    assert [path.relative_to(out).as_posix() for path in paths] == [
        "logreg-c3d4",
        "sweep/batch_size=10,seed=0",
        "sweep/batch_size=5,seed=0",
        "sweep/twice",
    ]
    with pytest.raises(UsageError, match="Did you mean"):
        find_runs(["sweep", "logreg"], out)


@pytest.mark.parametrize("find", [find_runs, lambda texts, out: find_readable_runs(texts, out)[0]])
def test_repeated_names_count_once_and_are_reported(out, capsys, find):
    (out / "link").symlink_to("logreg-a1b2")
    detour = str(out / "sweep" / ".." / "logreg-a1b2")
    paths = find(["logreg-a1b2", "logreg-a1b2", detour, "link", "logreg-c3d4", "sweep", "sweep"], out)
    assert len(paths) == 5
    assert capsys.readouterr().err.splitlines() == [
        "'logreg-a1b2' is named again; it counts once",
        f"{detour!r} is 'logreg-a1b2' by another path; it counts once",
        "'link' is 'logreg-a1b2' by another path; it counts once",
        "'sweep' is named again; it counts once",
    ]


def test_runs_of_a_sweep_are_in_the_order_of_its_points(out):
    points = [{"name": "batch_size=5,seed=0"}, {"name": "never ran"}, {"name": "batch_size=10,seed=0"}]
    (out / "sweep" / "sweep.json").write_text(json.dumps({"points": points}))
    names = ["batch_size=5,seed=0", "batch_size=10,seed=0", "twice"]
    assert [path.name for path in find_runs(["sweep"], out)] == names
    (out / "sweep" / "sweep.json").write_text("{")
    assert [path.name for path in find_runs(["sweep"], out)] == sorted(names)
