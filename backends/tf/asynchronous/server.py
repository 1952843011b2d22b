"""An async worker or parameter server: a TensorFlow server that waits in Python, so that signals keep working."""

from __future__ import annotations

import threading

import tensorflow as tf

from ....core.cluster import Task
from ....core.job import Job
from ....data.base import Dataset
from ....models.base import ModelSpec
from ...capabilities import Device
from ..data import layout_for, with_mapped_files
from ..precision import precision_used
from ..runtime import SERVER_INTER_OP_THREADS, cluster_tasks, kind_of, translated_errors
from . import dataset_handover

__all__ = ["TfServer", "open_server"]


def open_server(task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str) -> TfServer:
    """Start serving; a worker first lays its dataset out for the ops. Raises OSError(EADDRINUSE) where the port was taken."""
    if task.placed.role == "worker":
        dataset_handover.publish(data, with_mapped_files(layout_for(job, spec, data.info), data))
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=task.threads, inter_op_parallelism_threads=max(SERVER_INTER_OP_THREADS, task.threads)
    )
    if device.startswith("GPU"):
        config.gpu_options.visible_device_list = str(task.local_index % len(tf.config.list_physical_devices("GPU")))
        config.gpu_options.allow_growth = True
    else:
        config.device_count["GPU"] = 0
    with translated_errors(task):
        server = tf.distribute.Server(
            cluster_tasks(task.cluster), job_name=task.placed.role, task_index=task.placed.index, protocol="grpc", config=config
        )
    return TfServer(server, precision_used(job.precision, device), kind_of(device))


class TfServer:
    """Implements `Server`. The TensorFlow server lives as long as the process: it cannot be stopped, and its `join` never returns."""

    def __init__(self, server: tf.distribute.Server, precision_used: str, device_used: Device) -> None:
        self._server = server
        self.precision_used, self.device_used = precision_used, device_used

    def serve(self, stop: threading.Event) -> None:
        """Wait until `stop` is set. TensorFlow's chief has no message that ends a server; whoever started the process does that."""
        stop.wait()
