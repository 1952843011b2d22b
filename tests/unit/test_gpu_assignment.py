"""Assignment of one GPU per worker: order, refusals, and the table of hosts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.base import parameter_server_placement, ranks_placement
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.engine.protocol.node_messages import Prepare
from crosstrain.launch.driver.cluster_setup import HIDDEN, GpuAssignment, assign_gpus, check_devices
from crosstrain.launch.node.scratch import expected_gpus, task_environment
from crosstrain.launch.preflight.findings import NodeGpus, described_gpus, gpu_findings, plan_gpus, requested_device
from crosstrain.launch.preflight.interview import HostReport
from crosstrain.monitor.gpu import VisibleGpu

H100 = "NVIDIA H100 80GB HBM3"


def gpus(machine, *numbers):
    return [VisibleGpu(str(number), f"GPU-{machine}-{number}", number) for number in numbers]


def host(machine, *numbers, total=None, **more):
    """Return a node's description, whose processes may use the GPUs with these numbers."""
    count = total if total is not None else len(numbers)
    described = {
        "gpus": [{"name": H100, "memory_total_bytes": 85_520_809_984, "uuid": f"GPU-{machine}-{number}"} for number in range(count)]
        or None,
        "gpu_driver": "580.65.06" if count else None,
        "gpu_problem": None,
        "visible_gpus": [{"visible_as": str(number), "uuid": f"GPU-{machine}-{number}", "gpu": number} for number in numbers],
    }
    return {**described, "identity": {"boot": machine, "network": "n"}, **more}


def assigned(hosts, device="auto", mode="sync", places=None, **job):
    job_of_run = Job(backend="torch", mode=mode, nodes=len(hosts), **job)
    placed = ranks_placement(job_of_run) if mode == "sync" else parameter_server_placement(job_of_run, chief_is_first_ps=False)
    return assign_gpus(device, placed, places or range(len(hosts)), hosts, "node {}".format)


def shown(assignment):
    return {name: gpu.visible_as for name, gpu in assignment.of_task.items()}


def test_each_worker_gets_a_gpu_in_node_order():
    """Different numbers of workers per node, and GPUs in another order."""
    assignment = assigned([host("a", 0), host("b", 3, 1, 2)], "gpu", procs_per_node=(1, 2))
    assert shown(assignment) == {"worker-0": "0", "worker-1": "3", "worker-2": "1"}
    assert assignment.document == {
        "gpu_of_task": {
            "worker-0": {"visible_as": "0", "uuid": "GPU-a-0", "gpu": 0},
            "worker-1": {"visible_as": "3", "uuid": "GPU-b-3", "gpu": 3},
            "worker-2": {"visible_as": "1", "uuid": "GPU-b-1", "gpu": 1},
        }
    }
    assert set(assignment.on_node(1, ranks_placement(Job(nodes=2, procs_per_node=(1, 2))))) == {"worker-1", "worker-2"}


def test_nodes_of_one_machine_divide_its_gpus():
    assignment = assigned([host("a", 0, 1, 2, 3)] * 2, procs_per_node=2)
    assert shown(assignment) == {"worker-0": "0", "worker-1": "1", "worker-2": "2", "worker-3": "3"}


def test_containers_with_separate_gpus_have_equal_numbers():
    both = [{**host("a", 0), "visible_gpus": [{"visible_as": "0", "uuid": uuid, "gpu": 0}]} for uuid in ("GPU-x", "GPU-y")]
    assert shown(assigned(both, "gpu")) == {"worker-0": "0", "worker-1": "0"}


def test_tasks_without_computation_see_no_gpu():
    assignment = assigned([host("a", 0), host("b", 0)], mode="async", ps=2)
    assert shown(assignment) == {"chief-0": "-1", "ps-0": "-1", "ps-1": "-1", "worker-0": "0", "worker-1": "0"}
    assert assignment.document["gpu_of_task"]["ps-0"] is None


def test_device_cpu_hides_gpus_and_records_nothing():
    assignment = assigned([host("a", 0, 1)], "cpu")
    assert (shown(assignment), assignment.document, assignment.notice) == ({"worker-0": "-1"}, {}, None)


def test_node_with_no_or_unknown_gpus_is_unchanged():
    for visible in ([], None):
        for device in ("auto", "cpu"):
            assignment = assigned([{**host("a"), "visible_gpus": visible}], device)
            assert (assignment.of_task, assignment.document, assignment.notice) == ({}, {}, None)
    assert assigned([{**host("a"), "visible_gpus": None}], "gpu").of_task == {}


