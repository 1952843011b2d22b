"""Processes of TensorFlow tasks that train image models; started by test_tf_images.py.

They do the same as torch_image_tasks.py, which documents the arguments and the scenario.
"""

import json
import os
import sys
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch_image_tasks as tasks
from tf_tasks import make_cluster, whole_epochs
from torch_tasks import task_of

from crosstrain.backends.base import Plan
from crosstrain.backends.tf import BACKEND
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, load


def opened(name, options, side, first_port):
    """Return (session or server, job, data)."""
    job, data = Job(backend="tf", **options), tasks.Pictures(side)
    spec = load(find("model", job.model), "model")(data.info)
    BACKEND.preload(job)
    return BACKEND.open(task_of(make_cluster(job, first_port), name), job, spec, data), job, data


def half_main(name, scenario, folder):
    """Async in fp16 on the CPU, which is slow: jobs are refused there."""
    from crosstrain.backends.tf import runtime

    runtime.check_precision = lambda job, gpu: None
    session, job, data = opened(name, {**scenario["options"], "mode": "async", "precision": "fp16"}, 32, scenario["port"])
    if name != "chief-0":
        session.serve(threading.Event())
        return
    figures, start = {}, deepcopy(session.state())

    def trained(scale, count):
        """Train from the start with a first scale; returns how the state is afterwards."""
        session.load(replace(start, scalars={"loss_scale": scale, "clean_steps": 1990.0}))
        plans = whole_epochs(job, data, count // 12) if count > 12 else [Plan(0, count, 0, 0, np.full(count, job.lr))]
        assert sum(result.count for plan in plans for result in session.train(plan)) + sum(r.count for r in session.drain()) == count
        state = session.state()
        figures[f"{scale:g}"] = {"updates": state.updates, **state.scalars}
        return tasks.flat(state)

    np.savez(folder / "start.npz", **tasks.flat(start))
    np.savez(folder / "overflowed.npz", **trained(2.0**60, 7))
    np.savez(folder / "low.npz", **trained(2.0**4, 7))
    np.savez(folder / "high.npz", **trained(2.0**9, 7))
    trained(2.0**22, 96)
    trained(2.0**5, 24)
    (folder / "figures.json").write_text(json.dumps(figures))
    session.close()


def ops_main(model, path):
    """Train, evaluate and read the state with or without --deterministic.

    Write the types of all ops in TensorFlow's functions.
    """
    from tensorflow.python.eager import context

    described = json.loads(Path(path).read_text())
    if model.startswith("transformer"):
        import tensorflow as tf

        sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
        if described["options"]["deterministic"]:
            tf.config.experimental.enable_op_determinism()
        from transformer_passes_tf import functions

        functions(model)
    else:
        session, job, data = opened("worker-0", {"model": model, **described["options"]}, described["side"], described["port"])
        assert sum(result.count for result in session.train(whole_epochs(job, data, 1)[0])) == 2
        session.evaluate("test")
    traced = [context.context().get_function_def(name) for name in context.context().list_function_names()]
    nodes = [node for function in traced for node in function.node_def]
    outside = {
        f"{node.op} outside training" for node in nodes if node.op.startswith("FusedBatchNormGrad") and not node.attr["is_training"].b
    }
    ops = outside | {node.op for node in nodes}
    Path(path).with_name("ops.json").write_text(json.dumps(sorted(ops)))


def main(kind, who, path):
    if kind == "ops":
        ops_main(who, path)
        return
    described, folder = json.loads(Path(path).read_text()), Path(path).parent
    if kind == "rank":
        tasks.sync_main(int(who), described, folder)
    elif kind == "half":
        half_main(who, described, folder)
    else:
        tasks.async_main(who, described, folder)


if __name__ == "__main__":
    tasks.opened = opened
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001 — reported, and the process left without TensorFlow's exit handlers
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # as a task ends: TensorFlow's own exit handlers may wait for peers that are gone
