"""Reading the places that torchrun, TF_CONFIG and --rendezvous give."""

import itertools
import json
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.launch.environments.detect import detect
from crosstrain.launch.environments.slurm_step import refuse_step
from crosstrain.launch.node.port_reservation import PortBlock

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
WORLD = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
IT_IS = shlex.quote("it's")
CLUSTER = {"chief": ["a:1000"], "worker": ["a:1001", "b:1000", "c:1000"], "ps": ["a:1002", "b:1001"]}


def tf_config(role, index, cluster=None):
    return {"TF_CONFIG": json.dumps({"cluster": cluster or CLUSTER, "task": {"type": role, "index": index}})}


def test_nothing_set_is_no_contract():
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
def test_torchrun_that_makes_no_sense(change, named):
    with pytest.raises(UsageError, match=named):
        detect(TORCHRUN | change, None, None, 1)


def test_the_four_variables_mean_a_process_a_node():
    places = [detect(WORLD | {"RANK": str(rank)}, None, None, 1) for rank in range(6)]
    assert [(place.node, place.local_rank, place.is_driver) for place in places] == [(rank, 0, rank == 0) for rank in range(6)]
    assert {place.rendezvous for place in places} == {("10.0.0.1", (29500,))}
    assert all(place.shape == {"nodes": 6, "procs_per_node": 1} and place.standbys == 0 for place in places)


@given(nodes=st.integers(1, 40), procs=st.integers(1, 40))
def test_the_four_variables_with_several_processes_a_node(nodes, procs):
    """Every process has a place of its own, and all say the same of the whole."""
    size = nodes * procs
    places = [detect(WORLD | {"WORLD_SIZE": str(size), "RANK": str(rank)}, None, None, 1, procs) for rank in range(size)]
    if size == 1:
        assert places == [None]  # told to be the only one
        return
    assert [(place.node, place.local_rank) for place in places] == list(itertools.product(range(nodes), range(procs)))
    assert all(place.shape == {"nodes": nodes, "procs_per_node": procs} and place.standbys == size - nodes for place in places)


@given(kept=st.sets(st.sampled_from(sorted(TORCHRUN)), min_size=1))
def test_a_part_of_the_variables_is_refused_with_what_is_missing(kept):
    environment = {name: TORCHRUN[name] for name in kept}
    if kept in ({*WORLD}, {*TORCHRUN}):
        assert detect(environment, None, None, 1)
        return
    needed = {*TORCHRUN} if kept - {*WORLD} else {*WORLD}
    with pytest.raises(UsageError) as caught:
        detect(environment, None, None, 1)
    has, _, lacks = str(caught.value).partition("but not")
    assert {*re.findall(r"[A-Z]+_?[A-Z_]+", has)} & {*TORCHRUN} == kept
    assert {*re.findall(r"[A-Z]+_?[A-Z_]+", lacks)} & {*TORCHRUN} == needed - kept


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
def test_four_variables_that_make_no_sense(change, procs, named):
    with pytest.raises(UsageError, match=named):
        detect(WORLD | change, None, None, 1, procs)


@pytest.mark.parametrize(
    ("environment", "host", "shape"),
    [
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "gpu[03-06]"}, "gpu03", "--nodes 4"),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a1,b[2-3]"}, "a1", "--nodes 2 --procs-per-node 2"),
        ({"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "rack[1-2]n[3,5]x"}, "rack1n", "--nodes 1 --procs-per-node 4"),
        ({}, "HOST-OF-NODE-0", "--nodes 4"),
    ],
)
def test_a_slurm_step_is_refused_with_what_to_type(environment, host, shape):
    with pytest.raises(UsageError) as caught:
        refuse_step({"SLURM_STEP_NUM_TASKS": "4", **environment}, ["run", "--data", "it's"])
    suggested = shlex.split(str(caught.value).partition("type: ")[2].partition(", with")[0])
    assert suggested[:2] == ["srun", "--nodes"]
    assert suggested[-3:-1] == ["bash", "-c"]
    assert suggested[-1] == f"trainer run --data {IT_IS} {shape} --rendezvous {host}:29400 --node-rank $SLURM_NODEID"


