"""The code that made a run: installed packages, and commits of real git work trees."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from crosstrain.monitor.host import installed_packages, provenance, work_tree
from crosstrain.records.text import code_text, instructions_text

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def tree(tmp_path):
    """A work tree with one commit."""
    for command in (["init", "-q"], ["add", "a"], ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "first"]):
        (tmp_path / "a").write_text("one\n")
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


@needs_git
def test_commit_and_changes_are_recorded(tree):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True).stdout.strip()
    assert work_tree(tree) == {"commit": head, "changed": False}
    (tree / "untracked").write_text("x")
    (tree / "below").mkdir()
    assert work_tree(tree / "below") == {"commit": head, "changed": False}
    (tree / "a").write_text("two\n")
    assert work_tree(tree) == {"commit": head, "changed": True}


@needs_git
@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean", "filter.x.process"])
def test_no_program_of_a_tree_is_started(tree, setting, tmp_path_factory):
    """A tree may be untrusted, with its own git configuration."""
    mark = tmp_path_factory.mktemp("mark") / "started"
    (tree / ".gitattributes").write_text("a filter=x\n")
    subprocess.run(["git", "config", setting, f"touch {mark}; cat"], cwd=tree, check=True)
    (tree / "a").write_text("two\n")
    provenance = work_tree(tree)
    assert provenance is not None
    assert provenance["changed"] is None
    assert not mark.exists()


@needs_git
def test_variables_select_no_other_tree(tree, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tree / ".git"))
    assert work_tree(tmp_path_factory.mktemp("elsewhere")) is None


def test_missing_git_records_nothing(tree, monkeypatch):
    monkeypatch.setenv("PATH", str(tree))
    assert work_tree(tree) is None


def test_installed_packages_match_the_metadata():
    packages = installed_packages(sys.path)
    for name in ("crosstrain", "numpy", "click"):
        assert packages[name] == version(name)
    assert len(packages) > 20


def test_first_of_two_releases_counts(tmp_path):
    for folder, release in (("one", "1.0"), ("two", "2.0")):
        (tmp_path / folder / f"Some_Thing-{release}.dist-info").mkdir(parents=True)
    assert installed_packages([str(tmp_path / "none"), str(tmp_path / "one"), str(tmp_path / "two")]) == {"some-thing": "1.0"}


def test_provenance_has_packages_and_commits(tree, repository):
    record = provenance(tree)
    assert record == {"packages": installed_packages(sys.path), "typed_in": work_tree(tree), "crosstrain": work_tree(repository)}


# Description ------------------------------------------------------------------------------------------------------------

ONE, OTHER = "abc1234" + 33 * "0", "def5678" + 33 * "0"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, None),
        ({"packages": {}, "typed_in": None, "crosstrain": None}, None),
        ({"packages": {"crosstrain": "1.0", "numpy": "2.0"}, "typed_in": None, "crosstrain": None}, "crosstrain 1.0"),
        (
            {"packages": {"crosstrain": "1.0"}, "crosstrain": {"commit": ONE, "changed": True}, "typed_in": None},
            "crosstrain 1.0 at commit abc123400000 (changed)",
        ),
        (
            {"packages": {"crosstrain": "1.0"}, "crosstrain": {"commit": ONE, "changed": False}, "typed_in": {"commit": OTHER}},
            "crosstrain 1.0 at commit abc123400000, typed in a work tree at commit def567800000 (perhaps changed)",
        ),
        ({"typed_in": {"commit": OTHER, "changed": False}}, "crosstrain, typed in a work tree at commit def567800000"),
    ],
)
def test_code_is_described(code, text):
    assert code_text(code) == text


def test_instructions_are_vector_and_matrix_ones_in_order():
    assert instructions_text(["fpu", "avx512f", "avx2", "sse", "amx_tile"]) == "avx2 avx512f amx_tile"
    assert instructions_text(["fpu"]) is instructions_text([]) is instructions_text(None) is None


# A working directory that has been removed ---------------------------------------------------------------------------


def without_directory(folder, *arguments):
    """Run the command in a folder that is removed before it starts."""
    gone = folder / "gone"
    script = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    command = ["sh", "-c", script, str(gone), sys.executable, "-P", "-m", "crosstrain.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
def test_a_run_needs_no_working_directory(tmp_path):
    job = ["--backend", "torch", "--mode", "async", "--nodes", "2", "--network", "host", "--steps", "5", "--checkpoint-every", "end"]
    done = without_directory(tmp_path, "run", *job, "--quiet", "--out", str(tmp_path), "--name", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "succeeded"
    assert json.loads((tmp_path / "run/env.json").read_text())["code"]["typed_in"] is None
    run = str(tmp_path / "run")
    for command in (["evaluate", run], ["export", run, "--format", "torch"], ["compare", run]):
        done = without_directory(tmp_path, *command)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.thorough
def test_the_machine_is_checked_without_a_working_directory(tmp_path):
    done = without_directory(tmp_path, "doctor", "--json", "--fresh")
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["run directories"]["found"] == "the working directory has been removed"
    assert {name: check["state"] for name, check in checks.items() if name.startswith("backend")} == {
        "backend tf": "ok",
        "backend torch": "ok",
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    ["run --steps 5 --backend torch", "runs", "runs show a", "compare a", "submit slurm --dry-run", "run --resume a", "doctor -x"],
)
def test_command_that_needs_the_working_directory_fails(tmp_path, command):
    done = without_directory(tmp_path, *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(" The working directory has been removed: change to one that exists, or give absolute paths.\n")
    assert done.stderr.count("\n") == 1
