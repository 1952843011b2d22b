"""Finished runs side by side: rows, rendered tables, the command."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from run_samples import a_job, async_run, open_run, summary_of, sync_run

from crosstrain.cli.compare_command import compare
from crosstrain.core.errors import UsageError
from crosstrain.metrics.display import bytes_text, count_text, duration_text, number_text, rate_text
from crosstrain.report.compare import rows
from crosstrain.report.tables import ACROSS_MODES, SYNTHETIC, one_run, side_by_side, to_text

ONE_RUN = """\
state                succeeded
backend              tf
mode                 sync
model                logreg
data                 digits
precision            fp32
nodes                2
workers              2
global batch         10
steps                10
examples             100
examples/s           62.5
steps/s              6.25
run time             2.00 s
init time            3.00 s
train time           1.60 s
final train loss     0.7750
test loss            0.6000
test accuracy        0.9000
time to target       1.67 s
target               accuracy>=0.85 reached
network counted at   interface

node   CPU cores used   peak memory       sent   received
─────────────────────────────────────────────────────────
0                1.00        100 MB   2.0 MB/s   4.0 MB/s
1                2.00        200 MB   2.0 MB/s   4.0 MB/s
"""

SIDE_BY_SIDE = """\
                                one           two
─────────────────────────────────────────────────
state                     succeeded     succeeded
backend                          tf         torch
mode                           sync         async
model                        logreg        logreg
data                         digits        digits
precision                      fp32          fp32
nodes                             2             2
workers                           2             2
parameter servers                 -             1
global batch                     10            10
steps                            10            16
examples                        100            80
examples/s                     62.5            50
  relative to the first       1.00x         0.80x
steps/s                        6.25            10
run time                     2.00 s        2.00 s
init time                    3.00 s        3.00 s
train time                   1.60 s        1.60 s
final train loss             0.7750        0.4375
test loss                    0.6000        0.7000
test accuracy                0.9000        0.8000
time to target               1.67 s   not reached
staleness mean                    -          1.50

node 0 CPU cores used          1.00             -
node 0 peak memory           100 MB             -
node 0 sent                2.0 MB/s             -
node 0 received            4.0 MB/s             -
node 1 CPU cores used          2.00             -
node 1 peak memory           200 MB             -
node 1 sent                2.0 MB/s             -
node 1 received            4.0 MB/s             -

A step is one update of the parameters: of the global batch in sync mode, of one worker's batch in async mode.
So steps/s of sync and async runs are different things; compare examples/s and time to target.
"""


def two_runs(folder):
    return [sync_run(folder), async_run(folder, until="accuracy>=0.9")]


def test_the_table_of_one_run(tmp_path):
    assert to_text(one_run(summary_of(sync_run(tmp_path)))) == ONE_RUN


def test_a_target_that_was_missed_is_said_plainly(tmp_path):
    text = to_text(one_run(summary_of(async_run(tmp_path, until="accuracy>=0.9"))))
    assert "accuracy>=0.9 NOT reached within the budget\n" in text


def test_the_command_lays_runs_side_by_side(tmp_path):
    result = CliRunner().invoke(compare, [str(path) for path in two_runs(tmp_path)], catch_exceptions=False)
    assert (result.exit_code, result.output) == (0, SIDE_BY_SIDE)


def test_the_command_prints_one_json_document(tmp_path):
    paths = two_runs(tmp_path)
    result = CliRunner().invoke(compare, [*map(str, paths), "--json"], catch_exceptions=False)
    first, second = json.loads(result.output)["runs"]
    assert [first, second] == rows(paths)
    assert (first["examples_per_second"], second["staleness_mean"], first["staleness_mean"]) == (62.5, 1.5, None)
    assert first["node_network_sent_bytes_per_second"] == [2e6, 2e6]
    assert second["node_cpu_cores_used_mean"] == [None, None]


def test_runs_of_one_mode_need_no_warning_and_nodes_may_differ(tmp_path):
    runs = [sync_run(tmp_path), sync_run(tmp_path, name="three", nodes=3)]
    text = to_text(side_by_side([summary_of(path) for path in runs]))
    assert ACROSS_MODES.splitlines()[0] not in text
    (line,) = (line for line in text.splitlines() if line.startswith("node 2 CPU cores used"))
    assert line.split() == ["node", "2", "CPU", "cores", "used", "-"]


def test_what_a_run_computed_in_is_shown_and_not_only_what_was_asked(tmp_path):
    summary = {**summary_of(sync_run(tmp_path)), "precision": "bf16", "precision_used": "bf16 (emulated)"}
    for table in (one_run(summary), side_by_side([summary])):
        assert [line.split(maxsplit=1)[1] for line in to_text(table).splitlines() if line.startswith("precision")] == ["bf16 (emulated)"]
    assert rows([tmp_path / "one"])[0]["precision"] == "fp32"


def test_synthetic_data_is_called_so_in_every_table(tmp_path):
    real = summary_of(sync_run(tmp_path))
    random = {**real, "run": "random", "data": "synthetic-images:64", "synthetic": True}
    for table in (one_run(random), side_by_side([real, random])):
        text = to_text(table)
        assert [line.split()[-2:] for line in text.splitlines() if line.startswith("data ")] == [["synthetic-images:64", "(synthetic)"]]
        assert text.endswith(f"\n\n{SYNTHETIC}\n")
    assert "ynthetic" not in to_text(side_by_side([real, real])) + to_text(one_run(real))


def test_a_loss_that_blew_up_is_shown(tmp_path):
    summary = {**summary_of(sync_run(tmp_path)), "final_train_loss": "NaN"}
    (line,) = (line for line in to_text(side_by_side([summary])).splitlines() if line.startswith("final train loss"))
    assert line.split()[-1] == "NaN"


def test_a_run_that_is_none_or_has_not_finished_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere' is not a run directory"):
        rows([sync_run(tmp_path), tmp_path / "nowhere"])
    writer = open_run(a_job(tmp_path, name="going"))
    with pytest.raises(UsageError, match=r"going' has no summary.json; it is running\. Wait until it has ended\."):
        rows([writer.path])
    writer.write_status("failed", cause="worker-1 was killed by signal 9")
    with pytest.raises(UsageError, match=r"it failed \(worker-1 was killed by signal 9\)\. Run it again, or leave it out\."):
        rows([writer.path])
    writer.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number_text(0.41234567), "0.4123"),
        (number_text(0.0000123), "1.23e-05"),
        (number_text(0.0), "0.0000"),
        (number_text(float("nan")), "nan"),
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
        (duration_text(0.3456), "0.35 s"),
        (duration_text(12.34), "12.3 s"),
        (duration_text(125.2), "2 min 05 s"),
        (duration_text(3599.7), "1 h 00 min"),
        (duration_text(None), "-"),
    ],
)
def test_figures_are_readable(text, expected):
    assert text == expected
