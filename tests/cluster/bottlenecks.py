"""Jobs with one bottleneck, certain by construction.

Sizes and limits are drawn at random within ranges whose reasons are given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Options = dict[str, Any]


def draw(cause: str, backend: str, mode: str, seed: int) -> Options:
    """Return the options of a run on `backend` in `mode` with the bottleneck `cause`.

    The same arguments give the same options.
    """
    rng = random.Random(f"{seed} {cause} {backend} {mode}")
    common = {"backend": backend, "mode": mode, "eval_every": "end", "save_final": False, "tensorboard": False}
    return {**common, **CAUSES[cause](rng, mode)}


def _link(rng: random.Random, mode: str) -> Options:
    """A model of which sending the parameters once takes 40 to 80 ms.

    Logistic regression on S × S pixels and 10 classes has 120 S² bytes of parameters: 0.5 to 1.1 MB. A step on at most 16 examples takes a
    few milliseconds, so that the link takes nine tenths of it. In async mode there are three nodes, as the worker next to the parameter
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
    """Nodes of which one has 25 to 40 % of the CPU of each other one.

    A step of the model takes a core 20 ms and more. All nodes together have less than two cores, and a slow node needs more for a step
    than its quota in the 20 ms of a period, so the limits decide: its step takes at least 2.5 times as long. In async mode node 0 is a
    fast one: it serves the parameters, and a slow one would delay all exchanges.
    """
    nodes = rng.choice((2, 3))
    quick = rng.uniform(0.7, 1.0) if nodes == 2 else rng.uniform(0.6, 0.75)
    cores = [quick] * nodes
    slow = rng.randrange(1 if mode == "async" else 0, nodes)
    cores[slow] = quick * rng.uniform(0.25, 0.4)
    job = _convolutions(rng, batch=(64, 128))
    return {**job, "nodes": nodes, "cores_per_node": ",".join(f"{limit:.3f}" for limit in cores), "steps": 25 if mode == "sync" else 60}


def _data(rng: random.Random, mode: str) -> Options:
    """Small images, moved, mirrored and normalised, for a model with two sums of products.

    The cost of an image without its pixels makes gathering several times slower than the model; a batch is large enough to hide the fixed
    cost of a step. An epoch has enough steps for several per order: an order takes a chief on TensorFlow six milliseconds, as long as
    such a step.
    """
    size, batch = rng.randint(24, 40), rng.randint(800, 1200)
    data = f"synthetic-images:size={size},classes=2,train={24 * batch},test=16"
    return {"model": "logreg", "data": data, "augment": "crop+flip", "batch_size": batch, "steps": 150}


def _compute(rng: random.Random, mode: str) -> Options:
    """Convolutions on many examples a step, on one node or on two with equal CPU limits.

    An example takes ten million operations, and only a gather of its pixels. A step takes 50 ms and more, many times longer than
    the exchange of less than a megabyte, or an order from the chief to a worker.
    """
    nodes = rng.choice((1, 2))
    limits = {"cores_per_node": f"{rng.uniform(0.5, 0.95):.3f}"} if nodes == 2 else {}
    return {**_convolutions(rng, batch=(128, 256)), **limits, "nodes": nodes, "steps": 40}


def _convolutions(rng: random.Random, batch: tuple[int, int]) -> Options:
    size = rng.randint(48, 64)
    return {"model": "cnn", "data": f"synthetic-images:size={size},classes=10,train=1024,test=16", "batch_size": rng.randint(*batch)}


CAUSES: Mapping[str, Callable[[random.Random, str], Options]] = {"network": _link, "peers": _slow_node, "data": _data, "compute": _compute}
"""Bottlenecks by their verdicts, and the function (random numbers, mode) → options that makes such a run."""
