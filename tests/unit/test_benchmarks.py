"""The benchmark's arithmetic and its table of rows; `python -m benchmarks` does the runs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.__main__ import chosen_rows, parse
from benchmarks.contestants import PEERS, Ours, Peer, Reference, Row
from benchmarks.figures import Measured, Spread, differs, ratios, save_costs, window
from benchmarks.memory import peak_bytes
from benchmarks.nodes import Nodes
from benchmarks.ours import read_run, steps_of
from benchmarks.peer_runs import places
from benchmarks.processes import Group, MeasurementError, environment
from benchmarks.rows import CONTESTANTS, GROUPS, ROWS
from benchmarks.session import needed, work_of
from benchmarks.table import UNITS, compute, render

ROOT = Path(__file__).parents[2]


def measured(steps_per_second=100.0, **changes):
    losses = tuple(1.0 / (1 + update) for update in range(40))
    run = Measured(steps_per_second, 10 * steps_per_second, 2.0, None, 1, 10, 30, losses, sum(losses[10:]) / 30, 30)
    return replace(run, **changes)


def test_window_starts_after_warm_up():
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 10) == (48, 6.0)
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 12) == (48, 6.0)
    assert window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 13) == (32, 4.0)
    with pytest.raises(ValueError, match="60 updates leave nothing"):
        window([4, 8, 16, 32], [1.0, 2.0, 4.0, 8.0], 29)


def test_ratio_is_median_of_paired_ratios():
    runs = {"tf": [measured(rate) for rate in (100.0, 300.0, 200.0)], "model.fit": [measured(rate) for rate in (50.0, 60.0, 80.0)]}
    result = compute("tf-fit", ROWS["tf-fit"], runs)
    assert ratios([100.0, 300.0, 200.0], [50.0, 60.0, 80.0]) == [2.0, 5.0, 2.5]
    assert (result.ours, result.peer, result.ratio) == (Spread(200.0, 100.0, 300.0), Spread(60.0, 50.0, 80.0), Spread(2.5, 2.0, 5.0))
    assert result.met is False
    assert compute("tf-fit", replace(ROWS["tf-fit"], target=2.5), runs).met is True


def test_reference_replaces_peer():
    row = Row("tf CNN ×3", Reference(8112, "three machines"), "examples_per_second")
    result = compute("cnn-tf-3", row, {"tf CNN ×3": [measured(examples_per_second=4056.0)]})
    assert (result.ratio, result.met) == (Spread(0.5, 0.5, 0.5), None)
    assert render([result]).splitlines()[1] == (
        "cnn-tf-3: tf CNN ×3 / three machines  examples/s  4,056 [4,056–4,056]  8,112  0.5 [0.5–0.5]       –  –"
    )
    assert json.loads(json.dumps(result.to_json()))["peer"]["median"] == 8112


def test_memory_is_compared_in_state_copies():
    row = ROWS["checkpoint-alexnet-tf-memory"]
    saving = [measured(tree_memory_bytes=3_000, checkpoint_bytes=400, saves=1), measured(tree_memory_bytes=3_100, checkpoint_bytes=400)]
    plain = [measured(tree_memory_bytes=2_600), measured(tree_memory_bytes=2_500)]
    result = compute("memory", row, {row.ours: saving, row.peer: plain})
    assert result.ratio == Spread(1.25, 1.0, 1.5)
    assert result.met is False
    assert "1.25 [1.00–1.50] copies" in render([result])


def test_missing_figure_removes_repeat():
    row = ROWS["alexnet-tf-fp32-data-wait"]
    runs = {row.ours: [measured(data_wait_fraction=0.01), measured(), measured(data_wait_fraction=0.03)]}
    assert compute("wait", row, runs).ours == Spread(0.02, 0.01, 0.03)
    assert compute("wait", row, runs).met is True


def test_upper_bounds_and_rows_without_target():
    slow, quick = measured(first_step_seconds=5.0), measured(first_step_seconds=4.0)
    assert compute("start-tf-1", ROWS["start-tf-1"], {"tf": [slow], "tf fused loop": [quick]}).met is True
    assert compute("start-tf-1", ROWS["start-tf-1"], {"tf": [slow], "tf fused loop": [measured(first_step_seconds=3.9)]}).met is False
    runs = {"tf async ×3": [measured(60.0)], "tf sync ×3": [measured(examples_per_second=1200.0)]}
    result = compute("tf-async-over-sync", ROWS["tf-async-over-sync"], runs)
    assert result.met is None
    assert result.ratio == Spread(0.5, 0.5, 0.5)


def test_failed_run_removes_repeat_and_misses_target():
    runs = {"tf": [measured(300.0), measured(100.0)], "model.fit": [measured(100.0), None]}
    assert compute("tf-fit", ROWS["tf-fit"], runs).ratio == Spread(3.0, 3.0, 3.0)
    empty = compute("tf-fit", ROWS["tf-fit"], {"tf": [None], "model.fit": [measured()]})
    assert (empty.ours, empty.met, empty.repeats) == (None, False, 0)
    assert "no figures" in render([empty])


def test_table_layout():
    runs = {"tf": [measured(23456.0), measured(21000.0)], "model.fit": [measured(6360.0), measured(6000.0)]}
    watched = [measured(monitor_cores=0.0042)]
    results = [compute("tf-fit", ROWS["tf-fit"], runs), compute("monitor-cpu-tf-1", ROWS["monitor-cpu-tf-1"], {"tf, watched": watched})]
    assert render(results).splitlines() == [
        "row                            unit                       ours                 peer             ratio  target  met",
        "tf-fit: tf / model.fit         steps/s  22,228 [21,000–23,456]  6,180 [6,000–6,360]  3.59 [3.50–3.69]     ≥ 3  yes",
        "monitor-cpu-tf-1: tf, watched  cores    0.0042 [0.0042–0.0042]                    –                 –  ≤ 0.01  yes",
    ]


def test_peer_with_other_work_is_detected_by_losses():
    ours = measured()
    assert differs(ours, measured(losses=ours.losses[:20]), "each", 1e-4, 1e-3) is None
    changed_losses = (*ours.losses[:7], ours.losses[7] * 1.01, *ours.losses[8:20])
    assert "at update 7" in differs(ours, measured(losses=changed_losses), "each", 1e-4, 1e-3)
    assert differs(ours, measured(mean_loss=ours.mean_loss * 1.0005), "each", 1e-4, 1e-3) is None
    assert "mean loss" in differs(ours, measured(mean_loss=ours.mean_loss * 1.01), "each", 1e-4, 1e-3)
    assert differs(ours, measured(mean_loss=ours.mean_loss * 1.01), "level", 1e-4, 1e-3) is None
    assert "mean loss" in differs(ours, measured(mean_loss=ours.mean_loss * 1.2), "level", 1e-4, 1e-3)
    assert "mean loss" in differs(ours, measured(mean_loss=float("nan")), "level", 1e-4, 1e-3)
    assert "did not take" in differs(ours, measured(mean_over=31), "each", 1e-4, 1e-3)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_peer_has_readable_file_and_match(name):
    contestant = CONTESTANTS[name]
    if isinstance(contestant, Ours):
        return
    module = ast.parse(contestant.path.read_text(encoding="utf-8"))
    assert ast.get_docstring(module)
    match = CONTESTANTS[contestant.like]
    assert isinstance(match, Ours)
    assert (match.scene, match.nodes) == (contestant.scene, contestant.workers)
    assert contestant.steps <= match.steps


def test_rows_and_peer_files_correspond():
    used = {name for row in ROWS.values() for name in row.contestants}
    assert used == set(CONTESTANTS)
    scripts = {contestant.path for contestant in CONTESTANTS.values() if isinstance(contestant, Peer)}
    assert scripts == {path for path in PEERS.rglob("*.py") if path.name not in ("workload.py", "text_batches.py", "decoding_sentences.py")}
    for script in scripts:  # imports come from its folder, or from the shared one
        imported = {node.module for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)}
        assert imported & {path.stem for path in PEERS.rglob("*.py")} <= {
            path.stem for path in (*PEERS.glob("*.py"), *script.parent.glob("*.py"))
        }
    for row in ROWS.values():
        assert isinstance(CONTESTANTS[row.ours], Ours)
        contestants = [CONTESTANTS[name] for name in row.contestants]
        assert len({contestant.scene for contestant in contestants}) == 1
        assert len({contestant.gpu for contestant in contestants}) == 1
        assert row.relation == "ratio" or contestants[0].checkpoint_seconds is not None
        assert row.figure in UNITS


def test_quick_pass_keeps_runs_comparable():
    loop = CONTESTANTS["torch AlexNet fp32 loop"]
    assert [steps_of(loop, work_of(loop), shorter) for shorter in (1, 10)] == [12, 6]
    assert steps_of(CONTESTANTS["tf"], work_of(CONTESTANTS["tf"]), 10) == 6000
    assert work_of(CONTESTANTS["tf AlexNet bf16 loop"]) == CONTESTANTS["tf AlexNet bf16"].work


def test_peer_adds_its_comparison_run():
    assert needed(["torch-lightning"]) == ["torch", "Lightning"]
    assert needed(["start-tf-1", "tf-fit"]) == ["tf", "tf fused loop", "model.fit"]


def test_launch_variables_name_every_process_once():
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


def test_contestants_inherit_no_settings(monkeypatch):
    steering = {"TRAINER_LR": "9", "OMP_NUM_THREADS": "1", "TF_CONFIG": "{}", "RANK": "3", "TRAINER_DATA_CACHE": "/data"}
    for name, value in steering.items():
        monkeypatch.setenv(name, value)
    variables = environment({"RANK": "0"})
    assert {name: variables.get(name) for name in steering} == {
        "TRAINER_LR": None,
        "OMP_NUM_THREADS": None,
        "TF_CONFIG": None,
        "RANK": "0",
        "TRAINER_DATA_CACHE": "/data",
    }


def test_wait_reports_failed_process(tmp_path):
    with Group(tmp_path) as group:
        group.start("leader", [sys.executable, "-c", "import time; time.sleep(60)"], environment({}))
        group.start("other", [sys.executable, "-c", "raise SystemExit('no such port')"], environment({}))
        with pytest.raises(MeasurementError, match="other ended with code 1\n    no such port"):
            group.wait_for("leader", 30.0)
        leader = dict(group._processes)["leader"]
        assert leader.poll() is None
    assert leader.returncode is not None


MEASURE_PEAKS = """
import json, sys
from pathlib import Path
from benchmarks.processes import Group, environment

