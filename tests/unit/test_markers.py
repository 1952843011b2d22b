"""Pytest markers: few tests run alone, and quick cases have ids that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
MAX_ALONE = 6
MARK = re.compile(r"pytest[.]mark[.]alone\b")
REASON = re.compile(r"mark[.]alone\b.*  # \w")

CASES = """
import pytest

@pytest.mark.quick_cases({named})
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x[1]", "y"])
def test_cases(a, b, seed):
    print("drawn from", seed)
"""


def test_alone_marks_are_few_and_explained():
    lines = [line for path in TESTS.rglob("*.py") for line in path.read_text().splitlines() if MARK.search(line)]
    assert 0 < len(lines) <= MAX_ALONE
    assert [line for line in lines if not REASON.search(line)] == []


def session(folder, named, *options):
    """Run a pytest session with these markers and options over one file."""
    (folder / "test_cases.py").write_text(CASES.format(named=named))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([*command, *options, str(folder)], capture_output=True, text=True, cwd=folder, env=environment, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_unnamed_cases_are_thorough(tmp_path):
    code, output = session(tmp_path, '"x[1]-2", "y-1"', "--seed", "0", "-s")
    assert code == 0, output
    assert "2 passed, 2 deselected" in output
    assert output.count("drawn from 0\n") == 2
    assert "Tests left to other commands: 2 (make test-thorough)" in output


def test_unknown_case_is_an_error(tmp_path):
    code, output = session(tmp_path, '"y-1", "y-3"')
    assert code == 2, output
    assert "quick_cases has to name, once, cases that no marker leaves out: not ['y-3']" in output


def test_clusters_marker_is_run_by_its_command():
    named = (TESTS.parent / "Makefile").read_text()
    marked = {path.name for path in TESTS.rglob("test_*.py") if re.search(r"mark[.]clusters\b", path.read_text())}
    assert [name for name in marked if f"tests/cluster/{name}" not in named] == []
