"""Specs of imported models, from descriptions that a process with torch writes.

This process imports no framework.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...core.errors import MissingPackageError, UsageError
from ...data.base import IMAGE, LABEL, DataInfo
from ...data.store.location import cache_root
from ..base import ParameterSpec
from ..build import split_arguments
from .description import VERSION, Description, Imported, ImportedSpec, local_digests, read_description, source_digest
from .reference import Reference, read_reference
from .requests import Request, ask


class Importer:
    """Builds and names imported models; the plugin object behind every reference."""

    def __call__(self, text: str, data: DataInfo) -> ImportedSpec:
        """Return the spec of a model ``REFERENCE[?key=value&…]`` for this data. Raises UsageError."""
        reference, arguments = read_reference(text.partition("?")[0]), _arguments(text)
        shape, classes = list(data.input_shape), data.classes
        facts: dict[str, Any] = {"reference": reference.text, "arguments": arguments, "shape": shape, "classes": classes}
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


def _folder(reference: Reference, facts: Mapping[str, Any]) -> Path:
    """Return the folder of a description, by sources and releases of packages."""
    torch = _release("torch")
    if torch is None:
        raise MissingPackageError(
            "model: an nn.Module needs torch, also to be trained on TensorFlow. Install it with: pip install 'crosstrain[torch]'"
        )
    sources = local_digests(reference) or _release(reference.place.partition(".")[0])
    key = json.dumps([VERSION, facts, torch, sources], sort_keys=True)
    return cache_root() / "imported-models" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _spec(reference: str, facts: Mapping[str, Any], folder: Path, description: Description, data: DataInfo) -> ImportedSpec:
    settings = Imported(reference, folder, (IMAGE,), tuple(description.kernels), tuple(description.dropouts), facts)
    return ImportedSpec(
        name=reference,
        parameters=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.parameters.items()),
        input_shape=data.input_shape,
        classes=data.classes,
        multiply_adds=description.multiply_adds,
        buffers=tuple(ParameterSpec(name, tuple(shape)) for name, shape in description.buffers.items()),
        dropout=bool(description.dropouts or description.problems),
        inputs=(IMAGE,),
        target=LABEL,
        settings=settings,
        problems=description.problems,
        source=source_digest(description.sources),
    )


IMPORTER = Importer()
