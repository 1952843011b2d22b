"""Process ranks and nodes from torchrun, TF_CONFIG and --rendezvous."""

import itertools
import json
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.launch.launchers.environments import detect, refuse_step
from crosstrain.launch.launchers.host_list import parse_hosts
from crosstrain.launch.node.scratch import PortBlock

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
WORLD = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
IT_IS = shlex.quote("it's")
CLUSTER = {"chief": ["a:1000"], "worker": ["a:1001", "b:1000", "c:1000"], "ps": ["a:1002", "b:1001"]}


def tf_config(role, index, cluster=None):
    return {"TF_CONFIG": json.dumps({"cluster": cluster or CLUSTER, "task": {"type": role, "index": index}})}


def test_empty_environment_has_no_contract():
    assert detect({}, None, None, 3) is None


def test_torchrun():
    place = detect(TORCHRUN, None, None, 1)
    assert (place.node, place.local_rank, place.is_driver) == (2, 1, False)
    assert place.shape == {"nodes": 3, "procs_per_node": 2}
    assert place.standbys == 3
    assert place.rendezvous[0] == "10.0.0.1"
    assert 29501 in place.rendezvous[1]
    assert 29500 not in place.rendezvous[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "six"}, "RANK"),
        ({"RANK": "6"}, "RANK"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK 0"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
    ],
)
def test_invalid_torchrun_variables_are_refused(change, named):
    with pytest.raises(UsageError, match=named):
        detect(TORCHRUN | change, None, None, 1)


def test_rank_variables_mean_one_process_per_node():
    places = [detect(WORLD | {"RANK": str(rank)}, None, None, 1) for rank in range(6)]
    assert [(place.node, place.local_rank, place.is_driver) for place in places] == [(rank, 0, rank == 0) for rank in range(6)]
    assert {place.rendezvous for place in places} == {("10.0.0.1", (29500,))}
    assert all(place.shape == {"nodes": 6, "procs_per_node": 1} and place.standbys == 0 for place in places)


@pytest.mark.thorough
@given(nodes=st.integers(1, 40), procs=st.integers(1, 40))
def test_rank_variables_with_several_processes_per_node(nodes, procs):
    """Places are unique, and all describe the same whole."""
    size = nodes * procs
    places = [detect(WORLD | {"WORLD_SIZE": str(size), "RANK": str(rank)}, None, None, 1, procs) for rank in range(size)]
    if size == 1:
        assert places == [None]  # the only process
        return
    assert [(place.node, place.local_rank) for place in places] == list(itertools.product(range(nodes), range(procs)))
    assert all(place.shape == {"nodes": nodes, "procs_per_node": procs} and place.standbys == size - nodes for place in places)


@given(present=st.sets(st.sampled_from(sorted(TORCHRUN)), min_size=1))
def test_incomplete_variables_are_refused_with_missing_ones(present):
    environment = {name: TORCHRUN[name] for name in present}
    if present in ({*WORLD}, {*TORCHRUN}):
        assert detect(environment, None, None, 1)
        return
    needed = {*TORCHRUN} if present - {*WORLD} else {*WORLD}
    with pytest.raises(UsageError) as caught:
        detect(environment, None, None, 1)
    has, _, missing = str(caught.value).partition("but not")
    assert {*re.findall(r"[A-Z]+_?[A-Z_]+", has)} & {*TORCHRUN} == present
    assert {*re.findall(r"[A-Z]+_?[A-Z_]+", missing)} & {*TORCHRUN} == needed - present


