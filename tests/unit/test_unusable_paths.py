"""A path that the system refuses ends each command with one line that names it."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from report_runs import make_run
from test_unreadable_folders import without_privileges

from crosstrain.cli.completion import _values
from crosstrain.cli.group import COMMANDS, invoke, load_command
from crosstrain.core.drafts import replacing

RUN = "RUN"
"""Replaced by the path of a run, for commands that need one in addition to the tested path."""

NEEDS = {
    "run": ["--data", "npz:nothing", "--steps", "1"],
    "plot": ["--pick", "loss"],
    "submit slurm": ["--nodes", "1", "--time", "1:00:00", "--name", "x"],
    "manifest kubernetes": ["--nodes", "1", "--image", "x"],
    "export": ["--describe"],
    "watch": ["--wait", "0"],
    "data prepare": ["mnist"],
    "data info": ["mnist"],
}
"""What else a command has to be given, so that it comes to the path."""

PIECES = st.sampled_from(["closed", "loop", "file", "folder", "x", "x" * 300, "é" * 140, "x/" * 2100, "caf\udce9"])
PATHS = st.lists(PIECES, min_size=1, max_size=4).map("/".join)


def leaves(command, path):
    if not isinstance(command, click.Group):
        yield " ".join(path), command
    else:
        for name, below in command.commands.items():
            yield from leaves(below, (*path, name))


def taking_paths():
    """Return all parameters of commands that take a path, or a run's name, which may be one."""
    for first in COMMANDS:
        for name, command in leaves(load_command(first), (first,)):
            for parameter in command.params:
                if _values(parameter, name.split()[-1])["completes"] is not None:
                    yield name, parameter.opts[0] if isinstance(parameter, click.Option) else "", command
    for command in ("data prepare", "data info"):
        for source in ("image-folder", "parallel-text", "npz"):
            yield command, f"{source}:", None


UNTESTED = ("doctor", "--python")
"""Checks the whole machine, whatever that path is."""

TAKING = [taken for taken in taking_paths() if taken[:2] != UNTESTED]


@pytest.fixture(scope="module")
def place():
    """A folder that other users may read, unlike pytest's, with unreadable content."""
    folder = Path(tempfile.mkdtemp(prefix="crosstrain-unusable-"))
    folder.chmod(0o755)
    make_run(folder / "runs", "one", steps=8)
    for path in (folder / "runs", *(folder / "runs").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "closed").mkdir(mode=0o700)
    (folder / "folder").mkdir()
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to("loop")
    yield folder
    shutil.rmtree(folder)


def arguments(name, option, command, path, run):
    needed = [*name.split(), *NEEDS.get(name, [])]
    if command is None:
        return [*name.split(), f"{option}{path}"]
    takes = next((parameter for parameter in command.params if isinstance(parameter, click.Argument) and parameter.required), None)
    if not option:
        return [*needed, path]
    return [*needed, option, path, *([run] if takes is not None and "data" not in name else [])]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "option", "command"), TAKING, ids=[f"{name} {option}".strip() for name, option, _ in TAKING])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(path="x" * 300, privileged=True)
@example(path="closed/x", privileged=False)
@example(path="loop", privileged=True)
@given(path=PATHS, privileged=st.booleans())
def test_commands_show_no_traceback_for_a_path(place, capsys, monkeypatch, name, option, command, path, privileged):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)
    arguments_typed = arguments(name, option, command, f"{place}/{path}", str(place / "runs" / "one"))
    invoke(["runs", "--out", str(place / "runs")])  # everything is imported before the privileges end
    with nullcontext() if privileged else without_privileges():
        code = invoke(arguments_typed)
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert code in (0, 1, 2)
    assert code == 0 or "error: " in message


def test_longest_name_can_be_replaced(tmp_path):
    path = tmp_path / ("é" * 127 + "x")
    for text in ("one", "two"):
        with replacing(path) as draft:
            draft.write_text(text)
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def replaced(path, write):
    with replacing(path) as draft:
        write(draft)
        raise OSError(f"the cause, {draft.name}")


def test_failed_write_leaves_nothing_and_raises_its_cause(tmp_path):
    with pytest.raises(OSError, match="the cause"):
        replaced(tmp_path / "file", Path.touch)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="the cause"):  # a folder cannot be unlinked, like any file on a read-only file system
        replaced(tmp_path / "file", Path.mkdir)
