"""Setting TensorFlow up in a task: environment, threads, devices, and errors said in the interface's words.

Everything here has to happen before the first op, and the environment before the import; `prepare` is therefore called first.
"""

from __future__ import annotations

import copy
import errno
import glob
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from ...core.cluster import Cluster, Task
from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...models.base import ModelSpec
from ..capabilities import Device

__all__ = [
    "SERVER_INTER_OP_THREADS",
    "cluster_tasks",
    "fits_single_threaded_executor",
    "import_tensorflow",
    "kind_of",
    "prepare",
    "set_tf_config",
    "single_threaded_executor",
    "translated_errors",
    "within",
]

Result = TypeVar("Result")

KERAS_CHOICE = "TF_USE_LEGACY_KERAS"

SERVER_INTER_OP_THREADS = 2
"""A server has to answer a second request while an op of the first waits for a message."""

CALLED_IN_PLACE = frozenset(("While", "StatelessWhile"))
"""Ops that call functions, and that the sequential executor carries out on its own thread (WhileOp::DoComputeSync)."""

MOST_SIDE_BY_SIDE = 1 << 25
"""Parameters of a model whose float32 ops are carried out side by side, at most. The ops of a larger one keep all threads busy by
themselves, and side by side they take more memory, how much more being up to chance: up to 0.4 GB for AlexNet."""


def import_tensorflow(*, deterministic: bool) -> None:
    """Import TensorFlow in the environment that it reads at import. Raises ImportError.

    oneDNN changes the order of summation with the shape of a batch, so it is off with `deterministic`. TensorFlow's last act is to import
    Keras, and with it scikit-learn and matplotlib where they are installed: two fifths of the import's time and a quarter of its memory for
    what nothing here needs. So Keras is looked for under its old name meanwhile, which is rarely there, and TensorFlow does without it
    (tensorflow/__init__.py passes over the ImportError). `tf.keras` still works: it is imported when it is first used.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/dxg"):
        variables["CUDA_VISIBLE_DEVICES"] = "-1"  # without a GPU, looking for one ends in an error message in every log
    if deterministic:
        variables["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ.update(variables)
    chosen = os.environ.get(KERAS_CHOICE)
    os.environ.setdefault(KERAS_CHOICE, "1")
    try:
        import tensorflow  # noqa: F401
    finally:
        if chosen is None:
            del os.environ[KERAS_CHOICE]


def prepare(task: Task, job: Job, spec: ModelSpec) -> str:
    """Import and configure TensorFlow; return the device that computes, such as ``CPU:0``.

    Raises UsageError where a GPU is asked for, or the precision needs one, and a worker finds none. With GPUs, it takes the one of its
    local index, the only one where the agent shows it one alone, and lets memory grow (not tested on a real GPU).
    """
    import_tensorflow(deterministic=job.deterministic)
    import tensorflow as tf

    device = _choose_device(task, job)
    within_ops, of_ops = _op_threads(task, job, spec, device)
    tf.config.threading.set_intra_op_parallelism_threads(within_ops)
    tf.config.threading.set_inter_op_parallelism_threads(of_ops)
    if job.deterministic:
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if task.placed.role == "worker":
        from .precision import check_precision

        check_precision(job, device)
    return device


def _op_threads(task: Task, job: Job, spec: ModelSpec, device: str) -> tuple[int, int]:
    """Return the threads that an op computes with, and those that carry out ops at the same time.

    Steps in micro-batches have a thread for each. Else ops share the compute threads with those beside them: where one leaves a thread
    waiting, another goes on (AlexNet in bf16 and ResNet-18 make a tenth more steps on two threads). Only where nothing is gained by that,
    they are carried out one by one; a model without convolutions has the sequential executor for it (`SingleProcess`).
    """
    from .model import micro_batches_on

    if (micro_batches := micro_batches_on(device, job, spec, task.threads)) > 1:
        return 1, micro_batches
    if job.mode == "async" or job.wrapped:
        return task.threads, max(SERVER_INTER_OP_THREADS, task.threads)
    one_by_one = job.precision == "fp32" and spec.size > MOST_SIDE_BY_SIDE
    return task.threads, 1 if one_by_one else task.threads


def _choose_device(task: Task, job: Job) -> str:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if task.placed.role == "worker" and job.device == "gpu" and not gpus:
        raise UsageError("device: got 'gpu', but TensorFlow finds no GPU on this node; allowed here: auto, cpu. See: trainer doctor")
    if job.device == "cpu" or not gpus or task.placed.role != "worker":
        tf.config.set_visible_devices([], "GPU")
        return "CPU:0"
    gpu = gpus[task.local_index % len(gpus)]
    tf.config.set_visible_devices([gpu], "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)
    return "GPU:0"


def kind_of(device: str) -> Device:
    """Return what a device is called for people and in records."""
    return "gpu" if device.startswith("GPU") else "cpu"


def cluster_tasks(cluster: Cluster) -> dict[str, list[str]]:
    """Return TensorFlow's cluster description: the endpoints of each role in index order."""
    roles: dict[str, list[str]] = {}
    for placed in sorted(cluster.tasks, key=lambda placed: placed.index):
        host, port = cluster.endpoint(placed)
        roles.setdefault(placed.role, []).append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return roles