child = "import time; block = bytearray(150 * 2**20); time.sleep(1.5)"
parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
with Group(Path(sys.argv[1])) as group:
    group.start("leader", [sys.executable, "-c", parent], environment({}))
    group.wait_for("leader", 30.0)
    print(json.dumps([group.peak_bytes("leader"), group.tree_bytes("leader")]))
"""


def test_peak_is_largest_process_and_tree_is_sum(tmp_path):
    """In a separate process, since the kernel passes a parent's peak on to its children."""
    command = [sys.executable, "-c", MEASURE_PEAKS, str(tmp_path)]
    peak, tree = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert 150 * 2**20 < peak < 250 * 2**20
    assert peak < tree < peak + 60 * 2**20
    assert peak_bytes(2**22 + 1) == 0


def write_run(path, *, events=(), **changes):
    records = [{"step": step, "count": 2, "time_seconds": 10.0 + step, "losses": [2.0, 2.0]} for step in (0, 2, 4)]
    summary = {"steps": 6, "state": "succeeded", "init_seconds": 3.0, "examples": 60, "per_node": [{"monitor_cpu_cores_used": None}]}
    steps = [{"data_seconds": data, "step_seconds": 5.0} for data in (0.05, 0.1)]
    summary |= {"train_seconds": 5.0, "time_shares": {"workers": steps}, "time_to_target_seconds": None, **changes}
    (path / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "job.json").write_text(json.dumps({"threads_per_task": [2]}))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def saved(time_seconds, stall_seconds):
    detail = {"path": "step-000000004", "step": 4, "bytes": 1000, "seconds": 0.5, "stall_seconds": stall_seconds}
    return {"event": "checkpoint_saved", "time_seconds": time_seconds, "detail": detail}


