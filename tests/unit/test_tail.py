"""Records are read once, while they are written."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from run_samples import EVENT, STEP

from crosstrain.records.store.jsonl import DamagedRunError, LineFile, encode
from crosstrain.records.store.run_directory import cut_records
from crosstrain.records.store.schema import EventRecord, StepRecord
from crosstrain.report.pages.watched_run import Tail


def updates(first, count):
    return [replace(STEP, step=2 * number) for number in range(first, first + count)]


def append(path, records, end=b""):
    with path.open("ab") as file:
        file.write(b"".join(map(encode, records)) + end)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


@pytest.fixture
def tail(path):
    tail = Tail(path, StepRecord)
    yield tail
    tail.close()


def test_records_are_read_once(path, tail):
    assert tail.read() == []
    file = LineFile(path)
    assert tail.read() == []
    for record in updates(0, 3):
        file.write(record)
    assert tail.read() == updates(0, 3)
    assert tail.read() == []
    file.write(updates(3, 1)[0])
    assert tail.read() == updates(3, 1)
    assert not tail.was_replaced
    file.close()


def test_line_counts_when_complete(path, tail):
    line = encode(updates(2, 1)[0])
    append(path, updates(0, 2), line[:30])
    assert tail.read() == updates(0, 2)
    append(path, [], line[30:-1])
    assert tail.read() == []
    append(path, [], line[-1:])
    assert tail.read() == updates(2, 1)


def test_withdrawn_partial_line_is_never_read(path, tail):
    append(path, updates(0, 2), b'{"schema":1,"st')
    assert tail.read() == updates(0, 2)
    os.truncate(path, len(b"".join(map(encode, updates(0, 2)))))
    append(path, updates(2, 1))
    assert tail.read() == updates(2, 1)
    assert not tail.was_replaced


def test_truncated_file_is_read_again(path, tail):
    append(path, updates(0, 8))
    assert len(tail.read()) == 8
    cut_records(path.parent, 6, 100.0)
    assert tail.read() == updates(0, 3)
    assert tail.was_replaced
    append(path, updates(3, 1))
    assert tail.read() == updates(3, 1)
    assert not tail.was_replaced


def test_truncated_file_that_regrew_is_noticed(path, tail):
    append(path, updates(0, 4))
    tail.read()
    cut_records(path.parent, 2, 100.0)
    append(path, updates(1, 9))
    assert tail.read() == updates(0, 10)
    assert tail.was_replaced


@pytest.mark.parametrize("spare", [0, 1, 50])
def test_long_file_is_read_at_its_end_only(path, spare):
    append(path, updates(0, 1000))
    last = updates(990, 10)
    tail = Tail(path, StepRecord, len(b"".join(map(encode, last))) + spare)
    assert tail.read() == last
    append(path, updates(1000, 1))
    assert tail.read() == updates(1000, 1)
    tail.close()


def test_line_longer_than_a_block_is_read(path, tail):
    long = EventRecord("task_ended", 1.0, {"tail": "x" * 3_000_000})
    append(path, [long, EVENT])
    tail = Tail(path, EventRecord)
    assert tail.read() == [long, EVENT]
    tail.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b'{"schema":2}\n', b'{"schema":1}\n'])
def test_complete_line_that_is_no_record_is_damage(path, tail, line):
    append(path, updates(0, 1), line)
    with pytest.raises(DamagedRunError, match=r"steps\.jsonl, line 2: not a StepRecord"):
        tail.read()
