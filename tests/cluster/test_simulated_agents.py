"""Twenty nodes with simulated agents: the driver handles them like real ones."""

import pytest

from benchmarks.simulated_agents.__main__ import table
from benchmarks.simulated_agents.measured_run import measure
from benchmarks.simulated_agents.reading import extend
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import SystemRecord

pytestmark = pytest.mark.cluster

NODES = 20


@pytest.mark.thorough
def test_twenty_simulated_nodes_join_train_and_end(tmp_path):
    measured = measure(NODES, 3.0, 2, tmp_path)
    print(table([measured]))
    assert measured.exit_code == 0
    assert measured.driver_cores < 0.5
    run = RunReader(measured.run)
    summary = run.summary()
    assert (summary["state"], summary["nodes"], summary["steps"]) == ("succeeded", NODES, 120)
    assert [host["hostname"] for host in run.environment()["nodes"]][1:] == [f"simulated-{node:04}" for node in range(1, NODES)]
    assert all(node["samples"] >= 1 and node["train_seconds"] > 2.5 for node in summary["per_node"])
    assert summary["samples_thinned"] is None
    used = [node["cpu_cores_used"]["mean"] for node in summary["per_node"][1:]]
    assert all(0.7 < cores < 1.1 for cores in used)
    ended = {event.detail["task"]: event.detail["code"] for event in run.events() if event.event == "task_ended"}
    assert ended == {f"worker-{node}": 0 for node in range(NODES)}
    assert len(run.calibration()["workers"]) == NODES
    logs = [(run.path / f"logs/{node}/worker-{node}.log").read_text() for node in range(1, NODES)]
    assert all("ready" in log for log in logs)
    extend(run.path, 60.0)
    samples = [record for record in run.system() if isinstance(record, SystemRecord)]
    assert 55.0 < samples[-1].time_seconds < 65.0
