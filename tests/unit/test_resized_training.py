"""Training of a run on some of its nodes: values in, values out."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.loading import load_backend
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.update_rules import base_learning_rate
from crosstrain.data.sampler import run_sampler
from crosstrain.engine.epochs import DataCursor
from crosstrain.engine.loop_interfaces import ResumePoint
from crosstrain.launch.driver.cluster_setup import cluster_document, driver_node, make_cluster, make_tasks
from crosstrain.launch.driver.position import Origin, RunPosition
from crosstrain.launch.driver.restart_policy import Resize
from crosstrain.launch.driver.training_job import TrainingJob
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.launch.node.scratch import node_identity
from crosstrain.records.time_shares import last_segment, nodes_of_last_segment, resumed_seconds

EXAMPLES = 1000


def training(**fields):
    """Return a job's training on all of its nodes; model and data are irrelevant here."""
    job = Job(**{"backend": "torch", **fields})
    placed = load_backend(job.backend).placement(job)
    return TrainingJob(job, job, None, None, placed, [], frozenset(), tuple(range(job.nodes)))


@pytest.mark.parametrize(("nodes", "seconds"), [(0, 0.0), (-2, 0.0), (2.5, 0.0), (True, 0.0), ("2", 0.0), (2, -1.0), (2, math.nan)])
def test_nodes_and_delay_of_a_restart_are_validated(nodes, seconds):
    with pytest.raises(ValueError, match="a restart"):
        Resize(nodes, seconds)


@st.composite
def resizes(draw):
    """Draw a job of any shape, and its remaining nodes."""
    nodes = draw(st.integers(2, 8))
    fields = {
        "nodes": nodes,
        "procs_per_node": draw(st.integers(1, 4) | st.tuples(*[st.integers(1, 4)] * nodes)),
        "backend": draw(st.sampled_from(["torch", "tf"])),
        "mode": draw(st.sampled_from(["sync", "async"])),
        "scale_lr": "linear",
        "cores_per_node": draw(st.sampled_from([None, (0.5,), tuple(0.5 + node for node in range(nodes))])),
    }
    if fields["mode"] == "async":
        fields["ps"] = draw(st.integers(1, 5))
    if fields["mode"] == "sync" and draw(st.booleans()):
        fields["global_batch_size"] = draw(st.integers(1, 200))
    else:
        fields["batch_size"] = draw(st.integers(1, 20))
    lost = draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes - 1))
    return training(**fields), [node for node in range(nodes) if node not in lost]


@given(resizes())
def test_tasks_stay_on_remaining_nodes_in_equal_number(drawn):
    before, places = drawn
    after = before.resized(places)
    left = [before.requested.workers_by_node[node] for node in places]
    assert after.places == tuple(places)
    assert after.node_of_worker == dict(enumerate(node for node, count in zip(places, left, strict=True) for _ in range(count)))
    assert {task.node for task in after.placed} == set(places)
    assert len({task.name for task in after.placed}) == len(after.placed)
    assert sum(task.leading for task in after.placed) == (after.job.workers if after.job.mode == "sync" else 1)
    limits = before.requested.cores_per_node
    assert [after.job.cores_of(number) for number in range(len(places))] == [before.requested.cores_of(node) for node in places]
    assert (after.requested, after.job.nodes) == (before.requested, len(places))
    assert Job.model_validate(after.job.model_dump()) == after.job  # as tasks read it
    assert limits is None or len(after.job.cores_per_node) in (1, len(places))


@given(resizes(), st.integers(0, 2), st.data())
def test_updates_have_the_same_examples_in_the_same_order(drawn, epoch, data):
    before, places = drawn
    after = before.resized(places)
    whole, left = run_sampler(before.job, EXAMPLES), run_sampler(after.job, EXAMPLES)
    if before.job.mode == "sync":
        assert after.job.global_batch == before.job.global_batch
    else:
        assert after.job.per_worker_batch == before.job.per_worker_batch
    assert base_learning_rate(after.job) == base_learning_rate(before.job)
    steps = whole.steps_per_epoch
    assert left.steps_per_epoch == steps
    first = data.draw(st.integers(0, steps - 1))
    count = data.draw(st.integers(0, min(10, steps - first)))
    ours, theirs = left.whole(epoch, first, count), whole.whole(epoch, first, count)
    np.testing.assert_array_equal(ours.indices, theirs.indices)
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    if after.job.mode == "sync" and count:
        slices = [left.for_rank(epoch, first, count, rank).batch(0) for rank in range(after.job.workers)]
        np.testing.assert_array_equal(np.concatenate(slices), theirs.batch(0))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_micro_batches_do_not_grow(mode):
    before = training(nodes=3, mode=mode, batch_size=5, accumulate=4)
    after = before.resized([0, 2]).job
    assert after.micro_batch <= 5
    if mode == "sync":
        assert (after.global_batch, after.per_worker_batch, after.accumulate) == (60, 30, 6)
    else:
        assert (after.per_worker_batch, after.accumulate) == (20, 4)


