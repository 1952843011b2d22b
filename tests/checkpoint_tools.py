"""Checkpoints for tests: small ones, and a process that is killed while it writes one."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from crosstrain.checkpoint import ArrayEntry, CheckpointWriter, Meta

PARAMETERS = {"dense.weight": (10, 64), "dense.bias": (10,)}
BUFFERS = {"norm.running_mean": (10,)}
KINDS = ("parameters/", "buffers/")


def meta(step=500, **changed):
    fields = {
        "step": step,
        "epoch": 3,
        "examples": 128,
        "run_seconds": 1.5,
        "seed": 7,
        "job": {"model": "logreg", "backend": "torch", "data": "digits", "data_dir": None, "seed": 7},
        "model": {
            "name": "logreg",
            "loss": "cross_entropy",
            "parameters": [[name, list(shape)] for name, shape in PARAMETERS.items()],
            "buffers": [[name, list(shape)] for name, shape in BUFFERS.items()],
        },
        "data": {"name": "digits", "data_dir": None, "digest": "0", "input_shape": [1, 8, 8], "classes": 10, "mean": [0.5], "std": [0.25]},
        "created_at": "2026-01-01T00:00:00+00:00",
        "backend": "torch",
        "mode": "sync",
        "workers": 1,
    }
    return Meta(**{**fields, **changed})


def arrays(seed=0):
    """A state by key, in an order in which the two files take turns."""
    draw = np.random.default_rng(seed)
    shapes = {f"parameters/{name}": shape for name, shape in PARAMETERS.items()}
    shapes |= {f"slots/momentum/{name}": shape for name, shape in PARAMETERS.items()}
    shapes |= {f"buffers/{name}": shape for name, shape in BUFFERS.items()}
    return {key: draw.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


def large_arrays():
    """Arrays of several pieces of a file and a part of one."""
    draw = np.random.default_rng(1)
    return {key: draw.standard_normal(700_003).astype(np.float32) for key in ("parameters/large", "slots/momentum/large", "buffers/more")}


def entries(values):
    return [ArrayEntry(key, value.dtype.str, value.shape) for key, value in values.items()]


def described(values):
    """The entry of ``checkpoint.json`` for the model of some arrays."""
    shapes = {
        kind: [[key.removeprefix(kind), list(value.shape)] for key, value in values.items() if key.startswith(kind)] for kind in KINDS
    }
    return {"name": "logreg", "loss": "cross_entropy", "parameters": shapes["parameters/"], "buffers": shapes["buffers/"]}


def save(run, step=500, values=None, chunk=1000, **changed):
    """Write a checkpoint of a run in chunks and return its folder.

    Without a `model` the arrays are described as they are.
    """
    if values is None:
        values = arrays(step)
    else:
        changed = {"model": described(values), **changed}
    writer = CheckpointWriter(run / "checkpoints", meta(step, **changed), entries(values))
    whole = b"".join(value.tobytes() for value in values.values())
    for start in range(0, len(whole), chunk):
        writer.write(whole[start : start + chunk])
    writer.seal()
    return writer.publish()


def save_until(run, step, deadly):
    """Save in a process that is killed before its `deadly`-th file system call.

    Return (status of os.waitpid, number of calls).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _save_and_count(run, step, deadly, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        calls = len(pipe.read())
    return os.waitpid(child, 0)[1], calls


def _save_and_count(run, step, deadly, writer):
    seen = 0

    def count(event, _arguments):
        nonlocal seen
        if event in {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.scandir", "fcntl.flock", "tempfile.mkdtemp"}:
            seen += 1
            if seen == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writer, b".")

    code = 1
    try:
        values = arrays(step)
        sys.addaudithook(count)
        save(run, step, values)
        code = 0
    finally:
        os._exit(code)