@pytest.mark.parametrize(
    ("change", "procs", "named"),
    [
        ({"RANK": "6"}, 1, "RANK 6"),
        ({"RANK": "-1"}, 1, "RANK -1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, 1, "WORLD_SIZE 0"),
        ({"WORLD_SIZE": "many"}, 1, "WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, 1, "MASTER_PORT"),
        ({"MASTER_ADDR": " "}, 1, "but not MASTER_ADDR"),
        ({}, 4, "--procs-per-node: got 4, but WORLD_SIZE is 6"),
    ],
)
def test_invalid_rank_variables_are_refused(change, procs, named):
    with pytest.raises(UsageError, match=named):
        detect(WORLD | change, None, None, 1, procs)


@pytest.mark.parametrize(
    ("environment", "host", "shape"),
    [
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "gpu[03-06]"}, "gpu03", "--nodes 4"),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a1,b[2-3]"}, "a1", "--nodes 2 --procs-per-node 2"),
        ({"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "rack[1-2]n[3,5]x"}, "rack1n3x", "--nodes 1 --procs-per-node 4"),
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "r[1-2]n[01-02]", "SLURM_JOB_NODELIST": "x"}, "r1n01", "--nodes 4"),
        ({"SLURM_STEP_NODELIST": "(null)", "SLURM_JOB_NODELIST": "x[09-10]"}, "x09", "--nodes 4"),
        ({}, "HOST-OF-NODE-0", "--nodes 4"),
    ],
)
def test_slurm_step_is_refused_with_command(environment, host, shape):
    with pytest.raises(UsageError) as caught:
        refuse_step({"SLURM_STEP_NUM_TASKS": "4", **environment}, ["run", "--data", "it's"], parse_hosts)
    suggested = shlex.split(str(caught.value).partition("type: ")[2].partition(", with")[0])
    assert suggested[:2] == ["srun", "--nodes"]
    assert suggested[-3:-1] == ["bash", "-c"]
    assert suggested[-1] == f"trainer run --data {IT_IS} {shape} --rendezvous {host}:29400 --node-rank $SLURM_NODEID"


@pytest.mark.parametrize("repeats", [["--repeats", "3"], ["--repeats=3"]])
def test_repeats_in_slurm_step_suggest_single_task(repeats):
    """A rendezvous does not support repeats."""
    with pytest.raises(UsageError) as caught:
        refuse_step({"SLURM_STEP_NUM_TASKS": "4"}, ["run", "--data", "it's", *repeats], parse_hosts)
    suggested = shlex.split(str(caught.value).partition("type: ")[2])
    assert suggested == ["srun", "--ntasks", "1", "trainer", "run", "--data", "it's", *repeats]


@pytest.mark.parametrize("environment", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}])
def test_single_slurm_tasks_are_accepted(environment):
    refuse_step(environment, ["run"], parse_hosts)