def set_tf_config(task: Task) -> Mapping[str, Any]:
    """Tell TensorFlow's own cluster resolver, by TF_CONFIG in this process, who takes part and who this task is."""
    config = {"cluster": cluster_tasks(task.cluster), "task": {"type": task.placed.role, "index": task.placed.index}}
    os.environ["TF_CONFIG"] = json.dumps(config)
    return config


def within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Return `call()`, or raise RunFailedError after `seconds`: TensorFlow itself waits an hour for a cluster to form.

    The call goes on in a daemon thread then, so the process has to end.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            failure.append(error)

    thread = threading.Thread(target=run, name=f"tf-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise RunFailedError(f"start_timeout: {what} took more than {seconds:g} s; does every task run, and do the nodes reach each other?")
    return outcome[0]


@contextmanager
def translated_errors(task: Task) -> Iterator[None]:
    """Raise OSError(EADDRINUSE) where TensorFlow's server could not listen on the task's reserved port.

    TensorFlow says which port and why in its log only; its error is the same for every reason to fail to start a server.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error):
            raise
        raise OSError(errno.EADDRINUSE, f"{task.name} cannot listen on port {task.port}") from error


def fits_single_threaded_executor(graph: Any) -> bool:
    """Return whether the sequential executor can carry out a traced function, a `tf.Graph`, without waiting for ever.

    An op that calls a function (a condition, a case, a partitioned call) has it carried out by the pool of threads for ops, and the
    sequential executor waits for it, itself on a thread of that pool: of a pool of one thread that is the last, and nested calls use up a
    larger one. A loop alone is carried out in place.
    """
    definition = graph.as_graph_def()
    nodes = itertools.chain(definition.node, *(function.node_def for function in definition.library.function))
    return not any(
        node.op not in CALLED_IN_PLACE and any(value.HasField("func") or value.list.func for value in node.attr.values()) for node in nodes
    )


@contextmanager
def single_threaded_executor() -> Iterator[None]:
    """Trace and run functions on TensorFlow's sequential executor, which hands no op over to another thread.

    Ops keep their compute threads. A loop of small ops runs a third faster (logistic regression, 784 features, batch 10).
    TensorFlow has no public switch for it.
    """
    from tensorflow.python.eager import context

    running = context.context()
    before = running.function_call_options
    options = copy.copy(before)
    options.executor_type = "SINGLE_THREADED_EXECUTOR"
    running.function_call_options = options
    try:
        yield
    finally:
        running.function_call_options = before
