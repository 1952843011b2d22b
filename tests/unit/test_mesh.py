"""All-reduce over a mesh of ranks: real sockets, one thread per rank."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_ranks import ADDRESS, in_rank_order, tasks_of, vectors_of
from processes import open_descriptors, wait_until

from crosstrain.core import cluster as direct_exchange
from crosstrain.core import listener
from crosstrain.core.cluster import MAX_RANKS
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.exchange.authentication import refuse_too_many
from crosstrain.exchange.mesh import Mesh, open_trial_mesh
from crosstrain.exchange.peer_links import PeerLostError


@contextlib.contextmanager
def meshes(tasks, silence_seconds=5.0, join=None):
    """Join all ranks, each in a thread, and close them at the end."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        made = list(pool.map(join or (lambda task: Mesh(task, 20.0, silence_seconds)), tasks))
        try:
            yield made, lambda work: list(pool.map(work, made))
        finally:
            for mesh in made:
                mesh.close()


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    elements=st.one_of(st.integers(1, 200), st.integers(10_000, 400_000)),
    kind=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_equal_those_in_rank_order_bit_by_bit(shared_meshes, ranks, data, elements, kind, seed):
    vectors = vectors_of(ranks, elements, kind, seed)
    expected = in_rank_order(vectors)
    late = data.draw(st.integers(0, ranks))

    def all_reduce(mesh):
        vector = vectors[mesh.rank].copy()
        if mesh.rank == late:
            time.sleep(0.01)
        mesh.all_reduce(vector)
        return vector

    for total in shared_meshes(ranks)(all_reduce):
        np.testing.assert_array_equal(total.view(np.uint8), expected.view(np.uint8))


@pytest.fixture(scope="module")
def shared_meshes():
    """Return meshes that are shared by the examples of a property."""
    with contextlib.ExitStack() as stack:
        made = {}

        def open_meshes(ranks):
            if ranks not in made:
                made[ranks] = stack.enter_context(meshes(tasks_of(ranks)))[1]
            return made[ranks]

        yield open_meshes


def test_whole_and_sharded_sums_are_equal(monkeypatch):
    vectors = vectors_of(3, 5000, np.float32, 7)
    totals = {}
    for name, most in (("whole", 1 << 40), ("shares", -1)):
        monkeypatch.setattr(direct_exchange, "MAX_FURTHER_BYTES", most)
        with meshes(tasks_of(3)) as (_, on_all):
            copies = [vector.copy() for vector in vectors]
            on_all(lambda mesh, copies=copies: mesh.all_reduce(copies[mesh.rank]))
            totals[name] = copies[0]
    np.testing.assert_array_equal(totals["whole"], totals["shares"])


def test_background_sums_arrive_in_submission_order():
    many = [vectors_of(3, size, np.float32, size) for size in (10, 70_000, 3, 200_000)]
    copies = [[vector.copy() for vector in vectors] for vectors in many]

    def work(mesh):
        for vectors in copies:
            mesh.submit(vectors[mesh.rank])
        mesh.wait()

    with meshes(tasks_of(3)) as (_, on_all):
        on_all(work)
    for vectors, totals in zip(many, copies, strict=True):
        for vector in totals:
            np.testing.assert_array_equal(vector, in_rank_order(vectors))


def test_broadcast_delivers_values_unchanged():
    values = np.array([0.0, -0.0, 1.5, np.inf, -1e-42], np.float32)
    with meshes(tasks_of(3)) as (_, on_all):
        for received in on_all(lambda mesh: mesh.broadcast(values if mesh.rank == 0 else None, (5,))):
            np.testing.assert_array_equal(received.view(np.uint32), values.view(np.uint32))


def test_departed_rank_is_named_immediately():
    with meshes(tasks_of(3)) as (made, _):
        began = time.monotonic()
        threading.Timer(0.2, made[2].close).start()
        with pytest.raises(PeerLostError, match=r"lost worker-2 on node 2 \(127\.0\.0\.1\): it closed the connection"):
            made[0].all_reduce(np.zeros(4, np.float32))
        assert time.monotonic() - began < 1.2  # including 0.2 before it left