def test_tf_config_async():
    places = [detect(tf_config(role, index), None, None, 1) for role, addresses in CLUSTER.items() for index in range(len(addresses))]
    assert [(place.node, place.local_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]
    assert places[0].shape == {"nodes": 3, "procs_per_node": 1, "ps": 2}
    assert places[0].addresses == ("a", "b", "c")
    assert places[0].standbys == 3
    assert places[0].ports == {"chief-0": 1000, "worker-0": 1001, "worker-1": 1000, "worker-2": 1000, "ps-0": 1002, "ps-1": 1001}
    assert all(port > 1002 for port in places[0].rendezvous[1])


def test_tf_config_without_ps_makes_chief_rank_0():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    place = detect(tf_config("worker", 1, cluster), None, None, 1)
    assert (place.node, place.shape) == (2, {"nodes": 3, "procs_per_node": 1})
    assert place.ports == {"worker-0": 1, "worker-1": 1, "worker-2": 1}


@pytest.mark.parametrize(
    "environment",
    [
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": "[]"},
        {"TF_CONFIG": "{}"},
        tf_config("worker", float("inf")),
        tf_config("worker", 0, {"worker": ["a:70000"]}),
        tf_config("worker", 0, {"worker": ["no port"]}),
        tf_config("worker", 0, {"worker": ["a:1"], "evaluator": ["a:2"]}),
        tf_config("worker", 0, {"worker": ["a:1"], "ps": ["b:1"]}),
    ],
)
def test_invalid_tf_config_is_refused(environment):
    with pytest.raises(UsageError, match="TF_CONFIG"):
        detect(environment, None, None, 1)


@pytest.mark.parametrize(
    ("role", "index", "cluster"),
    [("worker", 7, None), ("worker", -1, None), ("chief", 1, None), ("ps", 2, None), ("worker", 0, {"chief": ["a:1"]}), ("x", 0, None)],
)
def test_tf_config_task_outside_cluster_is_refused(role, index, cluster):
    with pytest.raises(UsageError) as caught:
        detect(tf_config(role, index, cluster), None, None, 1)
    existing = "chief 0" if cluster else "chief 0, worker 0 to 2, ps 0 to 1"
    assert str(caught.value) == f"TF_CONFIG: this process is to be {role} {index}, but the cluster has {existing}; mend task or cluster"


def test_rendezvous():
    place = detect({}, "10.0.0.1:29400", 2, 3)
    assert (place.node, place.local_rank, place.rendezvous, place.standbys) == (2, 0, ("10.0.0.1", (29400,)), 0)
    assert detect({}, "10.0.0.1:29400", 0, 3).is_driver
    assert detect({}, "10.0.0.1:29400", 7, None).shape == {}  # only the driver knows how many there are


@pytest.mark.parametrize(
    ("rendezvous", "rank"), [("10.0.0.1:29400", None), (None, 0), ("10.0.0.1", 0), ("h:99999", 0), ("h:1", 3), ("h:1", -1)]
)
def test_invalid_rendezvous_is_refused(rendezvous, rank):
    with pytest.raises(UsageError):
        detect({}, rendezvous, rank, 3)


def test_node_rank_without_nodes_is_refused():
    with pytest.raises(UsageError, match=r"--node-rank: got '1'; allowed: 0, as the run has one node; give --nodes on each of them"):
        detect({}, "h:1", 1, 1)


def test_ports_of_two_blocks_never_overlap():
    first, second = PortBlock(), PortBlock()
    try:
        ours, theirs = first.take(10), second.take(10)
        assert len({*ours, *theirs}) == 20
        assert not set(first.take(5)) & {*ours}
    finally:
        first.release()
        second.release()


def test_port_in_use_is_skipped():
    import socket

    block = PortBlock()
    try:
        (port,) = block.take(1)
        with socket.create_server(("", port + 1)):
            assert port + 1 not in block.take(3)
    finally:
        block.release()


def test_indexed_job_pod_has_index_and_rendezvous():
    places = [detect({"JOB_COMPLETION_INDEX": str(index)}, "mine-0.mine:29400", None, 3) for index in range(3)]
    assert [(place.node, place.local_rank, place.is_driver) for place in places] == [(node, 0, node == 0) for node in range(3)]
    assert {place.rendezvous for place in places} == {("mine-0.mine", (29400,))}
    assert all(place.shape == {"nodes": 3} and place.starts_again and place.loss_exit_code == 75 for place in places)


def test_indexed_job_without_a_rendezvous_is_an_array_of_runs():
    assert detect({"JOB_COMPLETION_INDEX": "1"}, None, None, 3) is None


def test_node_rank_option_overrides_index():
    place = detect({"JOB_COMPLETION_INDEX": "1"}, "a:29400", 2, 3)
    assert (place.contract, place.node, place.starts_again, place.loss_exit_code) == ("--rendezvous", 2, False, 1)


@pytest.mark.parametrize("index", ["3", "-1", "one"])
def test_invalid_index_is_refused(index):
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX: got"):
        detect({"JOB_COMPLETION_INDEX": index}, "a:29400", None, 3)


def train_job(rank, **more):
    """Return the variables of Kubeflow Trainer 2 in pods of a TrainJob with a torch policy.

    JobSet's Job adds more.
    """
    pet = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(rank)}
    return {**pet, "PET_MASTER_ADDR": "mine-node-0-0.mine", "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": str(rank), **more}


