"""Comparison of finished runs: rows, rendered tables, the command."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from comparison_samples import compare_paths, made, rows, side_by_side, written
from imported_later import ImportedLater
from run_samples import CLOCK, a_job, async_run, open_run, summary_of, sync_run

from crosstrain.cli.commands.compare import compare
from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.records.summary import summarise
from crosstrain.records.text import bytes_text, count_text, duration_text, number_text, rate_text
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.compare.cells import cell
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.formats import as_markdown, as_text
from crosstrain.report.compare.run_tables import ACROSS_MODES, SYNTHETIC, one_run, to_text
from crosstrain.report.runs.columns import column
from crosstrain.report.runs.run import Run

stats = ImportedLater("scipy.stats")

ONE_RUN = """\
state                       succeeded
backend                     tf
mode                        sync
model                       logreg
data                        digits
precision                   fp32
nodes                       2
workers                     2
exchange                    native
global batch                10
steps                       10
examples                    100
examples/s                  62.5
steps/s                     6.25
run time (after start-up)   2.00 s
start-up time               3.00 s
training time               1.60 s
final train loss            0.7750 (mean of the last 10 updates)
test loss                   0.6000
test accuracy               0.9000
time to target              1.67 s
target                      accuracy>=0.85 reached
traffic counted at          interface