@pytest.mark.parametrize(
    ("hosts", "job", "lines"),
    [
        ([host("a", 0, 1), host("b", 0)], {"procs_per_node": 2}, ["  node 1: 2 workers, 1 GPU"]),
        ([host("a"), host("b", 0), host("c")], {}, ["  node 0: 1 worker, no GPU", "  node 2: 1 worker, no GPU"]),
        ([host("a", 0)] * 2, {}, ["  node 1: 1 worker, no GPU (1 on this machine, which other nodes of the run have too)"]),
        ([host("a", 1, total=4)], {"procs_per_node": 3}, ["  node 0: 3 workers, 1 GPU"]),
    ],
)
def test_too_few_gpus_are_refused_with_the_nodes(hosts, job, lines):
    with pytest.raises(UsageError) as refused:
        assigned(hosts, "gpu", **job)
    message_lines = str(refused.value).splitlines()
    assert message_lines[0].startswith("device: got 'gpu', which takes a GPU for each worker")
    assert message_lines[1:-1] == lines
    assert "--procs-per-node" in message_lines[-1]


def test_auto_takes_device_of_all_machines():
    assert set(shown(assigned([host("a", 0), host("b", 0)])).values()) == {"0"}
    with pytest.raises(UsageError, match=r"^device: got 'auto', and these nodes .* are not comparable:\n  node 1: 1 worker, no GPU\n"):
        assigned([host("a", 0), host("b")])
    few = assigned([host("a", 0), host("b", 0)], procs_per_node=2)
    assert set(shown(few).values()) == {"-1"}
    assert few.notice == "computing on CPUs, as there is no GPU for each worker (node 0: 2 workers, 1 GPU; node 1: 2 workers, 1 GPU)"
    assert assigned([host("a", 0)] * 3).notice is not None  # three virtual nodes on a machine with one GPU


def test_containers_that_see_other_gpus_are_separate():
    with pytest.raises(UsageError, match="node 1: 1 worker, no GPU\n"):
        assigned([host("a", 0), host("a")])


def test_run_on_some_nodes_uses_their_gpus():
    hosts = [host("a", 0), host("b", 1), host("c", 2)]
    placed = [task for task in ranks_placement(Job(nodes=3)) if task.node != 1]
    assignment = assign_gpus("gpu", placed, [0, 2], hosts, "node {}".format)
    assert shown(assignment) == {"worker-0": "0", "worker-2": "2"}


def test_single_task_leaves_choice_to_framework():
    placed = ranks_placement(Job())
    assert assign_gpus("gpu", placed, [0], [host("a")], "node {}".format, strict=False) == GpuAssignment({})


def test_asked_device_needs_backend_with_gpu_support():
    assert requested_device(Job(backend="torch", device="auto")) == "auto"
    assert requested_device(Job(backend="tf", device="gpu")) == "gpu"


VISIBLE = st.lists(st.integers(0, 7), unique=True, max_size=8)
NODES = st.lists(
    st.builds(
        lambda machine, workers, visible: NodeGpus(machine, workers, None if visible is None else gpus(machine, *visible)),
        st.sampled_from("abc"),
        st.integers(1, 5),
        st.none() | VISIBLE,
    ),
    min_size=1,
    max_size=6,
)


@given(st.sampled_from(["auto", "cpu", "gpu"]), NODES)
def test_gpus_are_unique_and_all_workers_have_one_or_none(device, nodes):
    plan = plan_gpus(device, nodes)
    if plan.refused:
        assert device != "cpu"
        assert plan.short
        return
    assigned_gpus = [(node, mine) for node, mine in zip(nodes, plan.by_node, strict=True) if mine]
    assert max(Counter(gpu.uuid for _, mine in assigned_gpus for gpu in mine).values(), default=1) == 1
    for node, mine in assigned_gpus:
        assert len(mine) == node.workers
        order = [node.visible.index(gpu) for gpu in mine]
        assert order == sorted(order)
    known = [mine for node, mine in zip(nodes, plan.by_node, strict=True) if node.visible]
    assert all(known) or not any(known)
    assert device != "gpu" or all(known)
    assert all(mine is None for node, mine in zip(nodes, plan.by_node, strict=True) if not node.visible)


