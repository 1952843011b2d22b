"""Runs as a LaTeX table: rows, intervals, caption, unused runs, and whether it compiles."""

import re

import pytest
from click.testing import CliRunner
from comparison_samples import made, starved_node, written
from hypothesis import given, settings
from hypothesis import strategies as st
from imported_later import ImportedLater
from latex_documents import compiled, needs_pdflatex, problems

from crosstrain.cli.commands.compare import compare
from crosstrain.core.errors import UsageError
from crosstrain.report.compare.comparison import setting_rule
from crosstrain.report.pages.paper_table import as_latex
from crosstrain.report.runs.columns import column

SPEEDS = {"sync": (1000.0, 1100.0, 1230.0, 990.0, 1045.0), "async": (1500.0, 1510.0, 1650.0, 1440.0, 1505.0)}

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=80) | st.text(
    st.sampled_from('&%$#_{}~^\\<>|"-[]*\x1b\u202e\n é中'), min_size=1, max_size=200
)

stats = ImportedLater("scipy.stats")


def repeats(**more):
    """Five repeats of a sync and of an async job."""
    return [
        made(f"digits-{mode}-r{seed}", mode=mode, seed=seed, summary={"examples_per_second": speed}, **more)
        for mode, speeds in SPEEDS.items()
        for seed, speed in enumerate(speeds)
    ]


def caption_of(latex):
    return re.search(r"\\caption\{%\n(.*?)\}\n  \\label", latex, re.DOTALL)[1]


def body_of(latex):
    """Return the rows of the table, as lists of cells."""
    return [re.split(r"(?<!\\)&", line.removesuffix(r" \\")) for line in latex.splitlines() if line.endswith(r" \\")]


def cells_of(latex):
    return [[cell.strip() for cell in row] for row in body_of(latex)]


def test_interval_is_student_s_over_all_repeats():
    header, sync, asynchronous = cells_of(as_latex(repeats()))
    assert header == ["configuration", r"\multicolumn{2}{c}{accuracy}", r"\multicolumn{2}{c}{examples/s}"]
    for (name, _, _, mean, half), (mode, speeds) in zip((sync, asynchronous), SPEEDS.items(), strict=True):
        low, high = stats.t.interval(0.95, len(speeds) - 1, loc=sum(speeds) / len(speeds), scale=stats.sem(speeds))
        assert (name, mean, half) == (mode, f"{(low + high) / 2:,.0f}", rf"$\pm$ {(high - low) / 2:,.0f}")


def test_caption_explains_settings_repeats_and_interval():
    caption = caption_of(as_latex(repeats(lr=0.1, until="accuracy>=0.8")))
    assert (
        r"logreg on digits; 1 node, torch, global batch 32, sgd, learning rate 0.1, precision fp32, budget 10 epochs, target accuracy"
        in caption
    )
    assert "Means over 5 repeats each, which differ by their seeds; $\\pm$ is half the width of the 95 \\% interval of the mean" in caption
    assert "Student's t" in caption


def test_label_is_the_common_part_of_the_names():
    assert r"\label{tab:sweep-lr}" in as_latex([made(f"sweep_LR {lr}", lr=lr) for lr in (1, 2)])
    assert r"\label{tab:one-other}" in as_latex([made("one"), made("other", nodes=2)])
    assert r"\label{tab:runs}" in as_latex([made("中")])


def test_runs_of_a_sweep_have_its_name_as_label(tmp_path):
    runs = [made(f"lr={lr},seed=0", lr=lr) for lr in (0.1, 0.2)]
    for run in runs:
        run.path = tmp_path / "rates_1" / run.summary["run"]
    assert "rates" not in as_latex(runs)
    (tmp_path / "rates_1").mkdir()
    (tmp_path / "rates_1" / "sweep.json").write_text("{}")
    assert r"\label{tab:rates-1}" in as_latex(runs)
    assert r"\label{tab:lr-0-1-seed-0}" in as_latex(runs[:1])