def test_departed_rank_is_named_during_a_large_sum():
    """Two of three ranks are in a sharded sum when the third leaves."""
    with meshes(tasks_of(3)) as (made, on_all):
        threading.Timer(0.3, made[1].close).start()

        def work(mesh):
            if mesh.rank != 1:
                with pytest.raises(PeerLostError, match="lost worker-1"):
                    mesh.all_reduce(np.zeros(5_000_000, np.float32))

        on_all(work)


@pytest.mark.thorough
@pytest.mark.parametrize("elements", [2, 2_000_000])
def test_slow_rank_is_waited_for(elements):
    """Longer than the silence limit, also where it leaves bytes unread."""
    with meshes(tasks_of(3), silence_seconds=3.0) as (_, on_all):
        on_all(lambda mesh: (time.sleep(7.0 * (mesh.rank == 1)), mesh.all_reduce(np.zeros(elements))))


def test_ranks_out_of_step_fail():
    """The rank with the smallest vector notices, and the others lose that rank."""
    with meshes(tasks_of(3)) as (_, on_all):

        def work(mesh):
            with pytest.raises((RunFailedError, PeerLostError)) as caught:
                mesh.all_reduce(np.zeros(4 + mesh.rank))
            mesh.close()
            return caught.value

        first, *other_errors = on_all(work)
    assert re.search(r"worker-1 .* sent a frame number 1 of 40 bytes, and number 1 of 32 was due; the workers are out of step", str(first))
    assert all(isinstance(error, PeerLostError) or "out of step" in str(error) for error in other_errors)


def test_closing_leaves_no_thread_and_no_descriptor():
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    with meshes(tasks_of(3)) as (made, on_all):
        on_all(lambda mesh: (mesh.submit(np.zeros(100_000, np.float32)), mesh.wait()))
        made[0].submit(np.zeros(100_000, np.float32))  # waits for ever, as the others do not join in
        time.sleep(0.1)
    assert open_descriptors() <= descriptors
    wait_until(lambda: set(threading.enumerate()) <= threads, 5, "the threads to end, also those that let the ranks in")


RANK_IN_A_PROCESS = """
import json, sys, time
from crosstrain.core.cluster import Cluster, Task
from crosstrain.exchange.mesh import Mesh

cluster = Cluster.from_json(json.loads(sys.argv[1]))
mesh = Mesh(Task(cluster.tasks[1], cluster, threads=1), 20.0, 5.0)
time.sleep(60)
"""


@pytest.mark.quick_cases("killed")
@pytest.mark.parametrize(
    ("number", "most_seconds", "words"),
    [(signal.SIGSTOP, 10.0, ".*not been heard of for 2 s"), (signal.SIGKILL, 1.0, "(?!.*not been heard of)")],
    ids=["frozen", "killed"],
)
def test_frozen_or_killed_process_is_named(number, most_seconds, words):
    tasks = tasks_of(2)
    process = subprocess.Popen([sys.executable, "-c", RANK_IN_A_PROCESS, json.dumps(tasks[0].cluster.to_json())])
    try:
        mesh = Mesh(tasks[0], 20.0, 2.0)
        process.send_signal(number)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=f"lost worker-1 on node 1 {words}"):
            mesh.all_reduce(np.zeros(2))
        assert time.monotonic() - began < most_seconds
        mesh.close()
    finally:
        process.kill()
        process.wait()


def test_wrong_secret_or_job_cannot_join(caplog):
    tasks = tasks_of(2)
    outsider = tasks_of(2, tasks[0].port)[1]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Mesh, tasks[0], 2.0, 5.0)
        with pytest.raises(RunFailedError, match="does not know this run's secret"):
            Mesh(outsider, 2.0, 5.0)
        with pytest.raises(RunFailedError, match="still waits for worker-1"):
            first.result()
    assert "turned away a connection" in caplog.text


def test_another_world_size_is_refused():
    tasks = tasks_of(2)
    foreign_task = tasks_of(3, tasks[0].port, tasks[0].cluster.secret)[2]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Mesh, tasks[0], 2.0, 5.0)
        with pytest.raises(RunFailedError, match=r"worker-0 at .* it refused the connection"):
            Mesh(foreign_task, 2.0, 5.0)
        with pytest.raises(RunFailedError, match="still waits for worker-1"):
            first.result()


