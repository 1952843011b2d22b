"""Reading the places that torchrun, TF_CONFIG and --rendezvous give."""

import json

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.launch.contract import find_place
from crosstrain.launch.ports import PortBlock

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
CLUSTER = {"chief": ["a:1000"], "worker": ["a:1001", "b:1000", "c:1000"], "ps": ["a:1002", "b:1001"]}


def tf_config(role, index, cluster=None):
    return {"TF_CONFIG": json.dumps({"cluster": cluster or CLUSTER, "task": {"type": role, "index": index}})}


def test_nothing_set_is_no_contract():
    assert find_place({}, None, None, 3) is None


def test_torchrun():
    place = find_place(TORCHRUN, None, None, 1)
    assert (place.node, place.local_rank, place.is_driver) == (2, 1, False)
    assert place.shape == {"nodes": 3, "procs_per_node": 2}
    assert place.standbys == 3
    assert place.rendezvous[0] == "10.0.0.1"
    assert 29501 in place.rendezvous[1]
    assert 29500 not in place.rendezvous[1]


@pytest.mark.parametrize("change", [{"WORLD_SIZE": "5"}, {"RANK": "six"}, {"RANK": "6"}])
def test_torchrun_that_makes_no_sense(change):
    with pytest.raises(UsageError):
        find_place(TORCHRUN | change, None, None, 1)


def test_tf_config_async():
    places = [find_place(tf_config(role, index), None, None, 1) for role, addresses in CLUSTER.items() for index in range(len(addresses))]
    assert [(place.node, place.local_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]
    assert places[0].shape == {"nodes": 3, "procs_per_node": 1, "ps": 2}
    assert places[0].addresses == ("a", "b", "c")
    assert places[0].standbys == 3
    assert places[0].ports == {"chief-0": 1000, "worker-0": 1001, "worker-1": 1000, "worker-2": 1000, "ps-0": 1002, "ps-1": 1001}
    assert all(port > 1002 for port in places[0].rendezvous[1])


def test_in_tf_config_without_ps_the_chief_is_the_first_rank():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    place = find_place(tf_config("worker", 1, cluster), None, None, 1)
    assert (place.node, place.shape) == (2, {"nodes": 3, "procs_per_node": 1})
    assert place.ports == {"worker-0": 1, "worker-1": 1, "worker-2": 1}


@pytest.mark.parametrize(
    "environment",
    [
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": "[]"},
        {"TF_CONFIG": "{}"},
        tf_config("worker", 7),
        tf_config("worker", 0, {"worker": ["no port"]}),
        tf_config("worker", 0, {"worker": ["a:1"], "evaluator": ["a:2"]}),
        tf_config("worker", 0, {"worker": ["a:1", "a:2", "b:1"]}),
    ],
)
def test_tf_config_that_makes_no_sense(environment):
    with pytest.raises(UsageError, match="TF_CONFIG"):
        find_place(environment, None, None, 1)


def test_rendezvous():
    place = find_place({}, "10.0.0.1:29400", 2, 3)
    assert (place.node, place.local_rank, place.rendezvous, place.standbys) == (2, 0, ("10.0.0.1", (29400,)), 0)
    assert find_place({}, "10.0.0.1:29400", 0, 3).is_driver


@pytest.mark.parametrize(
    ("rendezvous", "rank"), [("10.0.0.1:29400", None), (None, 0), ("10.0.0.1", 0), ("h:99999", 0), ("h:1", 3), ("h:1", -1)]
)
def test_rendezvous_that_makes_no_sense(rendezvous, rank):
    with pytest.raises(UsageError):
        find_place({}, rendezvous, rank, 3)


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
