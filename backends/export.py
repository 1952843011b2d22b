"""Export of trained models to other formats, in a separate process with one framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from ..checkpoint import Meta, read_checkpoint
from ..checkpoint.files import header
from ..checkpoint.meta import trained_vocabulary
from ..checkpoint.reader import rebuilt_model
from ..checkpoint.selection import ChosenWeights
from ..core.errors import TrainerError, UsageError
from ..core.process import die_with_parent
from ..models.base import Array, ModelSpec
from ..models.decoding import GREEDY
from ..models.imported.description import ImportedSpec
from ..models.imported.keras.weights_file import WEIGHTS_FILE, write_weights_file
from ..models.imported.reference import read_reference
from ..models.losses import BINARY, MULTI_LABEL
from ..records.store.run_directory import RunReader
from ..records.store.vocabulary import VOCABULARY
from .capabilities import ExportFormat
from .loading import load_backend


def text_description(meta: Meta) -> dict[str, object]:
    """Return ``model.json``'s description of input and output."""
    return {
        "languages": list(meta.data.get("languages", ())),
        "vocabulary": VOCABULARY,
        "vocabulary_sizes": meta.data["vocabulary_sizes"],
        "input": "pieces, whole numbers [batch, length]; each row ends with END (2), padding (0) behind it",
        "output": f"pieces, whole numbers [batch, length + {GREEDY.extra_length}]; each row ends with END, padding behind it",
        "input_name": "pieces",
        "search": GREEDY.signature,
    }


def translation_signature(chosen: ChosenWeights) -> str | None:
    """Return what the scores of these weights are comparable with, None if unknown.

    Raises DamagedRunError.
    """
    run = chosen.path.parent.parent
    if chosen.metrics is None or not (run / "job.json").exists():
        return None
    recorded: dict[str, str | None] = RunReader(run).job().get("translation_signatures") or {}
    return recorded.get("training")


def text_readme(meta: Meta, made_of: str, export_format: str, written: ExportFormat) -> str:
    """Return the README; `made_of` describes how the weights were made, apart from updates."""
    languages = " to ".join(meta.data.get("languages", ()))
    return (
        f"# {meta.job['model']} as {export_format}\n\n"
        f"This folder holds {written.text_summary or written.summary}. It was trained on {meta.data['name']} ({languages}) by `trainer`\n"
        f"with {meta.step:,} updates.{made_of}\n\n"
        f"Text becomes pieces, and pieces text, by `{VOCABULARY}`, a model of sentencepiece. `model.json` says what is put in and comes\n"
        "out, and has the names and shapes of all weights.\n\n"
        f"```python\n{written.text_usage or written.usage}\n```\n"
    )


PLAIN = "-"  # no backend
DESCRIPTION = "model.json"
README = "README.md"
SAFETENSORS = "model.safetensors"
IMAGES, LOGITS = "images", "logits"  # in every format that has programs


@dataclass(frozen=True, slots=True)
class Export:
    """Model to export into an empty `folder`, with canonical arrays.

    `model_name` finds the forward function; `mean`, `std` only of images.
    """

    format: str
    folder: Path
    model_name: str
    model: ModelSpec
    parameters: Mapping[str, Array]
    buffers: Mapping[str, Array]
    updates: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@runtime_checkable
class Exporter(Protocol):
    """The further interface of a backend with export formats."""

    def export(self, request: Export) -> None:
        """Write the files of a format. May import the framework: runs in a separate process."""


KERAS = "keras"
PLAIN_FORMATS: Mapping[str, ExportFormat] = {
    "safetensors": ExportFormat(
        "the weights alone, for any framework that reads safetensors",
        'from safetensors.numpy import load_file\n\nweights = load_file("model.safetensors")  # by canonical name',
    ),
    KERAS: ExportFormat(
        "the weights of a Keras model, for the function or class that it was made with",
        "",  # see `_for_imported`
    ),
}


