"""``trainer runs delete``: deletes named runs as a whole, and nothing else."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys

import pytest
from processes import wait_until
from run_samples import a_job, open_run, sync_run

from crosstrain.cli.group import invoke
from crosstrain.core.drafts import lock
from crosstrain.report.runs.query import list_runs

DELETE = [sys.executable, "-m", "crosstrain.cli.main", "runs", "delete"]


@pytest.fixture
def out(tmp_path):
    for name in ("one", "two", "three"):
        (sync_run(tmp_path / "runs", name=name) / "checkpoints" / "step-000000010").mkdir(parents=True)
    return tmp_path / "runs"


def names(out):
    return sorted(row["run"] for row in list_runs(out))


def everything(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith(".index")}


def test_only_named_runs_are_deleted(out, capsys):
    (out / "two" / "notes.txt").write_text("x" * 1000)
    kept = everything(out / "three")
    bytes_of = sum(path.stat().st_size for path in (out / "two").rglob("*") if path.is_file())
    assert invoke(["runs", "delete", "two", str(out / "one"), "two", "--yes", "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert output.out.count("deleted ") == 2
    assert f"two  (succeeded, 8 files, {bytes_of / 1000:.1f} kB)" in output.err
    assert everything(out) == {"three", *(f"three/{name}" for name in kept)}
    assert names(out) == ["three"]


def test_link_out_of_the_run_is_not_followed(out, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    (out / "one" / "link").symlink_to(tmp_path / "precious")
    (out / "one" / "checkpoints" / "link").symlink_to(tmp_path / "precious")
    assert invoke(["runs", "delete", "one", "--yes", "--out", str(out)]) == 0
    assert (tmp_path / "precious" / "file").exists()
    assert not (out / "one").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: (out.parent / "folder").mkdir(), "'../folder' is not a run directory (it has neither job.json nor status.json)"),
        (lambda out: (out.parent / "folder").symlink_to(out / "one"), "'../folder' is a link; give the run directory that it leads to"),
        (lambda out: shutil.copytree(out / "one", out.parent / "folder" / "inner"), "is a folder of runs; give one of them"),
        (lambda out: open_run(a_job(out.parent, name="folder")), "is running (process "),
    ],
)
def test_protected_path_refuses_the_whole_request(out, monkeypatch, capsys, make, message):
    monkeypatch.chdir(out)
    writer = make(out)
    before = everything(out.parent)
    assert invoke(["runs", "delete", "one", "../folder", "--yes", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err.replace(str(out.parent), "..")
    assert everything(out.parent) == before
    if hasattr(writer, "close"):
        writer.close()


def test_run_in_progress_without_status_is_refused(out, capsys):
    writer = open_run(a_job(out, name="live"))
    (out / "live" / "status.json").unlink()
    arguments = ["runs", "delete", "live", "--yes", "--out", str(out)]
    assert invoke(arguments) == 2
    assert f"still written, by process {os.getpid()}" in capsys.readouterr().err
    writer.close()
    assert invoke(arguments) == 0
    assert names(out) == ["one", "three", "two"]


def a_sweep(out):
    for number in range(2):
        sync_run(out / "swept", name=f"lr={number}")
    sync_run(out / "swept" / ".earlier", name="lr=0-1")
    (out / "swept" / "sweep.json").write_text('{"points": []}')
    return out / "swept"


def test_sweep_is_deleted_with_its_runs_and_folder(out, capsys):
    sweep = a_sweep(out)
    list_runs(sweep)  # leaves an index
    assert invoke(["runs", "delete", "swept", "one", "--yes", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("deleted ") == 4
    assert not sweep.exists()
    assert names(out) == ["three", "two"]


def test_sweep_named_twice_is_deleted_once(out, capsys, monkeypatch):
    sweep = a_sweep(out)
    monkeypatch.chdir(out)
    assert invoke(["runs", "delete", "swept", str(sweep), "./swept/lr=0", "--yes", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("deleted ") == 3
    assert not sweep.exists()


def test_sweep_folder_with_foreign_files_is_kept(out, capsys):
    sweep = a_sweep(out)
    (sweep / "notes.txt").write_text("mine")
    assert invoke(["runs", "delete", str(sweep), "--yes", "--out", str(out)]) == 0
    assert "stays, as it holds other files" in capsys.readouterr().err
    assert everything(sweep) == {"notes.txt"}


def test_sweep_in_progress_is_refused(out, capsys):
    sweep = a_sweep(out)
    before = everything(out)
    held = lock(sweep)
    try:
        assert invoke(["runs", "delete", "swept", "one", "--yes", "--out", str(out)]) == 2
    finally:
        os.close(held)
    assert "is at work; end it first" in capsys.readouterr().err
    assert everything(out) == before


def test_run_of_a_sweep_in_progress_is_refused(out, capsys):
    """The sweep counts its finished runs, and would fail without one."""
    sweep = a_sweep(out)
    before = everything(out)
    held = lock(sweep)
    try:
        assert invoke(["runs", "delete", str(sweep / "lr=0"), "one", "--yes", "--out", str(out)]) == 2
        assert "is at work; end it first" in capsys.readouterr().err
        assert everything(out) == before
    finally:
        os.close(held)
    assert invoke(["runs", "delete", str(sweep / "lr=0"), str(sweep / "lr=1"), "--yes", "--out", str(out)]) == 0
    assert not (sweep / "lr=0").exists()


def test_missing_terminal_deletes_nothing(out):
    done = subprocess.run([*DELETE, "one", "--out", str(out)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "one  (succeeded, 7 files, " in done.stderr
    assert "Give --yes to delete without asking" in done.stderr
    assert names(out) == ["one", "three", "two"]


@pytest.mark.parametrize(("answer", "left"), [("n\n", ["one", "three", "two"]), ("y\n", ["two"])])
def test_terminal_asks_for_confirmation(out, answer, left):
    primary, secondary = pty.openpty()
    os.write(primary, answer.encode())
    done = subprocess.run([*DELETE, "one", "three", "--out", str(out)], stdin=secondary, capture_output=True, text=True)
    os.close(primary)
    os.close(secondary)
    assert done.returncode == 0
    assert "Delete 2 runs, " in done.stderr
    assert ("nothing was deleted" in done.stderr) == (len(left) == 3)
    assert names(out) == left


@pytest.mark.thorough
def test_killed_deletion_leaves_no_partial_run(out):
    """Enough files to kill it between move and end; the next deletion removes the rest."""
    folder = out / "one" / "many"
    folder.mkdir()
    for number in range(20_000):
        (folder / str(number)).touch()
    with subprocess.Popen([*DELETE, "one", "--yes", "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: not (out / "one").exists(), 60, "the run to be moved")
        process.kill()
    (rest,) = out.glob(".one.gone-*")
    assert (rest / "job.json").exists()
    assert names(out) == ["three", "two"]
    (out / ".config.gone-12345678").mkdir()
    (out / ".config.gone-12345678" / "mine").touch()
    assert invoke(["runs", "delete", "two", "--yes", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".index")) == [".config.gone-12345678", "three"]


@pytest.mark.thorough
def test_concurrent_deletions_succeed(out):
    """One deletes; the other finds no run, or a run in progress."""
    for number in range(2000):
        (out / "one" / str(number)).touch()
    command = [*DELETE, "one", "--yes", "--out", str(out)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=100) for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes
    assert set(codes) <= {0, 2}, outputs
    assert sum(output.count("deleted ") for output, _ in outputs) == codes.count(0)
    assert "Traceback" not in "".join(error for _, error in outputs)
    assert names(out) == ["three", "two"]
    assert list(out.glob(".one*")) == []


@pytest.mark.parametrize("link", [".earlier", "folder"])
def test_linked_runs_of_a_sweep_are_refused(out, tmp_path, capsys, link):
    swept = tmp_path / "swept"
    sync_run(swept, name="seed=1")
    (swept / "sweep.json").write_text("{}")
    (swept / link).symlink_to(out)
    before = everything(out)
    assert invoke(["runs", "delete", str(swept), "--yes"]) == 2
    assert "behind a link" in capsys.readouterr().err
    assert everything(out) == before
    assert (swept / "seed=1").exists()


def test_foreign_files_of_a_sweep_are_kept(out, tmp_path, capsys):
    swept = tmp_path / "swept"
    sync_run(swept, name="seed=1")
    (swept / "sweep.json").write_text("{}")
    (swept / ".earlier").mkdir()
    (swept / ".earlier" / "notes.txt").write_text("mine")
    (swept / ".index.folder").mkdir()
    assert invoke(["runs", "delete", str(swept), "--yes"]) == 0
    assert f"{swept} stays, as it holds other files" in capsys.readouterr().err
    assert everything(swept) == {".earlier", ".earlier/notes.txt"}
