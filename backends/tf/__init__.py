"""TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.cluster import Task, TaskSpec
from ...core.job import Job
from ...core.plugins import find
from ...data.base import Dataset
from ...models.base import Array, ModelSpec
from ..base import Availability, Server, Session, TensorFunctions, parameter_server_placement, ranks_placement
from ..capabilities import COMPLETE, ExportFormat
from ..export import Export

EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    "savedmodel": ExportFormat(
        "a SavedModel with a signature for normalised images and one for raw pixels",
        "import tensorflow as tf\n\n"
        'model = tf.saved_model.load(".")\n'
        'logits = model.signatures["serving_default"](images=tf.zeros(IMAGES))["logits"]  # normalised, float32\n'
        'logits = model.signatures["pixels"](images=tf.zeros(IMAGES, tf.uint8))["logits"]  # pixels 0 … 255',
        "a SavedModel that translates, by greedy search",
        "import sentencepiece\nimport tensorflow as tf\n\n"
        'vocabulary = sentencepiece.SentencePieceProcessor(model_file="vocabulary.model")\n'
        'model = tf.saved_model.load(".")\n'
        'pieces = tf.constant([vocabulary.encode("one", add_eos=True)], tf.int32)\n'
        'found = model.signatures["serving_default"](pieces=pieces)["pieces"].numpy().tolist()[0]\n'
        "print(vocabulary.decode([piece for piece in found if piece > 2]))",
    ),
    "tf-checkpoint": ExportFormat(
        "the weights as a checkpoint of tf.train.Checkpoint",
        "import json\n\n"
        "import tensorflow as tf\n\n"
        'described = json.load(open("model.json"))\n'
        'weights = {name: tf.Variable(tf.zeros(shape)) for name, shape in described["parameters"] + described["buffers"]}\n'
        'tf.train.Checkpoint(**weights).read("weights").assert_consumed()',
    ),
}

_ROW = find("backend", "tf")


class TfBackend:
    """Implements `Backend`."""

    name: str = "tf"
    capabilities = replace(
        COMPLETE,
        packages={_ROW.requires: _ROW.distributions},
        install=_ROW.install,
        gpu_install="pip install 'tensorflow[and-cuda]'",
        host_network_warning=(
            "TensorFlow's servers listen on every interface of this machine without authentication: run this on a trusted network only"
        ),
        export_formats=EXPORT_FORMATS,
    )

    def probe(self) -> Availability:
        """Import TensorFlow and list its devices."""
        from .runtime import import_tensorflow

        try:
            import_tensorflow(deterministic=False)
        except ImportError as error:
            return Availability(self.name, None, problem=f"tensorflow cannot be imported: {error}", hint=self.capabilities.install)
        import tensorflow as tf

        gpus = enumerate(tf.config.list_physical_devices("GPU"))
        details: list[Mapping[str, Any]] = [tf.config.experimental.get_device_details(gpu) for _, gpu in gpus]
        names = [f"gpu:{index} {detail.get('device_name', 'unknown model')}" for index, detail in enumerate(details)]
        return Availability(self.name, tf.__version__, devices=("cpu", *names))

    def placement(self, job: Job) -> list[TaskSpec]:
        """Place ranks in sync mode; chief, parameter servers and workers in async mode.

        The chief holds no parameters.
        """
        if job.mode == "sync":
            return ranks_placement(job)
        return parameter_server_placement(job, chief_is_first_ps=False)

    def preload(self, job: Job) -> None:
        """Import TensorFlow with its environment set, and the modules that the job's workers need."""
        from .runtime import import_tensorflow

        import_tensorflow(deterministic=job.deterministic)
        if job.mode == "sync":
            from .sync import session  # noqa: F401
        else:
            from .asynchronous import shards  # noqa: F401

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up; see `Backend.open`."""
        from .runtime import prepare

        device = prepare(task, job, model)
        if job.mode == "sync":
            from .sync.session import open_sync

            return open_sync(task, job, model, data, device)
        if task.placed.leading:
            from .asynchronous.session import open_chief

            return open_chief(task, job, model, data)
        from .asynchronous.worker import open_server

        return open_server(task, job, model, data, device)

    def tensor_functions(self) -> TensorFunctions:
        """Import TensorFlow and return the conversions; see `HasTensors`."""
        from .runtime import import_tensorflow

        import_tensorflow(deterministic=True)
        from .model import TENSORS

        return TENSORS

    def replayed(self, job: Job, spec: ModelSpec, data: Dataset, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> Any:
        """Import the framework and return a model to compute layer by layer; see `Replays`."""
        from .runtime import import_tensorflow

        import_tensorflow(deterministic=job.deterministic)
        from .replay import TfPass

        return TfPass(job, spec, data, parameters, buffers)

    def export(self, request: Export) -> None:
        """Write a trained model in one of the formats; see `Exporter`."""
        from .export import export

        export(request)


BACKEND = TfBackend()