node   CPU cores used   peak RSS       sent   received
──────────────────────────────────────────────────────
0                1.00     100 MB   2.5 MB/s   5.0 MB/s
1                2.00     200 MB   2.5 MB/s   5.0 MB/s
CPU cores: means over the whole run, evaluations and pauses included; sent and received: over the training time.
RSS counts shared memory in every process.
"""

GOLDEN = Path(__file__).parent / "golden"


def two_runs(folder):
    return [sync_run(folder), async_run(folder, until="accuracy>=0.9")]


def test_table_of_one_run_equals_expected(tmp_path):
    assert to_text(one_run(summary_of(sync_run(tmp_path)))) == ONE_RUN


def test_async_update_batch_is_one_workers(tmp_path):
    summary = summary_of(async_run(tmp_path))
    text = to_text(one_run({**summary, "batch_size": 32, "global_batch_size": 64}))
    assert re.search(r"^batch of an update +32$", text, re.MULTILINE)
    assert "global batch" not in text


def test_missed_target_is_shown(tmp_path):
    text = to_text(one_run(summary_of(async_run(tmp_path, until="accuracy>=0.9"))))
    assert "accuracy>=0.9 NOT reached within the budget\n" in text


def test_settings_changed_on_resume_are_shown(tmp_path):
    summary = summary_of(sync_run(tmp_path))
    segments = [{}, {"changed": {"mode": ["async", "sync"], "steps": [10, 20]}}, {"changed": {"backend": ["tf", "torch"]}}]
    text = to_text(one_run(summary, {"segments": segments}))
    assert "The run changed when it was resumed (backend, mode): the figures add up parts under different settings" in text
    assert to_text(one_run(summary, {"segments": [{}, {"changed": {"steps": [10, 20]}}]})) == ONE_RUN


def test_failed_saves_are_shown(tmp_path):
    summary = summary_of(sync_run(tmp_path))
    text = to_text(one_run({**summary, "checkpoints": {**summary["checkpoints"], "saved": 1, "failed": 6}}))
    assert re.search(r"^checkpoints +1 saved, 6 FAILED$", text, re.MULTILINE)
    assert "FAILED" not in to_text(one_run(summary))


def test_table_of_run_has_both_checkpoint_costs(tmp_path):
    """Saves of 0.3 and 0.6 s, for which training paused for 2 and 4 ms."""
    path = sync_run(tmp_path)
    events = [
        {"schema": 1, "event": "checkpoint_saved", "time_seconds": 1.0, "detail": {"seconds": whole, "stall_seconds": stall, "bytes": 10}}
        for whole, stall in ((0.3, 0.002), (0.6, 0.004))
    ]
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    summary = summarise(path, CLOCK, state="succeeded", updates_scheduled=10, updates_applied=10)
    saving = {"saved": 2, "failed": 0, "stall_seconds": {"mean": pytest.approx(0.003), "max": 0.004}, "bytes": 10}
    assert summary["checkpoints"] == {**saving, "write_seconds": {"mean": pytest.approx(0.45), "max": 0.6}}
    costs = "2 saved; each paused training for 3 ms; writing one took 450 ms, in the background or after training"
    assert re.search(rf"^checkpoints +{costs}$", to_text(one_run(summary)), re.MULTILINE)
    earlier = {**summary, "checkpoints": {name: value for name, value in summary["checkpoints"].items() if name != "write_seconds"}}
    assert re.search(r"^checkpoints +2 saved; each paused training for 3 ms$", to_text(one_run(earlier)), re.MULTILINE)


def repeats_and_another():
    """Return three runs that differ by seed and a slower async one under another kernel.

    One of the three missed the target.
    """
    goal, runs = "accuracy>=0.9", []
    for seed, (speed, accuracy, seconds) in enumerate([(1000.0, 0.875, 8.0), (1100.0, 0.9, 9.0), (1200.0, 0.925, None)]):
        figures = {
            "examples_per_second": speed,
            "eval": {"examples": 360, "loss": 0.5, "accuracy": accuracy},
            "target_reached": seconds is not None,
            "time_to_target_seconds": seconds,
        }
        runs.append(made(f"sync-r{seed + 1}", seed=seed, until=goal, nodes=2, summary=figures))
    slow = {"examples_per_second": 550.0, "steps_per_second": 17.2, "time_to_target_seconds": 4.0, "staleness": {"mean": 1.5}}
    return [*runs, made("async_1", until=goal, nodes=2, mode="async", node={"kernel": "6.2.0"}, summary=slow)]


@pytest.mark.parametrize("form", ["--layout=columns", "--layout=rows", "--markdown", "--latex"])
def test_command_output_equals_golden_file(tmp_path, form):
    """Compare each form with a golden file."""
    paths = written(tmp_path, *repeats_and_another())
    result = CliRunner().invoke(compare, [*paths, form], catch_exceptions=False)
    assert (result.exit_code, result.output) == (0, (GOLDEN / f"compare{form.replace('=', '-')}.txt").read_text(encoding="utf-8"))


def test_few_runs_are_columns_and_many_are_rows(tmp_path):
    two, five = (compare_runs([made(f"run{number}", model=f"model{number}") for number in range(count)]) for count in (2, 5))
    assert "\ntest accuracy " in as_text(two)
    assert "\ntest accuracy " not in as_text(five)
    assert "\ntest accuracy " not in as_text(two, width=40)
    assert "\ntest accuracy " in as_text(five, layout="columns")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_output_fits_the_terminal(width):
    text = as_text(compare_runs(repeats_and_another()), layout="rows", width=width)
    assert max(map(len, text.splitlines())) <= width
    for label in ("examples/s", "start-up time", "error", "staleness", "received", "peak RSS", "sampled PSS"):
        assert re.search(rf"(^| ){label}( |$)", text, re.MULTILINE)


def test_markdown_in_name_is_escaped():
    comparison = compare_runs([made(r"a|b_$x\y<z>"), made("two")])
    assert r"| a\|b\_$x\\y\<z\> |" in as_markdown(comparison)


def test_csv_has_unrounded_figures(tmp_path):
    paths = written(tmp_path, *repeats_and_another())
    result = CliRunner().invoke(compare, [*paths, "--csv"], catch_exceptions=False)
    folded, single = csv.DictReader(io.StringIO(result.output))
    assert (folded["run"], folded["runs"], single["run"], single["runs"]) == ("sync ×3", "3", "async_1", "1")
    assert float(folded["examples_per_second"]) == 1100.0
    assert float(folded["examples_per_second_sigma"]) == statistics.stdev([1000.0, 1100.0, 1200.0])
    assert float(folded["eval_accuracy"]) == pytest.approx(0.9)
    assert float(single["eval_error"]) == 0.125
    assert float(single["relative_examples_per_second"]) == 0.5
    assert (folded["not_comparable"], single["not_comparable"].split("; ")[:2]) == ("", ["speed", "steps/s"])
    assert (folded["seed"], folded["staleness_mean"], single["seed"], single["synthetic"]) == ("", "", "0", "false")
    assert float(single["node_1_network_received_bytes_per_second"]) == 4e6


def test_figures_can_be_chosen(tmp_path):
    paths = written(tmp_path, *repeats_and_another())
    chosen = [*paths, "--metric", "accuracy,examples-per-second,memory,target_reached"]
    lines = CliRunner().invoke(compare, [*chosen, "--csv"], catch_exceptions=False).output.splitlines()
    assert lines[0] == (
        "run,runs,not_comparable,eval_accuracy,eval_accuracy_sigma,examples_per_second,examples_per_second_sigma,"
        "node_0_memory_rss_bytes_max,node_1_memory_rss_bytes_max,target_reached"
    )
    text = CliRunner().invoke(compare, chosen, catch_exceptions=False).output
    (line,) = (line for line in text.splitlines() if line.startswith("async_1"))
    assert re.split(r"\s{2,}", line) == ["async_1", "0.8750†", "550†", "100 MB†", "100 MB†", "yes"]


@pytest.mark.parametrize(
    ("metric", "expected", "unexpected"),
    [
        ("accuracy", [": accuracy (seed).", "of several runs has their mean"], ["steps/s", "resources", "A step is"]),
        ("steps_per_second", ["steps/s (mode, kernel).", "A step is one update"], ["accuracy (seed)"]),
        ("steps", ["A step is one update"], ["not comparable with"]),
        ("examples_per_second", ["speed (kernel)."], ["A step is"]),
        ("time_to_target", ["time to target (seed, kernel)."], ["A step is"]),
        ("accuracy,loss", ["loss, accuracy (seed)."], ["kernel)"]),
    ],
)
def test_notes_concern_chosen_figures(metric, expected, unexpected):
    text = as_text(compare_runs(repeats_and_another()), [column(name) for name in metric.split(",")])
    notes = text.split("─\n")[-1]
    assert [note for note in expected if note not in notes] == []
    assert [note for note in unexpected if note in notes] == []


def test_no_fold_keeps_repeats_apart(tmp_path):
    runs = [made("a", seed=0), made("b", seed=1), made("c", seed=1, node={"kernel": "7"})]
    assert [entry.label for entry in compare_runs(runs).entries] == ["a ×2", "c"]
    assert [entry.label for entry in compare_runs(runs, fold=False).entries] == ["a", "b", "c"]


def test_runs_with_the_same_seed_are_repeats():
    runs = [made("a"), made("b", summary={"examples_per_second": 1200.0}), made("c", backend="tf")]
    comparison = compare_runs(runs)
    assert [entry.label for entry in comparison.entries] == ["torch ×2", "c"]
    assert comparison.entries[0].figures["examples_per_second"] == 1100.0
    assert "(trainer compare --no-fold keeps repeats apart)." in " ".join(as_text(comparison).split())


def test_five_repeats_are_trimmed():
    runs = [made(f"r{seed}", seed=seed, summary={"run_seconds": float(seed), "examples_per_second": 10.0**seed}) for seed in range(5)]
    (entry,) = compare_runs(runs).entries
    assert set(entry.left_out) == {"r0", "r4"}
    assert entry.figures["examples_per_second"] == pytest.approx(370.0)
    assert "r ×5: the fastest and the slowest are excluded (r0, r4)." in as_text(compare_runs(runs))


def five_repeats(*seconds):
    """Return five runs of one job, some of which reached the target after these times."""
    times = [*seconds, *[None] * (5 - len(seconds))]
    return [
        made(f"r{seed}", seed=seed, until="accuracy>=0.9", summary={"time_to_target_seconds": time, "target_reached": time is not None})
        for seed, time in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], "not reached"),
        ([30.0], "30.0 s (1 of 5)"),
        ([30.0, 40.0], "35.0 s ± 63.5 s (2 of 5)"),
        ([10.0, 20.0, 30.0, 40.0], "30.0 s ± 20.5 s (4 of 5)"),
        ([10.0, 20.0, 30.0, 40.0, 50.0], "30.0 s ± 19.6 s"),
    ],
)
def test_time_to_target_is_mean_of_runs_that_reached_it(seconds, expected):
    comparison = compare_runs(five_repeats(*seconds))
    assert cell(comparison.entries[0], column("time_to_target")) == expected
    assert ("are excluded" in as_text(comparison)) == (len(seconds) >= 4)


def test_tables_show_half_confidence_interval(tmp_path):
    """Half the 95 % interval of all repeats, as from scipy, also with two trimmed from the mean."""
    draw = np.random.default_rng(20261127)
    print("seed 20261127")
    for count in (2, 3, 5, 9):
        speeds = draw.uniform(900.0, 1100.0, count).tolist()
        runs = [made(f"r{seed}", seed=seed, summary={"examples_per_second": speed}) for seed, speed in enumerate(speeds)]
        (entry,) = compare_runs(runs).entries
        low, high = stats.t.interval(0.95, count - 1, np.mean(speeds), stats.sem(speeds))
        assert entry.half_widths["examples_per_second"] == pytest.approx((high - low) / 2)
    output = CliRunner().invoke(compare, written(tmp_path, *repeats_and_another()), catch_exceptions=False).output
    assert "their mean ± half its 95 % confidence interval" in " ".join(output.split())
    assert "deviation" not in output


@pytest.mark.parametrize(
    ("metric", "verdict", "quality"),
    [("accuracy,loss", False, True), ("memory", False, False), ("examples_per_second", True, True), ("error,steps_per_second", True, True)],
)
def test_conclusion_covers_requested_figures(tmp_path, metric, verdict, quality):
    runs = [
        made(f"{lr}-{seed}", lr=lr, seed=seed, summary={"eval": {"examples": 360, "loss": 0.5, "accuracy": 0.75 + (lr + seed) / 100}})
        for seed in range(3)
        for lr in (1, 2)
    ]
    output = CliRunner().invoke(compare, [*written(tmp_path, *runs), "--metric", metric], catch_exceptions=False).output
    output = " ".join(output.split())
    assert ("as fast as" in output or "Throughput is not ranked" in output) == verdict
    assert ("Throughput is not ranked" in output or "has the highest throughput" in output) == verdict
    assert ("has the best test accuracy" in output) == quality
    assert ("Comparison of" in output) == quality


def test_diverged_loss_of_one_repeat_is_not_averaged():
    runs = [made("a-r1", seed=0), made("a-r2", seed=1, summary={"final_train_loss": "NaN"})]
    assert compare_runs(runs).entries[0].figures["final_train_loss"] == "NaN"


def test_step_rate_ranks_nothing_across_modes():
    busy = made("busy", mode="async", summary={"steps_per_second": 9e9, "examples_per_second": 900.0})
    comparison = compare_runs([made(), busy])
    assert conclude(comparison.runs).rankings[0].ratio.ratio == pytest.approx(1000 / 900)
    (line,) = (line for line in as_text(comparison).splitlines() if line.startswith("steps/s "))
    assert line.split()[1:] == ["31.2", "9,000,000,000†"]


def test_runs_of_one_name_are_labelled_by_folder(tmp_path):
    paths = [*written(tmp_path / "first", made("same")), *written(tmp_path / "second", made("same", backend="tf"))]
    assert [entry.label for entry in compare_paths(paths).entries] == ["first/same", "second/same"]


def test_repeats_with_common_name_parts_have_distinct_labels():
    runs = [made(f"p-{backend}{seed}", backend=backend, seed=seed) for backend in ("tf", "torch") for seed in (0, 1)]
    assert [entry.label for entry in compare_runs(runs).entries] == ["tf ×2", "torch ×2"]
    runs = [made(f"p-{number}", backend="tf" if number < 3 else "torch", seed=number % 3) for number in range(6)]
    assert [entry.label for entry in compare_runs(runs).entries] == ["tf ×3", "torch ×3"]


def test_copies_of_run_are_labelled_by_directory(tmp_path):
    shutil.copytree(sync_run(tmp_path), tmp_path / "copy")
    compared = compare_paths([tmp_path / "one", tmp_path / "copy"], fold=False)
    assert [entry.label for entry in compared.entries] == ["one", "copy"]
    assert [row["run"] for row in rows([tmp_path / "copy"])] == ["copy"]
    assert diagnose(Run(tmp_path / "copy")).to_json()["run"] == "copy"


def test_run_is_found_by_its_name(tmp_path):
    written(tmp_path, made("mine"), made("other", backend="tf"))
    result = CliRunner().invoke(compare, ["mine", "other", "--json"], env={"TRAINER_OUT": str(tmp_path)}, catch_exceptions=False)
    assert [run["run"] for run in json.loads(result.output)["runs"]] == ["mine", "other"]


def test_command_prints_one_json_document(tmp_path):
    paths = two_runs(tmp_path)
    result = CliRunner().invoke(compare, [*map(str, paths), "--json"], catch_exceptions=False)
    document = json.loads(result.output)
    first, second = document["runs"]
    assert [first, second] == rows(paths)
    assert (first["examples_per_second"], second["staleness_mean"], first["staleness_mean"]) == (62.5, 1.5, None)
    assert first["node_network_sent_bytes_per_second"] == [2e6, 2e6]
    assert second["node_cpu_cores_used_mean"] == [None, None]
    assert [row["relative_examples_per_second"] for row in document["rows"]] == [1.0, 0.8]
    assert [factor["setting"] for factor in document["comparability"]["compared"]] == ["backend", "mode", "ps"][:2]
    assert document["comparability"]["not_comparable_with_the_first"][1] == ["steps/s", "run time", "loss", "accuracy", "time to target"]
    assert "kernel" in document["comparability"]["not_recorded"]


def test_runs_of_one_mode_have_no_warning(tmp_path):
    runs = [sync_run(tmp_path), sync_run(tmp_path, name="three", nodes=3)]
    text = side_by_side([summary_of(path) for path in runs])
    assert ACROSS_MODES.splitlines()[0] not in text
    (line,) = (line for line in text.splitlines() if line.startswith("node 2 CPU cores used"))
    assert line.split() == ["node", "2", "CPU", "cores", "used", "-"]


def test_used_precision_is_shown(tmp_path):
    summary = {**summary_of(sync_run(tmp_path)), "precision": "bf16", "precision_used": "bf16 (emulated)"}
    for text in (to_text(one_run(summary)), side_by_side([summary])):
        assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("precision")] == ["bf16 (emulated)"]
    assert rows([tmp_path / "one"])[0]["precision"] == "fp32"


def test_synthetic_data_is_marked_in_every_table(tmp_path):
    real = summary_of(sync_run(tmp_path))
    random = {**real, "run": "random", "data": "synthetic-images:64", "synthetic": True}
    for text in (to_text(one_run(random)), side_by_side([real, random])):
        assert [line.split()[-2:] for line in text.splitlines() if line.startswith("data ")] == [["synthetic-images:64", "(synthetic)"]]
        assert text.endswith(f"\n\n{SYNTHETIC}\n")
    assert "ynthetic" not in side_by_side([real, real]) + to_text(one_run(real))


def test_diverged_loss_is_shown(tmp_path):
    summary = {**summary_of(sync_run(tmp_path)), "final_train_loss": "NaN"}
    (line,) = (line for line in side_by_side([summary]).splitlines() if line.startswith("final train loss"))
    assert line.split()[-1] == "NaN"


def test_lasting_non_finite_loss_is_noted_below_table(tmp_path):
    summary = summary_of(sync_run(tmp_path))
    note = "\nThe loss was not finite (NaN or infinite) from step 1,200 on: speed and resources are not those of training.\n"
    assert to_text(one_run({**summary, "non_finite_from_step": 1200})).endswith(note)
    assert to_text(one_run(summary)) == ONE_RUN


def test_missing_or_unfinished_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere' is not a run directory"):
        rows([sync_run(tmp_path), tmp_path / "nowhere"])
    writer = open_run(a_job(tmp_path, name="going"))
    with pytest.raises(UsageError, match=r"going' has no summary.json; it is running\. Wait until it has ended\."):
        rows([writer.path])
    writer.write_status("failed", cause="worker-1 was killed by signal 9")
    with pytest.raises(UsageError, match=r"it failed \(worker-1 was killed by signal 9\)\. Run it again, or leave it out\."):
        rows([writer.path])
    writer.close()


@pytest.mark.thorough
def test_damaged_runs_of_folder_are_skipped_and_named(tmp_path, capsys):
    damaged = {"b": "summary.json", "c": "job.json", "d": "env.json"}
    for run in ("a", *damaged, "e"):
        sync_run(tmp_path, name=run)
    for run, name in damaged.items():
        (tmp_path / run / name).write_bytes(b'{"schema": 1, "sta')
    for command in (["compare"], ["report", "-o", str(tmp_path / "page.html")], ["plot", "-o", str(tmp_path / "figures")]):
        code, errors = invoke([*command, str(tmp_path)]), capsys.readouterr().err
        assert code == 0, errors
        assert re.search(r"skipped \(.*\): b, c, d$", errors, re.MULTILINE), errors
        for run, name in damaged.items():
            assert invoke([*command, str(tmp_path / run)]) != 0
            assert name in capsys.readouterr().err


def test_unfinished_run_of_folder_is_skipped_and_named(tmp_path):
    """As a sweep continues past a failed point; a run named explicitly must be readable."""
    folder = tmp_path / "sweep"
    written(folder, made("a"), made("c", backend="tf"))
    open_run(a_job(folder, name="b")).close()
    result = CliRunner().invoke(compare, [str(folder), "--json"], catch_exceptions=False)
    assert [run["run"] for run in json.loads(result.stdout)["runs"]] == ["a", "c"]
    assert "skipped (no readable figures): b" in result.stderr
    for named in (folder / "a", folder):
        assert isinstance(CliRunner().invoke(compare, [str(named), str(folder / "b")]).exception, UsageError)


@pytest.mark.parametrize("command", ["compare", "explain", "predict", "report", "watch"])
@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "not a whole JSON document"),
        ('{"schema": 7}', "has schema 7; this release reads 1"),
        ('{"schema": 1}', "state: field required"),
        ({"steps_per_second": "fast"}, "steps_per_second: input should be a valid number"),
        ({"per_node": [None]}, "per_node.0: input should be"),
    ],
)
def test_damaged_summary_is_named_with_exit_2(tmp_path, capsys, command, document, problem):
    path = sync_run(tmp_path)
    file = path / "summary.json"
    file.write_text(document if isinstance(document, str) else json.dumps({**json.loads(file.read_text()), **document}))
    options = ["-o", str(tmp_path / "r.html")] if command == "report" else []
    assert invoke([command, str(path), *options]) == 2
    assert f"summary.json: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number_text(0.41234567), "0.4123"),
        (number_text(0.0000123), "1.23e-05"),
        (number_text(0.0), "0.0000"),
        (number_text(float("nan")), "NaN"),
        (number_text(float("-inf")), "-Infinity"),
        (number_text(145397046582550911406462468096.0), "1.45e+29"),
        (number_text(9_999_999.0), "9,999,999.0000"),
        (number_text(1e-12), "1e-12"),
        (number_text("Infinity"), "Infinity"),
        (number_text(None), "-"),
        (count_text(1234567), "1,234,567"),
        (rate_text(23456.7), "23,457/s"),
        (rate_text(3.4567), "3.46/s"),
        (rate_text(99.97), "100/s"),
        (bytes_text(0), "0 B"),
        (bytes_text(999.4), "999 B"),
        (bytes_text(999.9), "1.0 kB"),
        (bytes_text(12_345_678, per_second=True), "12.3 MB/s"),
        (bytes_text(123_456_789), "123 MB"),
        (bytes_text(3e18), "3000 PB"),
        (bytes_text(754e3, like=988e6), "0.75 MB"),
        (bytes_text(35.2e6, like=1.5e9), "0.035 GB"),
        (bytes_text(22_345_678, like=12e6), "22.3 MB"),
        (duration_text(0.3456), "0.35 s"),
        (duration_text(12.34), "12.3 s"),
        (duration_text(125.2), "2 min 05 s"),
        (duration_text(3599.7), "1 h 00 min"),
        (duration_text(None), "-"),
    ],
)
def test_figures_are_readable(text, expected):
    assert text == expected


def test_repeats_with_unrelated_names_are_labelled_by_settings():
    def labels(*runs):
        return [entry.label for entry in compare_runs(runs).entries]

    fruit = [made("apple", seed=1), made("pear", seed=2)]
    trees = [made("oak", seed=1, lr=0.2, mode="async"), made("elm", seed=2, lr=0.2, mode="async")]
    assert labels(*fruit, *trees) == ["sync ×2", "async ×2"]
    assert labels(*fruit, made("job-r1", seed=1, lr=0.2), made("job-r2", seed=2, lr=0.2)) == [
        "learning rate 0.05 ×2",
        "learning rate 0.2 ×2",
    ]
    assert labels(*fruit, made("fig", lr=0.2)) == ["learning rate 0.05 ×2", "fig"]
    assert labels(*fruit) == ["apple ×2"]