@pytest.mark.parametrize("repeats", [["--repeats", "3"], ["--repeats=3"]])
def test_repeats_in_a_slurm_step_are_told_to_run_in_one_of_a_single_task(repeats):
    """Not at a rendezvous, which does not go with them."""
    with pytest.raises(UsageError) as caught:
        refuse_step({"SLURM_STEP_NUM_TASKS": "4"}, ["run", "--data", "it's", *repeats])
    suggested = shlex.split(str(caught.value).partition("type: ")[2])
    assert suggested == ["srun", "--ntasks", "1", "trainer", "run", "--data", "it's", *repeats]


@pytest.mark.parametrize("environment", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}])
def test_other_processes_of_slurm_are_not_refused(environment):
    refuse_step(environment, ["run"])


def test_tf_config_async():
    places = [detect(tf_config(role, index), None, None, 1) for role, addresses in CLUSTER.items() for index in range(len(addresses))]
    assert [(place.node, place.local_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]
    assert places[0].shape == {"nodes": 3, "procs_per_node": 1, "ps": 2}
    assert places[0].addresses == ("a", "b", "c")
    assert places[0].standbys == 3
    assert places[0].ports == {"chief-0": 1000, "worker-0": 1001, "worker-1": 1000, "worker-2": 1000, "ps-0": 1002, "ps-1": 1001}
    assert all(port > 1002 for port in places[0].rendezvous[1])


def test_in_tf_config_without_ps_the_chief_is_the_first_rank():
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
def test_tf_config_that_makes_no_sense(environment):
    with pytest.raises(UsageError, match="TF_CONFIG"):
        detect(environment, None, None, 1)


@pytest.mark.parametrize(
    ("role", "index", "cluster"),
    [("worker", 7, None), ("worker", -1, None), ("chief", 1, None), ("ps", 2, None), ("worker", 0, {"chief": ["a:1"]}), ("x", 0, None)],
)
def test_a_task_of_tf_config_that_the_cluster_has_not(role, index, cluster):
    with pytest.raises(UsageError) as caught:
        detect(tf_config(role, index, cluster), None, None, 1)
    there = "chief 0" if cluster else "chief 0, worker 0 to 2, ps 0 to 1"
    assert str(caught.value) == f"TF_CONFIG: this process is to be {role} {index}, but the cluster has {there}; mend task or cluster"


def test_rendezvous():
    place = detect({}, "10.0.0.1:29400", 2, 3)
    assert (place.node, place.local_rank, place.rendezvous, place.standbys) == (2, 0, ("10.0.0.1", (29400,)), 0)
    assert detect({}, "10.0.0.1:29400", 0, 3).is_driver
    assert detect({}, "10.0.0.1:29400", 7, None).shape == {}  # only the driver knows how many there are


@pytest.mark.parametrize(
    ("rendezvous", "rank"), [("10.0.0.1:29400", None), (None, 0), ("10.0.0.1", 0), ("h:99999", 0), ("h:1", 3), ("h:1", -1)]
)
def test_rendezvous_that_makes_no_sense(rendezvous, rank):
    with pytest.raises(UsageError):
        detect({}, rendezvous, rank, 3)


def test_ports_of_two_blocks_never_overlap():
    first, second = PortBlock(), PortBlock()
    try:
        ours, theirs = first.take(10), second.take(10)
        assert len({*ours, *theirs}) == 20
        assert not set(first.take(5)) & {*ours}
    finally:
        first.release()
        second.release()


def test_a_port_in_use_is_skipped():
    import socket

    block = PortBlock()
    try:
        (port,) = block.take(1)
        with socket.create_server(("", port + 1)):
            assert port + 1 not in block.take(3)
    finally:
        block.release()
