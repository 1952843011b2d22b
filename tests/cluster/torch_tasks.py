"""Processes of torch tasks on a small dataset in memory; started by test_torch_backend.py.

``python torch_tasks.py rank RANK SCENARIO.json``: a sync rank of all jobs of the scenario with more workers than its number.
``python torch_tasks.py task NAME SCENARIO.json``: an async task; the chief takes commands as JSON lines and answers each with one.
"""

import copy
import errno
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from crosstrain.backends.base import Plan, State, make_sampler
from crosstrain.backends.torch import BACKEND
from crosstrain.core.cluster import Cluster, Task
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.columns import Column
from crosstrain.models.logreg import build

SECRET = "5e" * 32


class TinyData:
    """200 training and 90 test images of 2 × 3 × 4 pixels in five linearly separable classes."""

    def __init__(self):
        self.info = DataInfo.of_images("tiny", {"train": 200, "test": 90}, ImageFeatures((2, 3, 4), 5, (0.4, 0.6), (0.3, 0.2)))
        draw = np.random.default_rng(7)
        truth = draw.normal(size=(24, 5))
        self._images = {split: draw.integers(0, 256, (size, 2, 3, 4), dtype=np.uint8) for split, size in self.info.sizes.items()}
        self._labels = {split: (self.inputs(split).reshape(-1, 24) @ truth).argmax(1) for split in self.info.sizes}

    def images(self, split):
        return self._images[split]

    def labels(self, split):
        return self._labels[split]

    def column(self, split, name):
        return Column({"image": self._images, "label": self._labels}[name][split])

    def inputs(self, split):
        mean, std = (np.array(values).reshape(2, 1, 1) for values in (self.info.mean, self.info.std))
        return ((self._images[split] / 255.0 - mean) / std).astype(np.float32)


def make_cluster(job, first_port):
    placed = BACKEND.placement(job)
    ports = {task.name: first_port + index for index, task in enumerate(placed)}
    return Cluster(tuple(placed), ("127.0.0.1",) * job.nodes, ports, SECRET)


def task_of(cluster, name):
    return Task(next(placed for placed in cluster.tasks if placed.name == name), cluster, threads=1)


def plans(job, data, epochs):
    """Plans of at most 20 steps of an epoch, with another learning rate at every step."""
    steps = min(20, make_sampler(job, data).steps_per_epoch)
    for epoch in range(epochs):
        rates = job.lr / (1.0 + 0.1 * np.arange(epoch * steps, (epoch + 1) * steps))
        yield Plan(epoch * steps, steps, epoch, 0, rates)


def train(session, plan):
    results = list(session.train(plan)) + list(session.drain())
    assert [result.first_step for result in results] == [
        plan.first_step + sum(before.count for before in results[:index]) for index in range(len(results))
    ]
    return np.concatenate([result.losses for result in results]), sum(result.examples for result in results)


def weights(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.parameters.items()}


def run_rank(rank, options, first_port):
    """Train three epochs, then the third again from the end of the second. Returns arrays."""
    job, data = Job(backend="torch", **options), TinyData()
    session = BACKEND.open(task_of(make_cluster(job, first_port), f"worker-{rank}"), job, build(data.info), data)
    assert session.state().updates == 0
    losses, examples = [], 0
    for plan in plans(job, data, 3):
        middle = copy.deepcopy(session.state()) if plan.epoch == 2 else None  # the session's own copy is overwritten by the next
        values, counted = train(session, plan)
        losses.append(values)
        examples += counted
    evaluation, end = session.evaluate("test"), copy.deepcopy(session.state())
    session.load(middle if rank == 0 else None)
    again, _ = train(session, plan)
    repeated = session.state()
    session.close()
    session.close()
    evaluated = np.array([evaluation.examples, evaluation.sums["loss_sum"], evaluation.sums["correct"], evaluation.updates_applied])
    updates = np.array([end.updates, repeated.updates])
    return {
        "losses": np.concatenate(losses), "again": again, "examples": np.array(examples), "evaluated": evaluated, "updates": updates,
        **weights(end, "end/"), **weights(repeated, "repeated/"),
    }  # fmt: skip


