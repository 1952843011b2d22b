"""Prose and values are wrapped at the width of a terminal; table rows are not."""

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.cli.streams import wrapped

WORDS = st.lists(st.text("abcdefgh1.,%", min_size=1, max_size=12), min_size=1, max_size=60)


@given(WORDS, st.integers(60, 200), st.integers(0, 4), st.text("abc", max_size=12))
def test_lines_fit_the_width_and_keep_all_words(words, width, indent, key):
    line = " " * indent + (f"{key}   " if key else "") + " ".join(words)
    lines = wrapped(f"{line}\nshort\n", width).splitlines()
    assert lines.pop() == "short"
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == line.split()
    below = indent + len(key) + 3 if key else indent + 2
    assert all(len(more) - len(more.lstrip()) == below for more in lines[1:])


def test_table_rows_are_not_wrapped():
    row = "  ".join(f"{number:>12}" for number in range(12)) + "\n"
    assert wrapped(row, 100) == row
