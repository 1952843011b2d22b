"""The benchmark's arithmetic and its table of rows; the runs themselves are `python -m benchmarks`."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace

import pytest

from benchmarks.figures import Measured, Spread, differs, ratios, window
from benchmarks.ours import read_run
from benchmarks.peer_runs import Nodes, places
from benchmarks.processes import Group, MeasurementError, environment
from benchmarks.rows import CONTESTANTS, PEERS, ROWS, Ours, Peer
from benchmarks.session import needed
from benchmarks.table import compute, render


def measured(steps_per_second=100.0, **changes):
    losses = tuple(1.0 / (1 + update) for update in range(40))
    run = Measured(steps_per_second, 10 * steps_per_second, 2.0, None, 1, 10, 30, losses, sum(losses[10:]) / 30, 30)
    return replace(run, **changes)


def test_a_window_begins_with_the_result_that_completes_the_warm_up():
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 10) == (48, 6.0)
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 12) == (48, 6.0)
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 13) == (32, 4.0)
    with pytest.raises(ValueError, match="60 updates leave nothing"):
        window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 29)


def test_the_ratio_is_the_median_of_neighbours_not_the_ratio_of_medians():
    runs = {"tf": [measured(rate) for rate in (100.0, 300.0, 200.0)], "model.fit": [measured(rate) for rate in (50.0, 60.0, 80.0)]}
    result = compute("tf-fit", ROWS["tf-fit"], runs)
    assert ratios([100.0, 300.0, 200.0], [50.0, 60.0, 80.0]) == [2.0, 5.0, 2.5]
    assert (result.ours, result.peer, result.ratio) == (Spread(200.0, 100.0, 300.0), Spread(60.0, 50.0, 80.0), Spread(2.5, 2.0, 5.0))
    assert result.met is False
    assert compute("tf-fit", replace(ROWS["tf-fit"], target=2.5), runs).met is True


def test_bounds_from_above_and_rows_without_a_target():
    slow, quick = measured(first_step_seconds=5.0), measured(first_step_seconds=4.0)
    assert compute("start-tf-1", ROWS["start-tf-1"], {"tf": [slow], "tf fused loop": [quick]}).met is True
    assert compute("start-tf-1", ROWS["start-tf-1"], {"tf": [slow], "tf fused loop": [measured(first_step_seconds=3.9)]}).met is False
    runs = {"tf async ×3": [measured(60.0)], "tf sync ×3": [measured(examples_per_second=1200.0)]}
    result = compute("tf-async-over-sync", ROWS["tf-async-over-sync"], runs)
    assert result.met is None
    assert result.ratio == Spread(0.5, 0.5, 0.5)


def test_a_failed_run_takes_its_repeat_out_and_no_figures_meet_no_target():
    runs = {"tf": [measured(300.0), measured(100.0)], "model.fit": [measured(100.0), None]}
    assert compute("tf-fit", ROWS["tf-fit"], runs).ratio == Spread(3.0, 3.0, 3.0)
    empty = compute("tf-fit", ROWS["tf-fit"], {"tf": [None], "model.fit": [measured()]})
    assert (empty.ours, empty.met, empty.repeats) == (None, False, 0)
    assert "no figures" in render([empty])


def test_the_table_reads_like_this():
    runs = {"tf": [measured(23456.0), measured(21000.0)], "model.fit": [measured(6360.0), measured(6000.0)]}
    watched = [measured(monitor_cores=0.0042)]
    results = [compute("tf-fit", ROWS["tf-fit"], runs), compute("monitor-cpu-tf-1", ROWS["monitor-cpu-tf-1"], {"tf, watched": watched})]
    assert render(results).splitlines() == [
        "row                            unit                       ours                 peer             ratio  target  met",
        "tf-fit: tf / model.fit         steps/s  22,228 [21,000–23,456]  6,180 [6,000–6,360]  3.59 [3.50–3.69]     ≥ 3  yes",
        "monitor-cpu-tf-1: tf, watched  cores    0.0042 [0.0042–0.0042]                    –                 –  ≤ 0.01  yes",
    ]


def test_a_peer_that_does_other_work_is_told_by_its_losses():
    ours = measured()
    assert differs(ours, measured(losses=ours.losses[:20]), same_order=True) is None
    other = (*ours.losses[:7], ours.losses[7] * 1.01, *ours.losses[8:20])
    assert "at update 7" in differs(ours, measured(losses=other), same_order=True)
    assert "mean loss" in differs(ours, measured(mean_loss=ours.mean_loss * 1.01), same_order=True)
    assert differs(ours, measured(mean_loss=ours.mean_loss * 1.01), same_order=False) is None
    assert "mean loss" in differs(ours, measured(mean_loss=ours.mean_loss * 1.2), same_order=False)
    assert "mean loss" in differs(ours, measured(mean_loss=float("nan")), same_order=False)
    assert "did not take" in differs(ours, measured(mean_over=31), same_order=True)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_peer_has_a_readable_file_and_its_own_match(name):
    contestant = CONTESTANTS[name]
    if isinstance(contestant, Ours):
        return
    module = ast.parse(contestant.path.read_text(encoding="utf-8"))
    assert ast.get_docstring(module)
    match = CONTESTANTS[contestant.like]
    assert isinstance(match, Ours)
    assert (match.scene, match.nodes) == (contestant.scene, contestant.workers)
    assert contestant.steps <= match.steps


def test_every_row_has_its_contestants_and_every_file_its_row():
    used = {name for row in ROWS.values() for name in (row.ours, row.peer) if name}
    assert used == set(CONTESTANTS)
    scripts = {contestant.path for contestant in CONTESTANTS.values() if isinstance(contestant, Peer)}
    assert scripts == set(PEERS.glob("*.py")) - {PEERS / "workload.py"}
    for row in ROWS.values():
        assert isinstance(CONTESTANTS[row.ours], Ours)
        assert row.peer is None or CONTESTANTS[row.peer].scene == CONTESTANTS[row.ours].scene


def test_a_peer_brings_the_run_that_it_is_compared_with():
    assert needed(["torch-lightning"]) == ["torch", "Lightning"]
    assert needed(["start-tf-1", "tf-fit"]) == ["tf", "tf fused loop", "model.fit"]


def test_each_contract_names_every_process_once():
    nodes = Nodes(("10.0.0.1", "10.0.0.2", "10.0.0.3"), "eth0", tuple(range(100, 108)), lambda node: None)
    tasks = places(CONTESTANTS["coordinator per step"], nodes)
    assert [(task.name, task.node) for task in tasks] == [("chief-0", 0), ("ps-0", 0), ("worker-0", 0), ("worker-1", 1), ("worker-2", 2)]
    cluster = json.loads(tasks[0].variables["TF_CONFIG"])["cluster"]
    assert cluster == {
        "chief": ["10.0.0.1:100"],
        "ps": ["10.0.0.1:101"],
        "worker": ["10.0.0.1:102", "10.0.0.2:103", "10.0.0.3:104"],
    }
    ranks = places(CONTESTANTS["gloo parameter server"], nodes)
    assert [(task.variables["RANK"], task.node, task.variables["WORLD_SIZE"]) for task in ranks] == [
        ("0", 0, "4"),
        ("1", 0, "4"),
        ("2", 1, "4"),
        ("3", 2, "4"),
    ]


def test_neither_side_inherits_settings(monkeypatch):
    steering = {"TRAINER_LR": "9", "OMP_NUM_THREADS": "1", "TF_CONFIG": "{}", "RANK": "3", "TRAINER_DATA_CACHE": "/data"}
    for name, value in steering.items():
        monkeypatch.setenv(name, value)
    found = environment({"RANK": "0"})
    assert {name: found.get(name) for name in steering} == {
        "TRAINER_LR": None,
        "OMP_NUM_THREADS": None,
        "TF_CONFIG": None,
        "RANK": "0",
        "TRAINER_DATA_CACHE": "/data",
    }


def test_a_process_that_fails_ends_the_wait_and_says_why(tmp_path):
    with Group(tmp_path) as group:
        group.start("leader", [sys.executable, "-c", "import time; time.sleep(60)"], environment({}))
        group.start("other", [sys.executable, "-c", "raise SystemExit('no such port')"], environment({}))
        with pytest.raises(MeasurementError, match="other ended with code 1\n    no such port"):
            group.wait_for("leader", 30.0)
        leader = dict(group._processes)["leader"]
        assert leader.poll() is None
    assert leader.returncode is not None


def test_our_figures_come_from_the_run_directory(tmp_path):
    records = [
        {"step": 0, "count": 2, "time_seconds": 0.5, "losses": [4.0, 3.0]},
        {"step": 4, "count": 2, "time_seconds": 1.0, "losses": [1.0, 1.0]},
        {"step": 2, "count": 2, "time_seconds": 2.0, "losses": [2.0, 2.0]},
    ]
    nodes = [{"monitor_cpu_cores_used": 0.002}, {"monitor_cpu_cores_used": 0.004}]
    summary = {"steps": 6, "state": "succeeded", "init_seconds": 3.0, "examples": 60, "per_node": nodes}
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "job.json").write_text(json.dumps({"threads_per_task": [1, 1]}))
    run = read_run(tmp_path, 2)
    assert (run.steps_per_second, run.examples_per_second, run.first_step_seconds) == (4 / 1.5, 40 / 1.5, 3.5)
    assert run.losses == (4.0, 3.0, 2.0, 2.0, 1.0, 1.0)
    assert (run.mean_loss, run.mean_over, run.monitor_cores) == (1.5, 4, 0.004)
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "state": "failed"}))
    with pytest.raises(MeasurementError, match="has not finished"):
        read_run(tmp_path, 2)
