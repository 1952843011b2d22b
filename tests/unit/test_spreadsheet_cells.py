"""No text of a run is a formula in a spreadsheet, and no number becomes a text."""

from __future__ import annotations

import csv
import io
import math

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.report.compare.formats import write_csv
from crosstrain.report.pages.export import Column, Table
from crosstrain.report.pages.export import write_csv as write_table

FORMULA = ("=", "+", "-", "@", "\t", "\r")
NAMES = st.builds(lambda first, rest: first + rest, st.sampled_from([*"=+-@\ta'", ""]), st.text("=+-@\tab1.;,\"'\n", max_size=6))


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def cells_of(name, value):
    """Return the cells of both kinds of CSV files for a run of this name, header first."""
    file = io.StringIO()
    write_table(Table([Column("run", "text"), Column("loss", "number"), Column(name, "text")], iter([(name, value, None)])), file)
    return file.getvalue(), write_csv([{"run": name, "loss": value, name or "empty": None}])


@given(NAMES, st.floats())
def test_text_is_no_formula_and_number_no_text(name, value):
    for content in cells_of(name, value):
        header, row = list(csv.reader(io.StringIO(content, newline="")))
        for cell in (row[0], header[-1]):
            assert not cell.startswith(FORMULA) or is_number(cell)
        assert row[1] == "" or float(row[1]) == value or math.isnan(value)


@given(NAMES)
def test_text_that_is_no_formula_is_unchanged(name):
    plain = f"a{name}".replace("\t", "").replace("\n", "")
    for content in cells_of(plain, -1.0):
        assert list(csv.reader(io.StringIO(content)))[1][:2] == [plain, "-1.0"]


def test_non_finite_figures_keep_their_names():
    assert (
        write_csv([{"loss": -math.inf, "accuracy": "-Infinity", "node": [-1.5, -2.0]}])
        == "loss,accuracy,node\n-Infinity,-Infinity,-1.5 -2.0\n"
    )
