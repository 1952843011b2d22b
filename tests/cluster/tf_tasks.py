"""Processes of TensorFlow tasks on a small dataset in memory; started by test_tf_backend.py.

``tf_tasks.py alone SCENARIO.json``: every sync job of the scenario on one rank, results in files there; ``rank RANK SCENARIO.json``: a rank
of three, of which the last dies; ``late SCENARIO.json``: a rank whose peer never comes; ``taken``: tasks whose ports are taken;
``task NAME SCENARIO.json``: an async task; the chief takes commands as JSON lines and answers each with one.
"""

import errno
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from torch_tasks import SECRET, TinyData, answer, plans, task_of, train, weights

from crosstrain.backends.base import Plan, State, make_sampler
from crosstrain.backends.tf import BACKEND
from crosstrain.backends.vectors import StateMemory
from crosstrain.core.cluster import Cluster
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.models.logreg import build


def train_without_end(session, plan):
    while True:
        train(session, plan)


def make_cluster(job, first_port):
    placed = BACKEND.placement(job)
    ports = {task.name: first_port + index for index, task in enumerate(placed)}
    return Cluster(tuple(placed), ("127.0.0.1",) * job.nodes, ports, SECRET)


def open_task(name, job, first_port):
    data = TinyData()
    return BACKEND.open(task_of(make_cluster(job, first_port), name), job, build(data.info), data)


def whole_epochs(job, data, epochs):
    """Plans of one epoch each, with its short last batch."""
    steps = make_sampler(job, data).steps_per_epoch
    return [Plan(epoch * steps, steps, epoch, 0, np.full(steps, job.lr)) for epoch in range(epochs)]


def kept(session):
    """A copy of the state on every rank: later ranks must copy theirs unasked."""
    session.state()
    memory = StateMemory(session._spec, session._replica.optimizer.slots)
    session._replica.copy_to(memory)
    return memory.state(session._updates, session._replica.scalars)


def cut_at_random(plan, random):
    """Split the steps into plans of random lengths."""
    borders = [0, *sorted(random.choice(np.arange(1, plan.count), random.integers(1, plan.count), replace=False).tolist()), plan.count]
    rates = plan.learning_rates
    return [Plan(plan.first_step + a, b - a, plan.epoch, plan.first_in_epoch + a, rates[a:b]) for a, b in itertools.pairwise(borders)]


def run(session, job, rank, chosen, seed=0):
    """Train, then train the last epoch again from its start, finally in random plans.

    Returns arrays.
    """
    losses = []
    assert session.state().updates == 0
    for plan in chosen:
        middle = kept(session)
        losses.append(train(session, plan)[0])
    sums, end = session.evaluate("test"), kept(session)
    session.load(middle if rank == 0 else None)
    again, _ = train(session, plan)
    repeated = kept(session)
    random, cut = np.random.default_rng(seed), []
    for _ in range(3):
        session.load(middle if rank == 0 else None)
        cut.append(np.concatenate([train(session, piece)[0] for piece in cut_at_random(plan, random)]))
    evaluated = np.array([sums.examples, sums.sums["loss_sum"], sums.sums["correct"], sums.updates_applied])
    updates = np.array([end.updates, repeated.updates])
    return {
        "losses": np.concatenate(losses), "again": again, "cut": np.array(cut), "evaluated": evaluated, "updates": updates,
        **weights(end, "end/"), **weights(repeated, "repeated/"),
    }  # fmt: skip


def check_raw_images():
    """Images that are normalised on the fly have the bits of those normalised before."""
    from crosstrain.backends.tf import data as module

    data, indices = TinyData(), np.array([7, 0, 199, 7], np.int32)
    for channels_last, compiled in itertools.product((False, True), repeat=2):
        layout = module.Layout(data.info, ("image",), "label", channels_last, changing=False, compiled=compiled)
        before = module.resident(data, "train", layout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "RESIDENT_FLOAT_BYTES", 0)
            raw = module.resident(data, "train", layout)
        assert (before.tensors["image"].dtype.name, raw.tensors["image"].dtype.name) == ("float32", "uint8")
        for x, y in before.batch(indices), raw.batch(indices):
            assert np.array_equal(x.numpy(), data.inputs("train")[indices])
            assert np.array_equal(y.numpy(), data.labels("train")[indices])


def alone_main(scenario, folder):
    data = TinyData()
    for name, options in scenario["jobs"].items():
        job = Job(backend="tf", **options)
        session = open_task("worker-0", job, scenario["port"])
        np.savez(folder / f"{name}.npz", **run(session, job, 0, list(plans(job, data, 3))))
        session.close()
        session.close()
    check_raw_images()
    if BACKEND.probe().devices == ("cpu",):
        with pytest.raises(UsageError, match="no GPU"):
            open_task("worker-0", Job(backend="tf", device="gpu"), scenario["port"])


def rank_main(rank, scenario, folder):
    job = Job(backend="tf", **scenario["options"])
    session = open_task(f"worker-{rank}", job, scenario["port"])
    chosen = whole_epochs(job, TinyData(), 3)
    np.savez(folder / f"rank-{rank}.npz", **run(session, job, rank, chosen, scenario["seed"]))
    if rank == job.workers - 1:
        while len(list(folder.glob("rank-*.npz"))) < job.workers:  # the others may still receive this rank's part of the last sum
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)unavailable|closed|reset|abort|cancel|connect"):
        train_without_end(session, chosen[0])
    (folder / f"death-{rank}.json").write_text(json.dumps(time.monotonic() - began))


def taken_main(scenario):
    port = scenario["port"]
    for role in "ps-0", "chief-0":
        job = Job(backend="tf", mode="async")
        taken = make_cluster(job, port).ports[role]
        with socket.create_server(("127.0.0.1", taken)), pytest.raises(OSError, match=role) as caught:
            open_task(role, job, port)
        assert caught.value.errno == errno.EADDRINUSE


def late_main(scenario):
    BACKEND.probe()  # the import is not timed
    began = time.monotonic()
    with pytest.raises(RunFailedError, match="start_timeout"):
        open_task("worker-0", Job(backend="tf", nodes=2, start_timeout=2), scenario["port"] + 10)
    assert time.monotonic() - began < 10


def async_main(name, scenario):
    opened = open_task(name, Job(backend="tf", mode="async", **scenario["options"]), scenario["port"])
    if name != "chief-0":
        opened.serve(threading.Event())
        return
    state: list[State] = []
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        # The version as the parameter server counts it, also while tickets are outstanding.
        value = opened._updates_applied() if command["do"] == "version" else answer(opened, command, state)
        print(json.dumps(value), flush=True)
        if command["do"] == "close":
            return


def main(kind, *rest):
    path = Path(rest[-1])
    scenario = json.loads(path.read_text())
    if kind == "alone":
        alone_main(scenario, path.parent)
    elif kind == "rank":
        rank_main(int(rest[0]), scenario, path.parent)
    elif kind == "late":
        late_main(scenario)
    elif kind == "taken":
        taken_main(scenario)
    else:
        async_main(rest[0], scenario)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001 — reported, and the process left without TensorFlow's exit handlers
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # as a task ends: TensorFlow's own exit handlers may wait for peers that are gone
