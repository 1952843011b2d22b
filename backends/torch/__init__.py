"""PyTorch: DistributedDataParallel, and our own parameter server."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.cluster import Task, TaskSpec
from ...core.job import Job
from ...core.plugins import find
from ...data.base import Dataset
from ...models.base import Array, ModelSpec
from ..base import Availability, Server, Session, TensorFunctions, parameter_server_placement, ranks_placement
from ..capabilities import COMPLETE, ExportFormat
from ..export import Export

_ROW = find("backend", "torch")
EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    "torch": ExportFormat(
        "a state_dict and a program of torch.export that plain torch runs with any batch size",
        "import torch\n\n"
        'program = torch.export.load("program.pt2").module()\n'
        "logits = program(torch.zeros(IMAGES))  # normalised images, float32\n\n"
        'weights = torch.load("state_dict.pt", weights_only=True)  # by canonical name: torchvision\'s for its models\n'
        "# your_module.load_state_dict(weights)  # a module with these names",
        "a state_dict, and a program of torch.export that translates by greedy search (without a cache: slower than `trainer translate`)",
        "import sentencepiece\nimport torch\n\n"
        'vocabulary = sentencepiece.SentencePieceProcessor(model_file="vocabulary.model")\n'
        'program = torch.export.load("program.pt2").module()\n'
        'found = program(torch.tensor([vocabulary.encode("one", add_eos=True)])).tolist()[0]\n'
        "print(vocabulary.decode([piece for piece in found if piece > 2]))",
    )
}


class TorchBackend:
    """The backend called ``torch``."""

    name = "torch"
    capabilities = replace(
        COMPLETE,
        packages={_ROW.requires: _ROW.distributions},
        install=_ROW.install,
        gpu_install="install a CUDA build of torch, as its own site tells for your driver",
        export_formats=EXPORT_FORMATS,
    )

    def probe(self) -> Availability:
        """Import torch and list its devices."""
        if importlib.util.find_spec("torch") is None:
            return Availability(self.name, None, problem="torch is not installed", hint=_ROW.install)
        from .runtime import availability

        return availability(self.name, _ROW.install)

    def placement(self, job: Job) -> list[TaskSpec]:
        """Sync: one rank a worker. Async: the chief is the first parameter server."""
        return ranks_placement(job) if job.mode == "sync" else parameter_server_placement(job, chief_is_first_ps=True)

    def preload(self, job: Job) -> None:
        """Import torch, and the modules that every worker of the job needs."""
        if job.mode == "sync":
            from . import sync_session  # noqa: F401
        else:
            from ..parameter_server import worker  # noqa: F401
            from . import asynchronous  # noqa: F401

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up; see `Backend.open`."""
        from .runtime import prepare

        device = prepare(task, job)
        if job.mode == "sync":
            from .sync_session import SyncSession

            return SyncSession(task, job, model, data, device)
        from ..parameter_server.worker import open_task
        from .asynchronous import ChiefTranslating, FlatRule, TorchComputation

        translate = ChiefTranslating(job, model, data)
        compute = partial(TorchComputation, task, job, model, data, device=device)
        return open_task(task, job, model, data, FlatRule, compute, translate)

    def tensor_functions(self) -> TensorFunctions:
        """Import torch and return the conversions; see `HasTensors`."""
        from .model import TENSORS

        return TENSORS

    def replayed(self, job: Job, spec: ModelSpec, data: Dataset, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> Any:
        """Import the framework and return a model to compute layer by layer; see `Replays`."""
        from .replay import TorchPass

        return TorchPass(job, spec, data, parameters, buffers)

    def export(self, request: Export) -> None:
        """Write a trained model in one of the formats; see `Exporter`."""
        from .export import export

        export(request)


BACKEND = TorchBackend()