@pytest.mark.parametrize(
    ("mode", "parts", "left"), [("sync", 4, (100, 6)), ("sync", 1, (150, 1)), ("sync", 3, (90, 5)), ("async", 4, (100, 4))]
)
def test_updates_by_tokens_keep_their_size(mode, parts, left):
    """Two of three nodes remain: no worker's pass grows, unless it had no micro-batches."""
    after = training(nodes=3, mode=mode, batch_tokens=100, accumulate=parts).resized([0, 2]).job
    assert (after.batch_tokens, after.accumulate) == left


def test_uneven_batches_become_the_larger_one():
    before = training(nodes=3, mode="async", global_batch_size=100)
    assert before.resized([0, 1]).job.per_worker_batch == 34


def test_all_nodes_keep_the_requested_training():
    before = training(nodes=3)
    assert before.resized([0, 1, 2]) is before
    assert before.resized([0, 2]).resized([1]).job.global_batch == before.job.global_batch


def test_backend_refusal_ends_the_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "toy"))
    before = training(nodes=3, backend="toy")
    toy = sys.modules["crosstrain_toy"]
    place = toy.ToyBackend.placement

    def placement(self, job):
        if job.nodes % 3:
            raise UsageError.of("nodes", job.nodes, "a multiple of 3, as a model is cut into three parts")
        return place(self, job)

    monkeypatch.setattr(toy.ToyBackend, "placement", placement)
    with pytest.raises(RunFailedError, match=r"the run cannot go on with 2 nodes \(nodes: got '2'; allowed: a multiple of 3"):
        before.resized([0, 2])


@given(st.integers(0, 2**32))
def test_tasks_get_addresses_and_unused_nodes_no_threads(seed):
    draw = random.Random(seed)
    nodes = draw.randint(2, 6)
    before = training(nodes=nodes, procs_per_node=draw.randint(1, 3), mode=draw.choice(["sync", "async"]))
    places = sorted(draw.sample(range(nodes), draw.randint(1, nodes - 1)))
    after = before.resized(places)
    channels = [NodeChannel(node, None, f"10.0.0.{node}", True, None, True) for node in range(nodes)]
    reserved = {place: [1000 * place + number for number, task in enumerate(after.placed) if task.node == place] for place in places}
    cluster = make_cluster(after.placed, channels, reserved)
    for task in make_tasks(cluster, [10 + node for node in range(nodes)]):
        assert (task.address, task.threads) == (f"10.0.0.{task.placed.node}", 10 + task.placed.node)
        assert task.port in reserved[task.placed.node]
        assert task.placed.node in places
    assert len(set(cluster.ports.values())) == len(after.placed)
    document = cluster_document(cluster, [1 if node in places else None for node in range(nodes)])
    assert [node for node, threads in enumerate(document["threads_per_task"]) if threads] == places


def test_driver_counts_for_a_node_on_its_machine():
    this_boot = node_identity()["boot"]
    hosts = [{"identity": {"boot": boot}} for boot in (this_boot, "b", this_boot)]
    assert [driver_node(places, hosts) for places in ([0, 1], [1, 2], [1])] == [0, 2, None]


def origin(step, train_seconds=0.0):
    return Origin(ResumePoint(DataCursor(step, 0, step), train_seconds, 0.5, 0.25))


def test_segment_begins_at_new_nodes_or_repeated_training():
    position = RunPosition(3, ["trainer", "run"])

    def begins(places, step, train_seconds=0.0):
        position.origin = origin(step, train_seconds)
        return position.begin_segment(places, 2.0)

    assert not begins([0, 1, 2], 0)
    first = {"command": ["trainer", "run"], "step": 0, "epoch": 0, "examples": 0, "run_seconds": 0.0}
    assert [segment | first for segment in position.segments] == position.segments
    assert set(position.earlier.values()) == {0.0}
    assert begins([0, 2], 40, 1.0)
    assert position.earlier == {"run_seconds": 2.0, "train_seconds": 1.0, "eval_seconds": 0.5, "checkpoint_seconds": 0.25}
    described = {"nodes": 3, "segments": list(position.segments)}
    assert not begins([0, 2], 40)
    assert not begins([0, 2], 60)
    assert position.segments == described["segments"]
    assert begins([0, 2], 20)
    assert begins([0, 1], 60)
    assert [segment.get("changed") for segment in position.segments] == [None, *({"nodes": [before, 2]} for before in (3, 2, 2))]
    assert (last_segment(described), resumed_seconds(described), nodes_of_last_segment(described)) == ((2.0, 40), [2.0], 2)


@pytest.mark.parametrize("segments", [[], [{"run_seconds": 0.0}], [{"changed": {"nodes": "none"}}], [{"changed": {"nodes": [3, 900]}}]])
def test_missing_segments_have_the_nodes_of_the_job(segments):
    assert nodes_of_last_segment({"nodes": 3, "segments": segments}) == 3


def test_resize_leaves_the_original_unchanged():
    before = training(nodes=4, procs_per_node=2)
    copy = replace(before)
    before.resized([1, 3])
    assert before == copy