def pytorch_job(rank, nproc="auto", **more):
    """Return the training operator's variables in pods of a PyTorchJob, in its last releases.

    The job has a master and two workers.
    """
    size = 3 * (int(nproc) if nproc.isdecimal() else 1)
    master = {"MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "mine-master-0", "PET_MASTER_ADDR": "mine-master-0"}
    pet = {"PET_NPROC_PER_NODE": nproc, "PET_NODE_RANK": str(rank), "PET_NNODES": "3"}
    return {"PYTHONUNBUFFERED": "0", **master, "WORLD_SIZE": str(size), "RANK": str(rank), **pet, **more}


def test_train_job_has_one_node_per_pod():
    places = [detect(train_job(rank), None, None, 1) for rank in range(3)]
    assert [(place.node, place.local_rank, place.starts_again) for place in places] == [(rank, 0, True) for rank in range(3)]
    assert {place.rendezvous for place in places} == {("mine-node-0-0.mine", (29400,))}
    assert all(place.shape == {"nodes": 3, "procs_per_node": 2} and place.standbys == 0 for place in places)


@pytest.mark.parametrize(("nproc", "shape"), [("auto", {"nodes": 3}), ("gpu", {"nodes": 3}), ("2", {"nodes": 3, "procs_per_node": 2})])
def test_pytorch_job_has_one_node_per_pod_with_processes(nproc, shape):
    """RANK is the pod's, also where WORLD_SIZE counts several processes in each."""
    places = [detect(pytorch_job(rank, nproc), None, None, 1) for rank in range(3)]
    assert [(place.node, place.local_rank, place.standbys) for place in places] == [(rank, 0, 0) for rank in range(3)]
    assert all(place.shape == shape and place.rendezvous == ("mine-master-0", (23456,)) for place in places)


def test_early_pytorch_job_has_only_rank_variables():
    early = [{key: value for key, value in pytorch_job(rank).items() if not key.startswith("PET_")} for rank in range(3)]
    places = [detect(variables, None, None, 1) for variables in early]
    assert [(place.contract, place.node) for place in places] == [("WORLD_SIZE", rank) for rank in range(3)]
    assert all(place.rendezvous == ("mine-master-0", (23456,)) for place in places)


def test_torchrun_overrides_kubeflow():
    assert detect(train_job(1) | TORCHRUN, None, None, 1).contract == "torchrun"


def test_kubeflow_job_of_one_pod_has_no_contract():
    assert detect(train_job(0, PET_NNODES="1"), None, None, 1) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"PET_NNODES": "1:3"}, "PET_NNODES: got '1:3'; allowed: one number of nodes"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK 3 and PET_NNODES 3 do not fit"),
        ({"PET_NPROC_PER_NODE": "some"}, "PET_NPROC_PER_NODE: got 'some'"),
        ({"PET_MASTER_PORT": "0"}, "PET_MASTER_PORT: got '0'"),
    ],
)
def test_invalid_kubeflow_variables_are_refused(change, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        detect(train_job(1, **change), None, None, 1)


def tf_job(role, index, **tasks):
    """Return the training operator's variables in pods of a TFJob.

    They hold names of headless Services, one per pod, and an obsolete field.
    """
    cluster = {kind: [f"mine-{kind}-{number}.ml.svc:2222" for number in range(count)] for kind, count in tasks.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})}


def test_tf_job_of_workers_has_one_node_per_pod():
    places = [detect(tf_job("worker", index, worker=3), None, None, 1) for index in range(3)]
    assert [(place.node, place.local_rank, place.standbys) for place in places] == [(node, 0, 0) for node in range(3)]
    assert places[1].addresses == tuple(f"mine-worker-{number}.ml.svc" for number in range(3))
    assert places[1].shape == {"nodes": 3, "procs_per_node": 1}
    assert 2222 not in places[1].rendezvous[1]


def test_tf_job_with_a_chief_counts_it_as_a_node():
    places = [detect(tf_job(role, index, chief=1, worker=2), None, None, 1) for role, index in [("chief", 0), ("worker", 0), ("worker", 1)]]
    assert [place.node for place in places] == [0, 1, 2]


def test_tf_job_with_other_pods_than_workers_is_refused():
    with pytest.raises(UsageError, match="have workers alone: with --mode async"):
        detect(tf_job("ps", 0, chief=1, worker=2, ps=1), None, None, 1)
