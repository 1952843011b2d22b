"""An unreadable folder of runs is reported, and not taken for an empty one."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from report_runs import make_run

from crosstrain.cli.group import invoke

UNPRIVILEGED_USER = 65534
MODES = [0o000, 0o444, 0o111]
"""Neither, listing alone, looking at entries alone."""


@contextmanager
def without_privileges():
    """Root may read everything, so a test that runs as root changes its user temporarily."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(UNPRIVILEGED_USER)
    try:
        yield
    finally:
        if privileged:
            os.seteuid(0)


@pytest.fixture
def out():
    """A folder that other users may read, unlike pytest's, with a run and a nested run."""
    place = Path(tempfile.mkdtemp(prefix="crosstrain-unreadable-"))
    place.chmod(0o755)
    for folder, name in ((place / "runs", "one"), (place / "runs" / "locked", "two")):
        make_run(folder, name, steps=8)
    for path in (place / "runs", *(place / "runs").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for command in LISTING + NAMING:  # so that all modules are imported
        invoke([*command.split(), "--out", str(place / "runs")])
    yield place / "runs"
    for path in (place / "runs", place / "runs" / "locked"):
        path.chmod(0o755)
    shutil.rmtree(place)


def refused(capsys, *arguments):
    capsys.readouterr()
    with without_privileges():
        code = invoke(list(arguments))
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, ""), captured
    return captured.err


LISTING = ["runs", "runs --json"]
NAMING = ["runs show one", "compare one", "explain one", "watch one --wait 0"]
"""A run that is named can be looked at where the folder cannot be listed."""


@pytest.mark.parametrize(
    ("command", "mode"), [(command, mode) for command in LISTING + NAMING for mode in MODES if command in LISTING or mode != 0o111]
)
def test_unreadable_folder_is_named(out, capsys, command, mode):
    out.chmod(mode)
    assert refused(capsys, *command.split(), "--out", str(out)) == (
        f"error: {str(out)!r} cannot be read (Permission denied); give a folder that you may read, or ask its owner.\n"
    )


def test_unreadable_run_is_named_by_its_path(out, capsys):
    (out / "locked").chmod(0o000)
    for text in (str(out / "locked"), str(out / "locked" / "two")):
        assert refused(capsys, "runs", "show", text, "--out", str(out)).startswith(f"error: {text!r} cannot be read (Permission denied); ")


def test_unreadable_folder_is_named_and_others_are_listed(out, capsys):
    (out / "locked").chmod(0o000)
    capsys.readouterr()
    with without_privileges():
        code = invoke(["runs", "--out", str(out)])
    captured = capsys.readouterr()
    assert code == 0
    assert [line.split()[0] for line in captured.out.splitlines()] == ["name", "one"]
    assert f"passed over, as they cannot be read: {out / 'locked'}" in captured.err.splitlines()


def test_run_elsewhere_is_found_despite_unreadable_default(out, tmp_path, capsys):
    folder = out / "locked"
    shutil.copytree(folder, out.parent / "others")
    out.chmod(0o000)
    with without_privileges():
        assert invoke(["runs", "show", str(out.parent / "others" / "two"), "--out", str(out)]) == 0
        assert invoke(["compare", str(out.parent / "others"), "--out", str(out)]) == 0
