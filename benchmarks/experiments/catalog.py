"""The experiments of docs/experiments.md: their sweeps, figures and references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .results import Settings, Value, above_the_others, ratio, share_of_the_others

SPEED = ("examples/s", "steps/s")
LEARNT = ("test loss", "test accuracy")
NODES = ("CPU cores", "peak memory", "sent", "received")


@dataclass(frozen=True)
class Compared:
    """A ratio that the reference also has.

    `reference` is computed from its figures; `sentence` is its own wording.
    """

    text: str
    reference: float
    value: Value
    sentence: str | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment: `config` and more `options` for ``trainer sweep``.

    `figures` are the columns of its table, in order.
    `pictures` are names of ``trainer plot``, drawn of the points that have the settings `pictured`.
    """

    config: str
    figures: Sequence[str]
    compared: Sequence[Compared] = ()
    options: Sequence[str] = ()
    pictures: Sequence[str] = ()
    pictured: Settings | None = None


def _batch(mode: str, size: int) -> dict[str, Any]:
    return {"mode": mode, "batch_size": size}


def _over_batches(name: str, text: str, mode: str, reference: float) -> Compared:
    return Compared(f"{mode}: {text} at batch 40 over that at 5", reference, ratio(name, _batch(mode, 40), _batch(mode, 5)))


_SENT = "per_node.0.network_sent_bytes_per_second"
_CPU = "per_node.0.cpu_cores_used.mean"
_MEMORY = "per_node.0.memory_rss_bytes.max"
_TF_ASYNC = {"backend": "tf", "mode": "async"}
_TF_SYNC = {"backend": "tf", "mode": "sync"}

