"""Jobs that are held back by one thing, certain by construction; sizes and limits are drawn at random within ranges given with reasons."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Options = dict[str, Any]


def draw(cause: str, backend: str, mode: str, seed: int) -> Options:
    """Return the options of a run on `backend` in `mode` that `cause` holds back; the same ones for the same arguments."""
    rng = random.Random(f"{seed} {cause} {backend} {mode}")
    common = {"backend": backend, "mode": mode, "eval_every": "end", "save_final": False, "tensorboard": False}
    return {**common, **CAUSES[cause](rng, mode)}


def _link(rng: random.Random, mode: str) -> Options:
    """A model of which sending the parameters once takes 40 to 80 ms.

    Logistic regression on S × S pixels and 10 classes has 120 S² bytes of parameters: 0.5 to 1.1 MB. A step on at most 16 examples takes a
    few milliseconds, so that the link takes nine tenths of it. In async mode there are three nodes, as the worker beside the parameter
    server is not held back by any link.
    """
    size = rng.randint(64, 96)
    parameters = 4 * (3 * size * size + 1) * 10
    nodes = 3 if mode == "async" else rng.choice((2, 3))
    carried = 2 * (nodes - 1) / nodes if mode == "sync" else 1
    kbit = round(8e-3 * carried * parameters / rng.uniform(0.04, 0.08))
    steps = 40 if mode == "sync" else 1500
    data = f"synthetic-images:size={size},classes=10,train=256,test=16"
    return {"nodes": nodes, "bandwidth": f"{kbit}kbit", "model": "logreg", "data": data, "batch_size": rng.randint(2, 16), "steps": steps}


def _slow_node(rng: random.Random, mode: str) -> Options:
    """Nodes of which one has a quarter to two fifths of the CPU of each other one, at a model whose step takes a core 20 ms and more.

    All of them together have less than two cores, and what a slow node needs for a step is more than it is given in the 20 ms for which a
    quota holds, so that the limits are what decides: its own work takes at least 2.5 times as long. In async mode node 0 is a quick one: it
    serves the parameters, and were it slow, so would be all others' exchanges.
    """
    nodes = rng.choice((2, 3))
    quick = rng.uniform(0.7, 1.0) if nodes == 2 else rng.uniform(0.6, 0.75)
    cores = [quick] * nodes
    slow = rng.randrange(1 if mode == "async" else 0, nodes)
    cores[slow] = quick * rng.uniform(0.25, 0.4)
    job = _convolutions(rng, batch=(64, 128))
    return {**job, "nodes": nodes, "cores_per_node": ",".join(f"{each:.3f}" for each in cores), "steps": 25 if mode == "sync" else 60}


def _data(rng: random.Random, mode: str) -> Options:
    """Small images that are moved and mirrored one by one and then normalised, for a model that makes two sums of products of each.

    What an image costs besides its pixels makes gathering it several times the model's work; a batch is large enough for what a step costs
    besides to be little. An epoch has enough steps for orders of several at once: an order takes a chief on TensorFlow six milliseconds,
    as much as such a step.
    """
    size, batch = rng.randint(24, 40), rng.randint(800, 1200)
    data = f"synthetic-images:size={size},classes=2,train={24 * batch},test=16"
    return {"model": "logreg", "data": data, "augment": "crop+flip", "batch_size": batch, "steps": 150}


def _compute(rng: random.Random, mode: str) -> Options:
    """Convolutions on many examples a step, on one node or on two with the same part of a core each.

    An example takes ten million operations, and nothing but a gather of its pixels. A step takes 50 ms and more, which is many times what
    the exchange of less than a megabyte takes, or the way of an order from the chief to a worker.
    """
    nodes = rng.choice((1, 2))
    limits = {"cores_per_node": f"{rng.uniform(0.5, 0.95):.3f}"} if nodes == 2 else {}
    return {**_convolutions(rng, batch=(128, 256)), **limits, "nodes": nodes, "steps": 40}


def _convolutions(rng: random.Random, batch: tuple[int, int]) -> Options:
    size = rng.randint(48, 64)
    return {"model": "cnn", "data": f"synthetic-images:size={size},classes=10,train=1024,test=16", "batch_size": rng.randint(*batch)}


CAUSES: Mapping[str, Callable[[random.Random, str], Options]] = {"network": _link, "peers": _slow_node, "data": _data, "compute": _compute}
"""What holds a run back, by the verdict that names it, and the function (random numbers, mode) → options that makes such a run."""