def _for_imported(spec: ImportedSpec, export_format: str, written: ExportFormat) -> ExportFormat:
    """Return how a user's own model takes its weights back."""
    reference = read_reference(spec.settings.reference)
    module = Path(reference.place).stem if reference.kind == "file" else reference.place
    arguments = ", ".join(f"{name}={value}" for name, value in spec.settings.request["arguments"].items())
    call = f"{module}.{reference.attribute}"
    how = f"call it as in training{f', with {arguments}' if arguments else ''}"
    made = f"import {module}  # the file of your model\n\nmodel = {call}  # {how}\n"
    if export_format == KERAS:
        return replace(
            written, usage=f'{made}# a model without fixed inputs is built by its first call\nmodel.load_weights("{WEIGHTS_FILE}")'
        )
    if spec.framework != "torch" or reference.kind not in ("file", "module"):
        return written
    load = f'model.load_state_dict(load_file("{SAFETENSORS}"), strict=False)  # further names of tied weights, and counters, are left out'
    return replace(written, usage=f"from safetensors.torch import load_file  # pip install safetensors\n{made}{load}")


def export_plain(request: Export, description: Mapping[str, object]) -> None:
    """Write parameters and buffers as ``model.safetensors``, or in the format of Keras.

    Other entries of `description` become its metadata, as text or JSON. Raises UsageError if the model is not of Keras.
    """
    if request.format == KERAS:
        if not (isinstance(request.model, ImportedSpec) and request.model.settings.is_keras):
            raise UsageError(f"--format: {request.model_name} is no Keras model. Choose safetensors.")
        write_weights_file(request.model.settings, request.parameters, request.buffers, request.folder)
        return
    described_here = {key: value for key, value in description.items() if key not in ("format", "parameters", "buffers")}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in described_here.items()}
    arrays = {**request.parameters, **request.buffers}
    described = [(name, array.dtype.str, array.shape, array.nbytes) for name, array in arrays.items()]
    with open(request.folder / SAFETENSORS, "xb") as file:
        file.write(header(described, {"format": "np", **metadata}))
        for array in arrays.values():
            file.write(array.data)


def export_weights(backend: str, export_format: str, chosen: ChosenWeights, folder: Path) -> None:
    """Export weights into an empty folder, with ``model.json`` and a README."""
    meta = chosen.meta
    spec = rebuilt_model(meta)
    translates = spec.objective.translation is not None
    images = "columns" not in meta.data
    if not (images or translates or backend == PLAIN):
        read = ", ".join(column["name"] for column in meta.data["columns"])
        raise UsageError(
            f"--format: only models of images and of translations are exported, and {meta.job['model']!r} reads {read}. "
            "--format safetensors writes its weights."
        )
    vocabulary = trained_vocabulary(chosen.path, meta) if translates else None
    request = Export(
        format=export_format,
        folder=folder,
        model_name=meta.job["model"],
        model=spec,
        parameters=chosen.parameters(),
        buffers=chosen.buffers(),
        updates=meta.step,
        mean=tuple(meta.data["mean"]) if images else (),
        std=tuple(meta.data["std"]) if images else (),
    )
    described = _image_description(meta, export_format) if images else text_description(meta) if translates else _column_description(meta)
    description = _description(chosen, export_format, described)
    if backend == PLAIN:
        written = PLAIN_FORMATS[export_format]
        if isinstance(spec, ImportedSpec):
            written = _for_imported(spec, export_format, written)
        export_plain(request, description)
    else:
        spec.refuse_program()
        exporter = load_backend(backend)
        formats = exporter.capabilities.export_formats
        if export_format not in formats:
            raise UsageError.of("--format", export_format, f"{', '.join(formats) or 'none'} on backend {backend}", formats)
        written = formats[export_format]
        cast(Exporter, exporter).export(request)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    made_of = _made_of(chosen)
    readme = (_readme if images else text_readme if translates else _column_readme)(meta, made_of, export_format, written)
    (folder / README).write_text(readme, encoding="utf-8")
    if vocabulary is not None:
        (folder / VOCABULARY).write_bytes(vocabulary)


def _description(chosen: ChosenWeights, export_format: str, described: Mapping[str, object]) -> dict[str, object]:
    meta = chosen.meta
    return {
        "schema": 1,
        "format": export_format,
        "model": meta.job["model"],
        **described,
        "parameters": meta.model["parameters"],
        "buffers": meta.model["buffers"],
        "trained_on": meta.data["name"],
        "synthetic": meta.data.get("synthetic", False),
        "trained_by": meta.backend,
        "updates": meta.step,
        "averaged_checkpoints": chosen.averaged,
        "weights": chosen.weights,
        "metrics": chosen.metrics,
        **({"translation_signature": translation_signature(chosen)} if "languages" in described else {}),
    }