EXPERIMENTS: dict[str, Experiment] = {
    "cs744-logreg": Experiment(
        "cs744-logreg-sync",
        ("run time", *SPEED, *LEARNT, "communicating", *NODES),
        (
            Compared("steps/s of async over sync, TensorFlow", 3.0, ratio("steps_per_second", _TF_ASYNC, _TF_SYNC)),
            Compared(
                "steps/s of async over sync, torch",
                3.0,
                ratio("steps_per_second", {"backend": "torch", "mode": "async"}, {"backend": "torch", "mode": "sync"}),
            ),
            Compared(
                "async: what node 0 sends over what the others send together, TensorFlow",
                1.0,
                share_of_the_others("network_sent_bytes", **_TF_ASYNC),
            ),
            Compared(
                "async: CPU of node 0 over that of another node, TensorFlow",
                math.inf,
                above_the_others("cpu_seconds", **_TF_ASYNC),
                "the highest of all",
            ),
        ),
        ("--grid", "backend=tf,torch", "--grid", "mode=async,sync"),
        ("loss", "speed", "resources"),
        {"backend": "tf"},
    ),
    "cs744-logreg-batch-sweep": Experiment(
        "cs744-logreg-batch-sweep",
        ("run time", *SPEED, "test accuracy", *NODES),
        (
            _over_batches(_CPU, "CPU of node 0", "async", 6.7 / 6.9),
            _over_batches(_CPU, "CPU of node 0", "sync", 7.0 / 8.8),
            _over_batches(_SENT, "bytes/s that node 0 sends", "async", 28.7 / 31.9),
            _over_batches(_SENT, "bytes/s that node 0 sends", "sync", 20.7 / 25.5),
            _over_batches(_MEMORY, "memory of node 0", "async", 503 / 509),
            _over_batches(_MEMORY, "memory of node 0", "sync", 536 / 541),
            _over_batches("eval.accuracy", "accuracy", "async", 92.1 / 92.2),
            _over_batches("eval.accuracy", "accuracy", "sync", 92.2 / 92.4),
        ),
    ),
    "hw2-logreg-nodes": Experiment(
        "hw2-logreg-nodes",
        ("run time", "time of each node", *SPEED, *LEARNT, *NODES),
        (
            Compared("time on two nodes over one", 287 / 156, ratio("run_seconds", {"nodes": 2}, {"nodes": 1})),
            Compared("time on three nodes over one", 336 / 156, ratio("run_seconds", {"nodes": 3}, {"nodes": 1})),
            Compared("accuracy on three nodes over one", 0.9209 / 0.9156, ratio("eval.accuracy", {"nodes": 3}, {"nodes": 1})),
            Compared("three nodes: CPU of node 0 over that of another node", 1.5, above_the_others("cpu_seconds", nodes=3)),
            Compared("three nodes: memory of node 0 over that of another node", 1.5, above_the_others("memory_rss_bytes.max", nodes=3)),
        ),
    ),
    "hw2-logreg-batch": Experiment(
        "hw2-logreg-batch",
        ("run time", *SPEED, *LEARNT, "CPU cores", "peak memory"),
        (
            Compared("time at batch 4096 over that at 128", 8.4 / 17.2, ratio("run_seconds", {"batch_size": 4096}, {"batch_size": 128})),
            Compared(
                "accuracy at batch 4096 over that at 128", 0.26 / 0.85, ratio("eval.accuracy", {"batch_size": 4096}, {"batch_size": 128})
            ),
            Compared("memory at batch 4096 over that at 128", 780 / 560, ratio(_MEMORY, {"batch_size": 4096}, {"batch_size": 128})),
        ),
    ),
    "hw2-100-epochs": Experiment("hw2-100-epochs", ("run time", *SPEED, *LEARNT), pictures=("loss", "accuracy")),
    "hw2-cnn-batch": Experiment(
        "hw2-cnn-batch",
        ("run time", *SPEED, *LEARNT, "CPU cores", "peak memory"),
        (
            Compared("loss at batch 4096 over that at 128", 0.405 / 0.049, ratio("eval.loss", {"batch_size": 4096}, {"batch_size": 128})),
            Compared(
                "accuracy at batch 4096 over that at 128", 0.888 / 0.984, ratio("eval.accuracy", {"batch_size": 4096}, {"batch_size": 128})
            ),
            Compared("memory at batch 4096 over that at 128", 2190 / 663, ratio(_MEMORY, {"batch_size": 4096}, {"batch_size": 128})),
            Compared("CPU at batch 4096 over that at 128", 88 / 60, ratio(_CPU, {"batch_size": 4096}, {"batch_size": 128})),
        ),
    ),
    "cs744-alexnet-2-vs-3": Experiment(
        "cs744-alexnet-2-vs-3",
        ("run time", *SPEED, "final train loss", *NODES),
        (Compared("examples/s on three nodes over two", 1.5, ratio("examples_per_second", {"nodes": 3}, {"nodes": 2})),),
        pictures=("resources",),
    ),
    "eecs598-profile": Experiment(
        "eecs598-profile",
        ("run time", *SPEED, "test accuracy", "CPU cores", "mean memory", "peak memory", "checkpoints"),
        (
            Compared(
                "time with checkpoints over that without",
                7954 / 7952,
                ratio("run_seconds", {"checkpoint_every": "1epoch"}, {"save_final": False}),
            ),
            Compared(
                "memory with checkpoints over that without",
                4430 / 2742,
                ratio("per_node.0.memory_rss_bytes.mean", {"checkpoint_every": "1epoch"}, {"save_final": False}),
            ),
        ),
        pictures=("resources",),
    ),
    "eecs598-batch": Experiment(
        "eecs598-batch",
        ("run time", *SPEED, *LEARNT),
        (
            Compared("time at batch 32 over that at 64", 12143 / 9238, ratio("run_seconds", {"batch_size": 32}, {"batch_size": 64})),
            Compared("time at batch 256 over that at 64", 7170 / 9238, ratio("run_seconds", {"batch_size": 256}, {"batch_size": 64})),
        ),
        pictures=("loss", "accuracy"),
    ),
    "eecs598-nodes": Experiment(
        "eecs598-nodes",
        ("run time", *SPEED, "test accuracy", "communicating", "CPU cores", "sent", "received"),
        (
            Compared("time on two nodes over one", 15170 / 10694, ratio("run_seconds", {"nodes": 2}, {"nodes": 1})),
            Compared("time on three nodes over one", 16879 / 10694, ratio("run_seconds", {"nodes": 3}, {"nodes": 1})),
        ),
    ),
    "eecs598-two-procs": Experiment(
        "eecs598-two-procs",
        ("run time", *SPEED, "test accuracy", "CPU cores", "peak memory"),
        (Compared("time with two processes over one", 11723 / 10694, ratio("run_seconds", {"procs_per_node": 2}, {"procs_per_node": 1})),),
    ),
    "eecs598-plain-vs-ddp": Experiment(
        "eecs598-plain-vs-ddp",
        ("run time", *SPEED, "test accuracy", "CPU cores", "peak memory"),
        (
            Compared(
                "time with the wrapper over that without",
                10694 / 9238,
                ratio("run_seconds", {"distributed": "always"}, {"distributed": "auto"}),
            ),
        ),
    ),
    "eecs598-fastest-90": Experiment(
        "eecs598-fastest-90", ("updates", "time to target", "run time", *SPEED, "test accuracy", *NODES), options=("--repeats", "3")
    ),
    "heterogeneous": Experiment(
        "heterogeneous", ("run time", *SPEED, *LEARNT, "updates by worker", "staleness", "communicating", "waiting for peers", "CPU cores")
    ),
}
"""By name, which is that of the sweep's folder and of the place in the page; in the order in which they run."""
