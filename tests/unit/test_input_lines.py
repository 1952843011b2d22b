"""Lines of standard input as they arrive, through real pipes."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.cli.trained_job import MAX_BYTES, MAX_LINE_BYTES, MAX_LINES, arriving_lines
from crosstrain.core.errors import InterruptedRunError


def read(*chunks):
    """Return the batches that a reader gets when these chunks are written."""
    source, sink = os.pipe()

    def write():
        with os.fdopen(sink, "wb", buffering=0) as pipe:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[pipe.write(view) :]

    writer = threading.Thread(target=write)
    writer.start()
    batches = list(arriving_lines(source, lambda: False))
    writer.join()
    os.close(source)
    return batches


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet="ab\n\u2028\x85\x0c", max_size=9).map(str.encode), max_size=9))
def test_lines_end_only_at_line_feeds(chunks):
    whole = b"".join(chunks)
    expected = whole.removesuffix(b"\n").split(b"\n") if whole else []
    assert [line for batch in read(*chunks) for line in batch] == expected


def test_too_long_line_is_skipped_and_not_stored():
    long = b"x" * (MAX_LINE_BYTES + 1)
    lines = [line for batch in read(b"one\r\n", long, long, b"\ntwo\n", b"y" * MAX_LINE_BYTES, b"\n", long) for line in batch]
    assert lines == [b"one", None, b"two", b"y" * MAX_LINE_BYTES, None]


def test_batches_have_maximum_number_of_lines():
    batches = read(b"line\n" * (3 * MAX_LINES + 1))
    assert sum(map(len, batches)) == 3 * MAX_LINES + 1
    assert max(map(len, batches)) <= MAX_LINES


def test_batches_of_long_lines_are_bounded_in_bytes():
    batches = read((b"x" * 60_000 + b"\n") * 300)
    assert sum(map(len, batches)) == 300
    assert max(sum(map(len, lines)) for lines in batches) < MAX_BYTES + 2 * MAX_LINE_BYTES


def test_line_arrives_before_next_is_written():
    source, sink = os.pipe()
    lines = arriving_lines(source, lambda: False)
    for text in (b"first", b"second"):
        os.write(sink, text + b"\n")
        assert next(lines) == [text]
    os.close(sink)
    assert list(lines) == []
    os.close(source)


def test_wait_ends_on_interrupt():
    source, sink = os.pipe()
    with pytest.raises(InterruptedRunError):
        next(arriving_lines(source, lambda: True))
    os.close(source)
    os.close(sink)
