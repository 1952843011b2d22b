"""Alignment of tables (words left, figures right) and nesting of the report's lists."""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

import pytest
from comparison_samples import made
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.records.text import bytes_text, count_text, duration_text, number_text, rate_text, seconds_text
from crosstrain.report.compare.cells import holds_figures, plain_lines
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.formats import as_markdown, as_text
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.pages.page import render
from crosstrain.report.pages.paper_table import as_latex
from crosstrain.report.runs.columns import column
from crosstrain.report.runs.run import Run, started_runs

METRICS = ["state", "examples_per_second", "data", "time_to_target_seconds", "target"]


@given(
    st.floats(0, 1e12),
    st.sampled_from([bytes_text, count_text, duration_text, number_text, rate_text, seconds_text]),
    st.sampled_from("† "),
)
def test_figures_in_every_notation_are_recognized(value, show, mark):
    assert holds_figures([f"{show(value)}{mark}", "-", "not reached", f"{show(value)} ± {show(1.0)} (2 of 3)"])
    assert not holds_figures([show(value), "succeeded"])


@pytest.mark.parametrize(
    "name", ["sync", "20261122-131600-logreg-torch-sync-3n-162d", "8_workers", "sync ×3", "true", "digits (synthetic)"]
)
def test_names_with_leading_digit_are_words(name):
    assert not holds_figures([name, "-"])


@pytest.mark.parametrize("otherwise", [True, False])
def test_column_without_words_follows_declaration(otherwise):
    assert holds_figures(["-", "", "not reached"], otherwise) is otherwise
    assert holds_figures([], otherwise) is otherwise


@pytest.fixture
def comparison():
    return compare_runs([made("one", batch_size=8), made("two", batch_size=16, mode="async")])


def aligned_as(comparison):
    markers = next(line for line in as_markdown(comparison, [column(name) for name in METRICS]).splitlines() if line.startswith("| ---"))
    return ["right" if marker.endswith(":") else "left" for marker in re.findall(r"-+:?", markers)]


def test_requested_text_columns_align_left_in_every_format(comparison):
    expected = ["left", "left", "right", "left", "right", "left"]  # run, state, examples/s, data, time to target, target
    assert aligned_as(comparison)[:5] == expected[:5]
    latex = as_latex(comparison.runs, [column(name) for name in METRICS])
    (sides,) = re.findall(r"begin\{tabular\}\{(\w+)\}", latex)
    assert sides == "llrl"  # the configuration, then the known figures: there is no target
    text = as_text(comparison, [column(name) for name in METRICS], layout="rows").splitlines()
    header = next(line for line in text if line.startswith("run "))
    for line in text[text.index(header) + 2 :][:2]:
        assert line.index("succeeded") == header.index("state")
        assert line.index("digits") == header.index("data")


def test_numeric_setting_aligns_right(comparison):
    rows = as_markdown(comparison).split("\n\n")[1].splitlines()
    header, markers = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows[:2])
    sides = dict(zip(header, markers, strict=True))
    assert (sides["run"], sides["mode"], sides["global batch"]) == ("---", "---", "---:")


def test_list_of_runs_aligns_requested_text_left():
    text, _ = runs_table(many_rows(), None, ["optimizer", "steps"])
    header, *lines = text.splitlines()
    for line in lines:
        assert line.index("sgd" if "sgd" in line else "adam") == header.index("optimizer")
        assert line.endswith(("5", "123"))
    assert len({len(line) for line in lines}) == 1


def places(text):
    """Return the terminal width of a text, by Unicode's tables."""
    return sum(0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


WIDE = ["run", "训练-1", "日本語の実行", "한국어", "e\u0301te\u0301", "é", "x" * 20, ""]


@given(
    st.integers(1, 5).flatmap(lambda count: st.lists(st.lists(st.sampled_from(WIDE), min_size=count, max_size=count), min_size=1)),
    st.data(),
)
def test_columns_align_in_any_script(columns, data):
    right = data.draw(st.lists(st.booleans(), min_size=len(columns), max_size=len(columns)))
    widest = [max(map(places, column)) for column in columns]
    for number, line in enumerate(plain_lines([*columns, ["|"] * len(columns[0])], [*right, False])):
        assert places(line) == sum(widest) + 2 * len(columns) + 1
        begins = 0
        for cells, width, figures in zip(columns, widest, right, strict=True):
            text = cells[number]
            before = begins + (width - places(text) if figures else 0)
            cut = next(index for index in range(len(line) + 1) if places(line[:index]) == before)
            assert line[cut:].startswith(text)
            begins += width + 2


def test_runs_with_non_latin_names_align():
    first, second = many_rows()
    text, _ = runs_table([{**first, "path": "runs/训练-一号"}, second], None, ["optimizer", "steps"])
    assert len({places(line) for line in text.splitlines()[1:]}) == 1
    compared = as_text(compare_runs([made("训练"), made("two", backend="tf")]), layout="rows")
    lines = [line for line in compared.splitlines() if line.startswith(("训练 ", "two "))]
    assert len({places(line[: line.index("1,000")]) for line in lines[:2]}) == 1


def many_rows():
    blank = dict.fromkeys(["folder", "state", "backend", "mode", "model", "data", "nodes", "global_batch_size", "examples_per_second"])
    blank |= dict.fromkeys(["eval_loss", "eval_accuracy", "time_to_target_seconds", "created_at", "synthetic", "target_reached"])
    return [
        {**blank, "path": "runs/a", "optimizer": "sgd", "steps": 5},
        {**blank, "path": "runs/b", "optimizer": "adam", "steps": 123},
    ]


class Items(HTMLParser):
    """The nesting depth of list items that are settings or begin with a capital."""

    def __init__(self):
        super().__init__()
        self.depth, self.items, self.at = 0, [], False

    def handle_starttag(self, tag, attrs):
        self.depth += tag == "ul"
        self.at = tag == "li"

    def handle_endtag(self, tag):
        self.depth -= tag == "ul"

    def handle_data(self, data):
        if self.at:
            self.items.append((self.depth, data.partition(" (")[0].partition(":")[0]))
        self.at = False


def test_confounders_are_nested_below_heading(tmp_path):
    items = Items()
    items.feed(render(started_runs(map(Run, [make_run(tmp_path, "one", steps=8), make_run(tmp_path, "two", steps=8, lr=0.2)]))))
    depths = {text: depth for depth, text in reversed(items.items)}
    assert (depths["Confounding differences"], depths["learning rate"]) == (1, 2)