@given(VISIBLE, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from(["auto", "cpu", "gpu"]))
def test_expected_gpus_equal_assigned_gpus(visible, workers, device):
    """On one machine, and on equal hosts: processes started before the driver decides are used."""
    description = host("a", *visible)
    job = Job(backend="torch", nodes=len(workers), procs_per_node=tuple(workers) if len(workers) > 1 else workers[0], device=device)
    try:
        assignment = shown(assign_gpus(device, ranks_placement(job), range(len(workers)), [description] * len(workers), str))
    except UsageError:
        return
    guessed = []
    for node, count in enumerate(workers):
        guessed += expected_gpus(
            Prepare("{}", device=device, tasks=count, workers_before=sum(workers[:node]), workers_on_machine=sum(workers)),
            description["visible_gpus"],
        )
    assert guessed == [assignment.get(f"worker-{rank}") for rank in range(sum(workers))]


def test_task_environment_has_assigned_gpu(tmp_path):
    variables = {"PATH": "/bin", "TF_CONFIG": "{}", "CUDA_VISIBLE_DEVICES": "3,1", "TRAINER_SECRET": "s"}
    common = {"PATH": "/bin", "TMPDIR": str(tmp_path)}
    assert task_environment(variables, tmp_path, None) == {**common, "CUDA_VISIBLE_DEVICES": "3,1"}
    assert task_environment(variables, tmp_path, "1") == {**common, "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    ordered = {**variables, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert task_environment(ordered, tmp_path, "1")["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"  # the indices follow that order


def test_mixed_devices_are_refused_and_unused_gpus_noted():
    assignment = GpuAssignment({"worker-0": VisibleGpu("0", "u", 0), "worker-1": VisibleGpu("1", "v", 1)})
    assert check_devices({"worker-0": "gpu", "worker-1": "gpu"}, assignment, "") == ("gpu", None)
    assert check_devices({"worker-0": None}, assignment, "") == (None, None)
    assert check_devices({"worker-0": "cpu"}, GpuAssignment({"worker-0": HIDDEN}), "") == ("cpu", None)
    device, notice = check_devices({"worker-0": "cpu", "worker-1": "cpu"}, assignment, "build it anew")
    assert (device, notice) == ("cpu", "computing on CPUs although each worker has a GPU (2 GPUs): the framework finds none: build it anew")
    with pytest.raises(UsageError, match=r"device: got 'auto', and workers .* \(worker-0 gpu, worker-1 cpu\)"):
        check_devices({"worker-0": "gpu", "worker-1": "cpu"}, assignment, "")


def rows(hosts, device=None, workers=()):
    reports = [HostReport("node", described={"identity": description["identity"], "host": description}) for description in hosts]
    return [[(row.state, row.found) for row in findings] for findings in gpu_findings(reports, device, workers)]


def test_table_of_hosts_shows_gpus():
    first, second = host("a", 0), host("b", 1, total=2)
    has_one, has_two = f"1 × {H100} (79.6 GiB), driver 580.65.06", f"2 × {H100} (79.6 GiB), driver 580.65.06"
    limited = f"{has_two}; its processes may use 1 (CUDA_VISIBLE_DEVICES, MIG)"
    assert rows([first, second]) == [[("ok", has_one)], [("ok", limited)]]
    assert rows([first, second], "gpu", [1, 1]) == [[("ok", has_one)], [("ok", limited)]]
    assert rows([first, second], "gpu", [1, 2]) == [[("ok", has_one)], [("bad", f"2 workers, 1 GPU ({limited})")]]
    mixed = rows([first, host("c")], "auto", [1, 1])
    assert mixed[0] == [("ok", has_one)]
    assert mixed[1][0][0] == "bad"
    assert mixed[1][0][1].startswith("1 worker, no GPU (no NVIDIA GPU); others have one for each")
    assert rows([first, second], "auto", [2, 2]) == [
        [("odd", "2 workers, 1 GPU: computing on CPUs")],
        [("odd", "2 workers, 1 GPU: computing on CPUs")],
    ]


def test_hosts_without_gpus_have_row_only_if_requested():
    assert rows([host("a"), host("b")]) == rows([host("a"), host("b")], "auto", [1, 1]) == [[], []]
    assert rows([host("a")], "gpu", [1]) == [[("bad", "1 worker, no GPU (no NVIDIA GPU)")]]


def test_unreadable_gpus_are_reported():
    problem = host("a", gpu_problem="the NVIDIA driver does not answer", visible_gpus=None)
    assert rows([problem]) == [[("odd", "the NVIDIA driver does not answer"), ("ok", "not known")]]
    assert described_gpus({"gpus": None, "visible_gpus": [{}, {}]}) == "2 NVIDIA GPUs"
