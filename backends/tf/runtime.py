"""Configuration of TensorFlow in a task.

The environment is set before its import, the rest before the first op.
"""

from __future__ import annotations

import errno
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from ...core.cluster import Cluster, Task
from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...models.base import Array, ModelSpec
from ..base import State
from ..capabilities import Device, check_precision
from ..compiling import call_in_thread
from ..vectors import each_value

Result = TypeVar("Result")
KERAS_CHOICE = "TF_USE_LEGACY_KERAS"
SERVER_INTER_OP_THREADS = 2  # one may wait for a message
CALLED_IN_PLACE = frozenset(("While", "StatelessWhile"))  # run on the sequential executor's own thread (WhileOp::DoComputeSync)
MAX_SIDE_BY_SIDE = 1 << 25  # parameters; parallel float32 ops of larger models take up to 0.4 GB more (AlexNet)


def import_tensorflow(*, deterministic: bool) -> None:
    """Import TensorFlow with its environment set. Raises ImportError.

    oneDNN's order of summation depends on the batch, so `deterministic` switches it off. Importing Keras takes two fifths of the time
    and a quarter of the memory, so TensorFlow looks for it under its old, rarely installed name; `tf.keras` is imported on first use.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/dxg"):
        variables["CUDA_VISIBLE_DEVICES"] = "-1"  # without a GPU, the search for one logs an error
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
    """Import and configure TensorFlow; return the device, such as ``CPU:0``.

    Raises UsageError if a required GPU is missing.
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
        check_precision(job, gpu=device.startswith("GPU"))
    return device


def _op_threads(task: Task, job: Job, spec: ModelSpec, device: str) -> tuple[int, int]:
    """Return the threads within an op and those for parallel ops.

    Parallel ops make AlexNet in bf16 and ResNet-18 a tenth faster.
    """
    from .model import micro_batches_on

    if (micro_batches := micro_batches_on(device, job, spec, task.threads)) > 1:
        return 1, micro_batches
    if job.mode == "async" or job.wrapped:
        return task.threads, max(SERVER_INTER_OP_THREADS, task.threads)
    one_by_one = job.precision == "fp32" and spec.size > MAX_SIDE_BY_SIDE
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


def device_kind(device: str) -> Device:
    """Return a device's name in records."""
    return "gpu" if device.startswith("GPU") else "cpu"


def cluster_tasks(cluster: Cluster) -> dict[str, list[str]]:
    """Return TensorFlow's cluster description: the endpoints of each role in index order."""
    roles: dict[str, list[str]] = {}
    for placed in sorted(cluster.tasks, key=lambda placed: placed.index):
        host, port = cluster.endpoint(placed)
        roles.setdefault(placed.role, []).append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return roles


def set_tf_config(task: Task) -> None:
    """Set TF_CONFIG in this process for TensorFlow's own cluster resolver."""
    config = {"cluster": cluster_tasks(task.cluster), "task": {"type": task.placed.role, "index": task.placed.index}}
    os.environ["TF_CONFIG"] = json.dumps(config)


def call_within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Return `call()`; raise RunFailedError after `seconds`.

    The process then has to end, as the call continues in a thread.
    """
    future = call_in_thread(call, f"tf-{what}")
    if wait([future], seconds).not_done:
        raise RunFailedError(f"start_timeout: {what} took more than {seconds:g} s; does every task run, and do the nodes reach each other?")
    return future.result()


@contextmanager
def translated_errors(task: Task) -> Iterator[None]:
    """Raise OSError(EADDRINUSE) for a port that TensorFlow's server cannot use.

    Its own error does not give the reason.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error):
            raise
        raise OSError(errno.EADDRINUSE, f"{task.name} cannot listen on port {task.port}") from error


def fits_single_threaded_executor(graph: Any) -> bool:
    """Return whether a `tf.Graph` runs on the sequential executor.

    Functions called by ops other than loops may deadlock.
    """
    definition = graph.as_graph_def()
    nodes = itertools.chain(definition.node, *(function.node_def for function in definition.library.function))
    return not any(
        node.op not in CALLED_IN_PLACE and any(value.HasField("func") or value.list.func for value in node.attr.values()) for node in nodes
    )


def single_threaded_executor() -> Any:
    """Return a context in which functions run on TensorFlow's sequential executor.

    That is a third faster for logistic regression (784 features, batch 10). Trace them in it, too.
    """
    from tensorflow.python.eager import context

    return context.function_executor_type("SINGLE_THREADED_EXECUTOR")


COPY_THREADS = 2  # one does not use the whole memory bandwidth
PIECE_ELEMENTS = 1 << 22  # floats per copy, so that threads share a large parameter
PERMUTED_ELEMENTS = 1 << 18  # the same in another element order, which is slower


def copy_all(pairs: Iterable[tuple[Array, Array]]) -> None:
    """Copy each second array into the first, in threads.

    Targets are contiguous; sources may be in another order.
    """
    pieces = [piece for target, source in pairs for piece in _pieces(target, source)]
    with ThreadPoolExecutor(COPY_THREADS) as threads:
        for _ in threads.map(lambda pair: np.copyto(*pair), pieces):
            pass  # a failed copy raises here


def _pieces(target: Array, source: Array) -> Iterator[tuple[Array, Array]]:
    """Cut both arrays into the same pieces.

    A source in another order is cut along its first axis only, since its flat view is a copy.
    """
    if source.flags.c_contiguous:
        target, source, step = target.reshape(-1), source.reshape(-1), PIECE_ELEMENTS
    else:
        target = target.reshape(source.shape)
        step = max(1, PERMUTED_ELEMENTS * len(source) // source.size)
    for first in range(0, len(source), step):
        yield target[first : first + step], source[first : first + step]


def checked_values(spec: ModelSpec, slots: Sequence[str], state: State) -> list[Array | None]:
    """Return `vectors.each_value`.

    Raises ValueError, naming the value, if a state does not fit the model or optimiser.
    """
    strangers = sorted(set(state.slots) - set(slots))
    if strangers:
        raise ValueError(f"the given state has slots {', '.join(strangers)}; this optimiser has {', '.join(slots) or 'none'}")
    return list(each_value(spec, slots, state))