def test_saves_count_while_clock_runs(tmp_path):
    write_run(tmp_path, events=[saved(9.0, 0.9), saved(13.0, 0.02), saved(14.0, 0.03), saved(15.0, 0.8)])
    run = read_run(tmp_path, 2)
    assert (run.saves, run.stall_seconds, run.checkpoint_bytes, run.data_wait_fraction) == (2, 0.03, 1000, 0.02)
    write_run(tmp_path, time_shares=None)
    run = read_run(tmp_path, 2)
    assert (run.saves, run.stall_seconds, run.checkpoint_bytes, run.data_wait_fraction) == (0, None, None, None)


def test_save_cost_is_prolonged_time():
    """Updates of 1 s; saves prolong one result by 0.5 s and two by 0.3 s in all."""
    lasting = [9.0] * 5 + [1.0] * 12 + [1.5] + [1.0, 2.0] * 6 + [1.2, 2.1] + [1.0] * 12
    counts = [0, *([1] * 18), *([1, 2] * 6), 1, 2, *([1] * 12)]
    ends = [0.0, *np.cumsum(lasting).tolist()]
    saves = [(ends[17] + 0.1, ends[17] + 0.9), (ends[30] + 0.6, ends[30] + 1.7)]
    assert save_costs(counts, ends, saves) == pytest.approx([0.5, 0.3])
    assert save_costs(counts, ends, []) == []
    assert save_costs([0, 1, 1], [0.0, 1.0, 2.0], [(0.0, 2.0)]) == []