def check_refusals(port):
    """A port that is taken, and a GPU that is not there."""
    data = TinyData()
    model = build(data.info)
    for options, name in ({"nodes": 2}, "worker-0"), ({"mode": "async"}, "chief-0"):
        job = Job(backend="torch", **options)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use") as caught:
            BACKEND.open(task_of(make_cluster(job, port), name), job, model, data)
        assert caught.value.errno == errno.EADDRINUSE
    if BACKEND.probe().devices == ("cpu",):
        job = Job(backend="torch", device="gpu")
        with pytest.raises(UsageError, match="no GPU"):
            BACKEND.open(task_of(make_cluster(job, port), "worker-0"), job, model, data)


def check_raw_images():
    """Images that are normalised on the fly have the bits of those normalised before."""
    import torch

    from crosstrain.backends.torch import data as module

    data, job = TinyData(), Job(backend="torch", global_batch_size=7)
    batches = make_sampler(job, data).whole(0, 0, 29)
    before = module.ResidentSplit(data, "train", torch.device("cpu"))
    module.FLOAT_LIMIT_BYTES = 0
    raw = module.ResidentSplit(data, "train", torch.device("cpu"))
    assert before.normalised
    assert not raw.normalised
    pairs = zip((b for block in before.blocks(batches) for b in block), (b for block in raw.blocks(batches) for b in block), strict=True)
    for position, ((x, y), (x_raw, y_raw)) in enumerate(pairs):
        chosen = batches.batch(position)
        assert np.array_equal(x.numpy(), data.inputs("train")[chosen])
        assert np.array_equal(y.numpy(), data.labels("train")[chosen])
        assert torch.equal(x, x_raw)
        assert torch.equal(y, y_raw)


def check_death(rank, first_port):
    """The last rank dies in mid-run; returns how long the others took to notice."""
    job, data = Job(backend="torch", nodes=3, global_batch_size=10), TinyData()
    session = BACKEND.open(task_of(make_cluster(job, first_port), f"worker-{rank}"), job, build(data.info), data)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    forever = itertools.cycle(plans(job, data, 1))
    with pytest.raises(RuntimeError):
        deque((train(session, plan) for plan in forever), maxlen=0)
    session.close()
    return time.monotonic() - began


def sync_main(rank, scenario, folder):
    if rank == 0:
        check_refusals(scenario["port"])
        check_raw_images()
    port = scenario["port"] + 10
    for name, options in scenario["jobs"].items():
        port += 5
        if rank < options["nodes"]:
            np.savez(folder / f"{name}-{rank}.npz", **run_rank(rank, options, port))
    (folder / f"death-{rank}.json").write_text(json.dumps(check_death(rank, port + 5)))


def as_json(result):
    return {
        "step": result.first_step,
        "losses": result.losses.tolist(),
        "staleness": result.staleness.tolist(),
        "worker": result.worker,
        "examples": result.examples,
        "seconds": result.seconds,
        "wait": result.network_wait_seconds,
    }


def answer(session, command, state):
    """Carry out one command of the test on the chief's session."""
    what = command["do"]
    if what in ("train", "drain"):
        results = session.drain()
        if what == "train":
            plan = command["plan"]
            results = session.train(Plan(*plan, learning_rates=np.array(command["rates"])))
        return [as_json(result) for result in results]
    if what == "evaluate":
        evaluation = session.evaluate(command["split"])
        return [evaluation.examples, evaluation.sums["loss_sum"], evaluation.sums["correct"], evaluation.updates_applied]
    if what == "state":
        state.append(copy.deepcopy(session.state()))
        newest = state[-1]
        slots = {slot: {name: value.tolist() for name, value in values.items()} for slot, values in newest.slots.items()}
        return {
            "parameters": {name: value.tolist() for name, value in newest.parameters.items()},
            "slots": slots,
            "updates": newest.updates,
        }
    if what == "load":
        chosen: State = state[command["which"]]
        return session.load(chosen)
    return session.close()


def async_main(name, scenario):
    job, data = Job(backend="torch", mode="async", **scenario["options"]), TinyData()
    opened = BACKEND.open(task_of(make_cluster(job, scenario["port"]), name), job, build(data.info), data)
    if name != "chief-0":
        return opened.serve(threading.Event())
    state: list[State] = []
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(answer(opened, command, state)), flush=True)
        if command["do"] == "close":
            return None
    return None


if __name__ == "__main__":
    kind, who, path = sys.argv[1:]
    described = json.loads(Path(path).read_text())
    sync_main(int(who), described, Path(path).parent) if kind == "rank" else async_main(who, described)