def _column_description(meta: Meta) -> dict[str, object]:
    names = ("columns", "target", "classes", "class_names", "vocabulary_sizes", "mean", "std")
    return {name: meta.data[name] for name in names if name in meta.data}


def _column_readme(meta: Meta, made_of: str, export_format: str, written: ExportFormat) -> str:
    return (
        f"# {meta.job['model']} as {export_format}\n\n"
        f"This folder holds {written.summary}. It was trained on {meta.data['name']} by `trainer` with {meta.step:,} updates."
        f"{made_of}\n\n"
        f"`{DESCRIPTION}` has the columns that it reads, the mean and std of those that are normalised as (x − mean) / std, and the names\n"
        "and shapes of all weights.\n\n"
        f"```python\n{written.usage}\n```\n"
    )


def _image_description(meta: Meta, export_format: str) -> dict[str, object]:
    channels, *sides = meta.data["input_shape"]
    last = export_format == KERAS
    return {
        "classes": meta.data["classes"],
        "class_names": meta.data.get("class_names") or [str(number) for number in range(meta.data["classes"])],
        "input_shape": [*sides, channels] if last else meta.data["input_shape"],
        "input_layout": "NHWC" if last else "NCHW",
        "mean": meta.data["mean"],
        "std": meta.data["std"],
        "normalisation": "(pixel / 255 - mean[channel]) / std[channel], float32",
        "input_name": IMAGES,
        "output": f"logits, float32 [batch, {'1' if meta.job.get('loss') == BINARY else 'classes'}]",
        "output_name": LOGITS,
    }


def _made_of(chosen: ChosenWeights) -> str:
    """Return the sentences on averaged weights, each after a space; empty without an average."""
    count = len(chosen.checkpoints)
    mean = f" The weights are the mean of {count} checkpoints." if count > 1 else ""
    subject = "They" if count > 1 else "The weights"
    ema = f" {subject} are a moving average over the updates." if chosen.weights == "ema" else ""
    return mean + ema


def _readme(meta: Meta, made_of: str, export_format: str, written: ExportFormat) -> str:
    channels, height, width = meta.data["input_shape"]
    usage = written.usage.replace("IMAGES", f"(1, {channels}, {height}, {width})")
    outputs, whose = (1, "class 1") if meta.job.get("loss") == BINARY else (meta.data["classes"], "each class")
    function = "sigmoid" if meta.job.get("loss") in (BINARY, MULTI_LABEL) else "softmax"
    layout, shape = "channels first", f"[batch, {channels}, {height}, {width}]"
    result = f"logits, [batch, {outputs}];\ntheir {function} is the probability of {whose}"
    if export_format == KERAS:
        layout, shape = "channels last", f"[batch, {height}, {width}, {channels}]"
        result = f"what the model returns, [batch, {outputs}]:\nlogits, or probabilities if its last layer makes them"
    return (
        f"# {meta.job['model']} as {export_format}\n\n"
        f"This folder holds {written.summary}. It was trained on {meta.data['name']} by `trainer` with {meta.step:,} updates."
        f"{made_of}\n\n"
        f"Input: images, {shape}, {layout}, pixels normalised as (pixel / 255 − mean) / std with\n"
        f"mean {meta.data['mean']} and std {meta.data['std']}, a number a channel. Output: {result}.\n"
        f"`{DESCRIPTION}` says the same for programs, and has the names and shapes\n"
        "of all weights.\n\n"
        f"```python\n{usage}\n```\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a model; an error for users goes to the file ERROR, and its exit code is returned.

    Frameworks log to standard error.
    """
    backend, export_format, weights, folder, errors, parent, *paths = sys.argv[1:] if arguments is None else arguments
    die_with_parent(int(parent))
    try:
        chosen = ChosenWeights(tuple(read_checkpoint(Path(path)) for path in paths), "ema" if weights == "ema" else "trained")
        export_weights(backend, export_format, chosen, Path(folder))
    except TrainerError as error:
        Path(errors).write_text(str(error), encoding="utf-8")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
