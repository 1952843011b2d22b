"""Nodes with different numbers of workers: the setting, and the place of each worker."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.base import parameter_server_placement, ranks_placement
from crosstrain.core.cluster import node_by_worker, read_procs_per_node, workers_by_node
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.sources import given_settings, resolve
from crosstrain.launch.launchers.environments import detect
from crosstrain.records.store.document_schemas import checked_document
from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.schema import SCHEMA

BY_NODE = st.lists(st.integers(1, 9), min_size=2, max_size=12)


def job(**fields):
    return resolve({"backend": "torch", **fields}, {}).job


@given(by_node=BY_NODE)
def test_workers_and_nodes_are_consistent(by_node):
    typed = job(nodes=str(len(by_node)), procs_per_node=",".join(map(str, by_node)))
    assert typed.workers == sum(by_node)
    assert typed.workers_by_node == tuple(by_node)
    for placed in (ranks_placement(typed), parameter_server_placement(typed.model_copy(update={"mode": "async"}), chief_is_first_ps=True)):
        workers = [task for task in placed if task.role == "worker"]
        assert [task.index for task in workers] == list(range(sum(by_node)))
        assert [[task.node for task in workers].count(node) for node in range(len(by_node))] == by_node
        assert [task.node for task in workers] == sorted(task.node for task in workers)
    assert typed.global_batch == sum(by_node) * typed.per_worker_batch


@given(count=st.integers(1, 9), nodes=st.integers(1, 12))
def test_single_number_applies_to_every_node(count, nodes):
    assert workers_by_node(count, nodes) == (count,) * nodes
    assert node_by_worker(workers_by_node(count, nodes)) == tuple(worker // count for worker in range(count * nodes))


@pytest.mark.parametrize(("typed", "read"), [("1,2", (1, 2)), (" 1 , 2", (1, 2)), ([1, 2], (1, 2)), ((1, 2), (1, 2))])
def test_layout_is_parsed_in_all_forms(typed, read):
    assert job(nodes=2, procs_per_node=typed).procs_per_node == read


@pytest.mark.parametrize("typed", ["2", 2, [2]])
def test_single_number_stays_single(typed):
    assert job(nodes=3, procs_per_node=typed).procs_per_node == 2


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("1,2", "one for each of the 3 nodes, not 2"),
        ("1,0,1", "at least 1 and at most 4096, or several with commas between"),
        ("1,x,1", "or several with commas between"),
        ("1,,1", "or several with commas between"),
        ("", "a whole number"),
        ("1.5", "a whole number"),
        ([], "one for each of the 3 nodes, not 0"),
    ],
)
def test_invalid_layout_is_refused(typed, named):
    with pytest.raises(UsageError, match=r"^--procs-per-node: got .*") as caught:
        job(nodes=3, procs_per_node=typed)
    assert named in str(caught.value)


def test_layout_is_read_without_the_number_of_nodes():
    assert read_procs_per_node(given_settings({"procs_per_node": "1,2"}, {})["procs_per_node"]) == (1, 2)
    assert read_procs_per_node(given_settings({"procs_per_node": "2"}, {})["procs_per_node"]) == 2


@given(by_node=BY_NODE)
def test_global_rank_gives_node_and_local_rank(by_node):
    world = {"WORLD_SIZE": str(sum(by_node)), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    places = [detect({**world, "RANK": str(rank)}, None, None, None, tuple(by_node)) for rank in range(sum(by_node))]
    expected = [(node, rank) for node in range(len(by_node)) for rank in range(by_node[node])]
    assert [(place.node, place.local_rank) for place in places] == expected
    assert all(place.shape == {"nodes": len(by_node), "procs_per_node": tuple(by_node)} for place in places)


def test_wrong_world_size_is_refused():
    world = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match="got 1,2, 3 in all, but WORLD_SIZE is 4"):
        detect(world, None, None, None, (1, 2))


def test_tf_config_may_have_uneven_workers():
    cluster = {"worker": ["a:1000", "b:1000", "b:1001"]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(3)]
    places = [detect({"TF_CONFIG": json.dumps(task)}, None, None, None) for task in tasks]
    assert [(place.node, place.local_rank) for place in places] == [(0, 0), (1, 0), (1, 1)]
    assert all(place.shape == {"nodes": 2, "procs_per_node": (1, 2)} for place in places)


def test_contradictory_recorded_job_is_refused(tmp_path):
    document = tmp_path / "job.json"
    fields = {"schema": SCHEMA, **Job(nodes=2, procs_per_node=(1, 2)).model_dump(mode="json")}
    assert checked_document(document, fields)["procs_per_node"] == [1, 2]
    with pytest.raises(DamagedRunError, match="procs_per_node: give one number, or one for each of the 3 nodes"):
        checked_document(document, fields | {"nodes": 3})