def test_unauthenticated_clients_do_not_block_ranks(monkeypatch):
    """The oldest pending connection is dropped, also a rank's, which then retries."""
    monkeypatch.setattr(listener, "MAX_UNPROVEN", 4)
    tasks = tasks_of(3)

    met, meet = [], listener.AuthenticatingListener._start_handshake

    def count(door, connection, host):
        met.append(host)
        meet(door, connection, host)

    monkeypatch.setattr(listener.AuthenticatingListener, "_start_handshake", count)

    def knock(stop):
        held = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((ADDRESS, tasks[0].port), timeout=1))
                held[-1].sendall(secrets.token_bytes(50))
            if len(held) > 3:
                held.pop(0).close()
            time.sleep(0.001)
        for connection in held:
            connection.close()

    def join(task):
        if task.rank > 0:
            wait_until(lambda: len(met) > 8, 10, "more clients at the first rank than its limit of pending connections")
        return Mesh(task, 20.0, 5.0)

    stop = threading.Event()
    knocking = [threading.Thread(target=knock, args=(stop,)) for _ in range(2)]
    for thread in knocking:
        thread.start()
    try:
        with meshes(tasks, join=join) as (_, on_all):
            on_all(lambda mesh: mesh.barrier())
    finally:
        stop.set()
        for thread in knocking:
            thread.join()


def test_missing_rank_is_named_after_the_start_timeout():
    with pytest.raises(RunFailedError, match="worker-0 still waits for worker-1 to join"):
        Mesh(tasks_of(2)[0], 0.5, 5.0)


def test_too_many_ranks_are_refused():
    refuse_too_many(MAX_RANKS)
    with pytest.raises(UsageError, match=r"64 at most, and this job has 65; choose native"):
        refuse_too_many(MAX_RANKS + 1)


def test_waiting_takes_no_processor_time():
    with meshes(tasks_of(2)) as (made, _):
        before = time.process_time()
        waiting = threading.Thread(target=made[0].all_reduce, args=(np.zeros(2),))
        waiting.start()
        time.sleep(2.0)
        assert time.process_time() - before < 0.2
        made[1].all_reduce(np.zeros(2))
        waiting.join()


def open_trial_meshes(tasks, **options):
    """Open a trial mesh on all ranks, each in a thread, next to an exchange that they share."""
    vectors, meet = {}, threading.Barrier(len(tasks))

    def all_reduce(rank, vector):
        vectors[rank] = vector
        meet.wait(30)
        total = sum(vectors[task.rank] for task in tasks)
        meet.wait(30)
        return total

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(lambda task: open_trial_mesh(task, lambda vector: all_reduce(task.rank, vector), 5.0, **options), tasks))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_trial_mesh_needs_no_port_of_the_run(ranks):
    tasks = tasks_of(ranks)
    taken = [socket.create_server((task.address, task.port)) for task in tasks]  # as the exchange of the run holds them
    opened = open_trial_meshes(tasks)
    assert [refused for _, refused in opened] == [None] * ranks
    vectors = [np.full(5, rank, np.float32) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda mesh, vector: mesh.all_reduce(vector), [mesh for mesh, _ in opened], vectors))
    for mesh, _ in opened:
        mesh.close()
    for held in taken:
        held.close()
    assert all((vector == sum(range(ranks))).all() for vector in vectors)


def test_rank_that_cannot_listen_disables_the_mesh():
    tasks = tasks_of(3)
    elsewhere = replace(
        tasks[1], cluster=replace(tasks[1].cluster, addresses=(ADDRESS, "192.0.2.1", ADDRESS))
    )  # not an address of this machine
    opened = open_trial_meshes([tasks[0], elsewhere, tasks[2]])
    assert [mesh for mesh, _ in opened] == [None] * 3
    assert [refused for _, refused in opened][::2] == ["", ""]
    assert "worker-1 could not listen on 192.0.2.1" in opened[1][1]


def test_refused_rank_disables_the_mesh_in_time():
    tasks = tasks_of(3)
    outsider = replace(tasks[2], cluster=replace(tasks[2].cluster, secret=secrets.token_hex(32)))
    began = time.monotonic()
    opened = open_trial_meshes([*tasks[:2], outsider], open_seconds=1.0)
    assert time.monotonic() - began < 10
    assert [mesh for mesh, _ in opened] == [None] * 3
    assert "worker-2 could not join it" in opened[2][1]
