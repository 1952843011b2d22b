"""Specs of imported models, from descriptions that a process with torch or Keras writes.

This process imports no framework.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import MissingPackageError, UsageError
from ...core.plugins import installed_release
from ...data.base import DataInfo, ImageFeatures, TextFeatures
from ...data.store.location import cache_root
from ...metrics.base import ACCURACY
from ..base import ParameterSpec
from ..build import split_arguments
from ..objectives import CLASSIFICATION, COUNTED, LOSS_SUM, Objective
from .description import OWN_LOSS, VERSION, Description, Imported, ImportedSpec, local_digests, read_description, source_digest
from .reference import HF, Reference, read_reference
from .requests import DataFacts, InputColumn, Request, ask

NUMBERS_PER_POSITION = 4_096  # by which evaluations of sequences are cut; BERT's widest layer has 3,072


class Importer:
    """Builds and names imported models; the plugin object behind every reference."""

    def __call__(self, text: str, data: DataInfo) -> ImportedSpec:
        """Return the spec of a model ``REFERENCE[?key=value&…]`` for this data. Raises UsageError."""
        reference, arguments = read_reference(text.partition("?")[0]), _arguments(text)
        named = {"framework": framework_of(reference.imports()), "reference": reference.text, "arguments": arguments}
        facts: dict[str, Any] = {**named, "data": data_facts(data), "outputs": outputs(data)}
        folder = _folder(reference, facts)
        description = read_description(folder)
        if description is None:
            ask(Request(**facts, seed=0, folder=str(folder), describe=True))
            description = read_description(folder)
            if description is None:
                raise UsageError(f"model: a source of {reference.text} changed while it was read. Try again.")
        return _spec(reference.text, facts, folder, description, data)

    def canonical(self, text: str) -> str:
        """Return a model's text with an absolute path. Raises UsageError."""
        base, question_mark, rest = text.partition("?")
        _arguments(text)
        return read_reference(base).text + question_mark + rest


def _arguments(text: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for key, value in split_arguments(text, sized=False):
        if key in arguments:
            raise UsageError(f"model: got {key!r} twice in {text!r}; give it once.")
        arguments[key] = value
    return arguments


def framework_of(imports: Set[str]) -> str:
    """Return what a model is written in, by what its sources import: Keras if no torch."""
    return "keras" if imports & {"keras", "tensorflow"} and not imports & {"torch", "torchvision"} else "torch"


def _folder(reference: Reference, facts: Mapping[str, Any]) -> Path:
    """Return the folder of a description, by sources and releases of packages."""
    framework = facts["framework"]
    release = installed_release(framework)
    if release is None:
        needs = "an nn.Module needs torch, also to be trained on TensorFlow" if framework == "torch" else "a Keras model needs keras"
        raise MissingPackageError(f"model: {needs}. Install it with: pip install 'crosstrain[{framework}]'")
    package = installed_release(reference.package) if reference.package else None
    if reference.kind == HF and package is None:
        raise MissingPackageError(f"model: {reference.text} needs transformers. Install it with: pip install 'crosstrain[hf]'")
    key = json.dumps([VERSION, msgspec.to_builtins(facts), release, package, local_digests(reference)], sort_keys=True)
    return cache_root() / "imported-models" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _spec(reference: str, facts: Mapping[str, Any], folder: Path, description: Description, data: DataInfo) -> ImportedSpec:
    inputs = tuple(facts["data"].tensors(description.inputs))
    settings = Imported(
        reference,
        folder,
        inputs,
        description.measured,
        tuple(description.kernels),
        tuple(description.dropouts),
        facts,
        tuple(description.parameters),
        tuple(description.buffers),
    )
    images = isinstance(data.features, ImageFeatures)
    return ImportedSpec(
        name=reference,
        parameters=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.parameters.items()),
        input_shape=data.input_shape if images else (),
        classes=0 if description.has_loss else data.features.classes,
        multiply_adds=description.multiply_adds,
        buffers=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.buffers.items()),
        dropout=bool(description.dropouts or description.problems),
        objective=_objective(description),
        inputs=tuple(description.inputs),
        target=data.target or description.inputs[0],
        logits_per_position=NUMBERS_PER_POSITION if any(data.column(name).varies for name in description.inputs) else 0,
        settings=settings,
        problems=description.problems,
        source=source_digest(description.sources),
        aliases=description.aliases,
        unsaved=tuple(description.unsaved),
        framework=facts["framework"],
    )


def _objective(description: Description) -> Objective:
    if not description.has_loss:
        return CLASSIFICATION  # stands for the loss of the job, or of the data
    sums, metrics = ((LOSS_SUM, COUNTED, "correct"), (ACCURACY,)) if description.measured else ((LOSS_SUM, COUNTED), ())
    return Objective("own loss", OWN_LOSS, sums, metrics)


def data_facts(data: DataInfo) -> DataFacts:
    """Return what a module may know about the data."""
    features = data.features
    limits = dict(features.vocabulary_sizes) if isinstance(features, TextFeatures) else {}
    limits[data.target] = features.classes
    columns = (InputColumn(column.name, column.dtype, column.shape, limits.get(column.name, 0)) for column in data.columns)
    return DataFacts(tuple(columns), data.target)


def outputs(data: DataInfo) -> int:
    """Return how many outputs an example has; 0 for a single number."""
    if data.features.classes or not data.target:
        return data.features.classes
    return math.prod(data.column(data.target).fixed_shape) if data.column(data.target).shape else 0


IMPORTER = Importer()
