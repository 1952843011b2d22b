"""Tests that want the machine for themselves are few, and say why."""

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
MAX_ALONE = 6
MARK = re.compile(r"pytest[.]mark[.]alone\b")
REASON = re.compile(r"mark[.]alone\b.*  # \w")


def test_alone_marks_are_few_and_have_their_reason():
    lines = [line for path in TESTS.rglob("*.py") for line in path.read_text().splitlines() if MARK.search(line)]
    assert 0 < len(lines) <= MAX_ALONE
    assert [line for line in lines if not REASON.search(line)] == []