def test_failed_save_and_short_run_have_no_figures(tmp_path):
    write_run(tmp_path, events=[{"event": "checkpoint_failed", "time_seconds": 12.0, "detail": {"message": "No space left on device"}}])
    with pytest.raises(MeasurementError, match="No space left"):
        read_run(tmp_path, 2)
    write_run(tmp_path)
    with pytest.raises(MeasurementError, match="6 updates leave nothing"):
        read_run(tmp_path, 5)


def test_rows_are_chosen_by_group_name_and_pattern(capsys):
    assert main_rows("--group", "logreg") == list(GROUPS["logreg"])
    assert main_rows("--only", "alexnet-torch-bf16*", "tf-fit") == [
        "alexnet-torch-bf16",
        "alexnet-torch-bf16-memory",
        "alexnet-torch-bf16-data-wait",
        "alexnet-torch-bf16-over-fp32",
        "tf-fit",
    ]
    without_gpu = (group for group in GROUPS if group != "gpu")
    assert main_rows() == list(dict.fromkeys(row for group in without_gpu for row in GROUPS[group]))
    assert main_rows("--group", "exchange", "logreg").count("tf-sync-3") == 1
    assert "no GPU that torch finds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main_rows("--only", "alexnet-trch-bf16")
    assert "did you mean 'alexnet-torch-bf16'?" in capsys.readouterr().err


def main_rows(*arguments):
    return chosen_rows(parse(list(arguments)), gpu=False)


def test_figures_come_from_run_directory(tmp_path):
    records = [
        {"step": 0, "count": 2, "time_seconds": 0.5, "losses": [4.0, 3.0]},
        {"step": 4, "count": 2, "time_seconds": 1.0, "losses": [1.0, 1.0]},
        {"step": 2, "count": 2, "time_seconds": 2.0, "losses": [2.0, 2.0]},
    ]
    nodes = [{"monitor_cpu_cores_used": 0.002}, {"monitor_cpu_cores_used": 0.004}]
    summary = {"steps": 6, "state": "succeeded", "init_seconds": 3.0, "examples": 60, "per_node": nodes}
    summary |= {"train_seconds": 5.0, "time_shares": None, "time_to_target_seconds": 1.75}
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "job.json").write_text(json.dumps({"threads_per_task": [1, 1]}))
    run = read_run(tmp_path, 2)
    assert (run.steps_per_second, run.examples_per_second, run.first_step_seconds) == (4 / 1.5, 40 / 1.5, 3.5)
    assert run.losses == (4.0, 3.0, 2.0, 2.0, 1.0, 1.0)
    assert (run.mean_loss, run.mean_over, run.monitor_cores) == (1.5, 4, 0.004)
    assert (run.data_wait_fraction, run.time_to_target_seconds) == (None, 1.75)
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "state": "failed"}))
    with pytest.raises(MeasurementError, match="has not finished"):
        read_run(tmp_path, 2)


HOLD = """
import sys, time
from pathlib import Path
from benchmarks.processes import Group
with Group(Path(sys.argv[1])) as group:
    group.start("child", [sys.executable, "-c", "import time; time.sleep(600)"], {})
    print(group._processes[0][1].pid, flush=True)
    time.sleep(600)
"""


def test_measured_processes_end_with_killed_benchmark(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert not psutil.wait_procs([child], timeout=10)[1]