def test_single_runs_have_no_interval():
    latex = as_latex([made("one"), made("two", nodes=2)])
    assert "One run each." in caption_of(latex)
    assert "pm" not in latex
    assert cells_of(latex) == [["nodes", "accuracy", "examples/s"], ["1", "0.8750", "1,000"], ["2", "0.8750", "1,000"]]


def test_numeric_row_names_are_aligned_at_the_point():
    rows = cells_of(as_latex([made(f"r{lr}", lr=lr) for lr in (1, 0.5, 0.125)]))
    assert [row[0] for row in rows] == ["learning rate", r"1\phantom{.000}", r"0.5\phantom{00}", "0.125"]


def test_values_of_a_column_have_equal_decimals():
    runs = [
        made(f"n{nodes}", nodes=nodes, summary={"examples_per_second": speed}) for nodes, speed in ((1, 3.14159), (2, 61.5), (4, 1234.5))
    ]
    assert [row[-1] for row in cells_of(as_latex(runs))] == ["examples/s", "3.14", "61.50", "1,234.50"]


def test_units_are_in_the_header():
    latex = as_latex(
        [made("one"), made("two", nodes=2)], [column(name) for name in ("time", "step_seconds_p50", "memory", "sent", "state")]
    )
    header, first_row, _ = cells_of(latex)
    assert header[1:] == [
        "run time (s)",
        "node 0 peak RSS (MB)",
        "node 1 peak RSS (MB)",
        "node 0 sent over the whole run (MB/s)",
        "node 1 sent over the whole run (MB/s)",
        "state",
    ]
    assert first_row[1:] == ["15", "100", "-", "2", "-", "succeeded"]


def test_missed_target_is_marked():
    figures = [(8.0, True), (9.0, True), (None, False)]
    runs = [
        made(f"r{seed}", seed=seed, until="accuracy>=0.9", summary={"time_to_target_seconds": seconds, "target_reached": reached})
        for seed, (seconds, reached) in enumerate(figures)
    ]
    none = {"time_to_target_seconds": None, "target_reached": False}
    latex = as_latex([*runs, made("other", until="accuracy>=0.9", nodes=2, summary=none)])
    _, first, second = cells_of(latex)
    assert first[4:6] == ["8.50", "(2 of 3)"]
    assert r"\multicolumn{2}{c}{not reached}" in second
    assert "In brackets: how many of the repeats reached the target" in caption_of(latex)


def test_contended_runs_are_named_and_not_used():
    disturbed = made("noisy%run", summary={"examples_per_second": 1.0, "per_node": [starved_node(0.6)]})
    latex = as_latex([*repeats(), disturbed])
    assert "\n% Speed and times are not used, because of CPU contention from other programs: noisy%run\n" in latex
    assert "Speed and times of 1 run with CPU contention from other programs are not used." in caption_of(latex)
    assert "($n=5$)" in latex
    with pytest.raises(UsageError, match="voids the speed of every run"):
        as_latex([disturbed], [column("examples_per_second")])


def test_incomparable_values_are_marked_and_explained():
    latex = as_latex([made("one"), made("two", model="cnn")])
    assert all("dagger" in cell for cell in cells_of(latex)[2][1:])
    assert r"$\dagger$ Not comparable with the first row: speed, accuracy (model)." in caption_of(latex)


def test_further_differences_are_named_with_values():
    assert "The rows differ in learning rate (0.05, 0.1) as well." in caption_of(as_latex([made("one"), made("two", model="cnn", lr=0.1)]))


def test_table_by_nodes_has_speedup_and_efficiency():
    runs = [made(f"n{n}-r{r}", nodes=n, seed=r, summary={"examples_per_second": 900.0 * n + r}) for n in (1, 2, 4) for r in (0, 1)]
    rows = cells_of(as_latex(runs, by=[setting_rule("nodes")]))
    assert [row[-2:] for row in rows] == [["speed-up", r"efficiency (\%)"], ["1.00", "100"], ["2.00", "100"], ["4.00", "100"]]


def test_unfolded_table_has_a_row_per_run():
    rows = cells_of(as_latex(repeats()[:3], fold=False))
    assert [row[0] for row in rows] == ["configuration", "digits-sync-r0", "digits-sync-r1", "digits-sync-r2"]


def test_wide_table_spans_both_columns():
    assert "\\begin{table}\n" in as_latex([made("one"), made("two", nodes=2)])
    wide = as_latex([made("one" * 30), made("two", nodes=2)], [column(name) for name in ("time", "loss", "memory", "sent", "received")])
    assert "\\begin{table*}\n" in wide
    assert wide.rstrip().endswith("\\end{table*}")


def test_synthetic_data_has_no_metrics():
    latex = as_latex([made(f"r{n}", nodes=n, data="synthetic-images", model="cnn", summary={"synthetic": True}) for n in (1, 2)])
    assert cells_of(latex)[0] == ["nodes", "examples/s"]
    assert "Synthetic data" in caption_of(latex)


def sound(latex):
    """Assert that a table has balanced groups, no raw specials, and full rows."""
    lines = [line for line in latex.splitlines() if not line.startswith("%")]
    environment = re.compile(r"\\(begin|end)\{(table\*?|tabular)\}|\\\\$|^    .*?(?<!\\)&.*$")
    assert problems("\n".join(line for line in lines if not environment.search(line)).replace("{%\n", "{\n")) == []
    columns = re.search(r"\\begin\{tabular\}\{(.*)\}", latex)[1].replace("@{ }", "").replace("p{0.4\\linewidth}", "l")
    for row in body_of(latex):
        spans = sum(2 if r"\multicolumn{2}" in cell else 1 for cell in row)
        assert spans == len(columns)
        assert [problems(cell.replace("[0pt][l]", "")) for cell in row] == [[] for _ in row]


@given(st.lists(NAMES, min_size=2, max_size=4, unique=True))
def test_any_names_make_a_valid_table(names):
    sound(as_latex([made(name, model=name if number else "logreg", lr=0.1 + number) for number, name in enumerate(names)]))


@needs_pdflatex
@settings(max_examples=3)
@given(st.lists(NAMES, min_size=12, max_size=12, unique=True))
def test_pdflatex_accepts_any_names(tmp_path_factory, names):
    tables = [
        as_latex([made(first_name), made(second_name, model=second_name, nodes=2)])
        for first_name, second_name in zip(names[::2], names[1::2], strict=True)
    ]
    compiled(tmp_path_factory.mktemp("latex"), "\n".join([r"\listoftables", *tables]))


@needs_pdflatex
def test_pdflatex_accepts_all_kinds_of_tables(tmp_path):
    figures = {"examples_per_second": 1e9, "eval": {"loss": float("nan"), "accuracy": 1e-9}, "init_seconds": 0.0}
    tables = [
        as_latex(repeats(until="accuracy>=0.8"), before=["Comparison of 100 % of {"]),
        as_latex(
            [made("a", summary=figures), made("b" * 200, nodes=2)], [column(name) for name in ("loss", "accuracy", "init_seconds", "state")]
        ),
        as_latex([made(f"n{nodes}", nodes=nodes) for nodes in (1, 2, 4)], by=[setting_rule("nodes")]),
    ]
    log = compiled(tmp_path, "\n".join(tables))
    assert "multiply" not in log


def test_command_prints_the_table(tmp_path):
    result = CliRunner().invoke(compare, [*written(tmp_path, *repeats()), "--latex", "--by", "mode", "--metric", "accuracy"])
    assert result.exit_code == 0
    assert result.output.startswith("% For LaTeX with \\usepackage{booktabs}, and no other package.\n% Comparison of ")
    assert [row[0] for row in cells_of(result.output)] == ["configuration", "async", "sync"]
