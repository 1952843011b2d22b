"""Modules of the package transformers from a configuration file.

Nothing is downloaded, and only classes of the package itself are built: https://huggingface.co/docs/transformers
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ....core.bounded_json import UnreadableError, read_json
from ....core.errors import UsageError
from ....core.suggestions import did_you_mean
from ....data.text import PADDING
from ..reference import Reference

MAX_LAYERS = 1_000
MAX_SIZE = 1 << 24  # of any whole number in a configuration
# Fields that import code, or read weights from elsewhere.
_REFUSED = frozenset(
    [
        "attn_implementation",
        "_attn_implementation",
        "auto_map",
        "backbone",
        "backbone_kwargs",
        "custom_pipelines",
        "kernel_config",
        "quantization_config",
        "trust_remote_code",
        "use_pretrained_backbone",
        "use_timm_backbone",
    ]
)
_LEFT_OUT = frozenset(("torch_dtype", "dtype", "return_dict", "use_cache", "architectures"))  # set here
# Fields of a configuration that get a fact of the data, if it has it, unless they are given as arguments.
_FACTS = {"num_labels": "outputs", "vocab_size": "vocabulary", "image_size": "side", "num_channels": "channels"}


def configured(
    reference: Reference, arguments: Mapping[str, str], facts: Mapping[str, Any], value: Callable[[str, str, Any], Any]
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the module of a file's first architecture.

    `value` reads the text of the argument of a name, with the field's present value. Raises UsageError for a file that is not such a
    configuration, or would run other code.
    """
    fields = _checked(reference)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import transformers  # after the variables, and only for such references

    architectures = fields.get("architectures")
    name = arguments.get("architectures") or (architectures[0] if isinstance(architectures, list) and architectures else None)
    known: Any = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    is_model = isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)
    kind: Any = getattr(known, "config_class", None) if is_model else None
    if kind is None:
        near = did_you_mean(str(name), dir(transformers))
        raise UsageError(f"model: {reference.text} has the architecture {name!r}, which is no model class of transformers.{near}")
    if fields.get("model_type", kind.model_type) != kind.model_type:
        raise UsageError(f"model: {reference.text} is of the model_type {fields['model_type']!r}, and {name} of {kind.model_type!r}.")
    config = kind.from_dict({key: part for key, part in fields.items() if key not in _LEFT_OUT})
    settable = config.to_dict() | {
        alias: getattr(config, alias) for alias in ("num_labels", *config.attribute_map) if hasattr(config, alias)
    }
    for key, text in arguments.items():
        if key == "architectures":
            continue
        if key not in settable or key in _REFUSED | _LEFT_OUT:
            raise UsageError.of(f"model: argument of {reference.text}", key, "a field of its configuration", settable)
        number = value(key, text, settable[key])
        _refuse_large(reference, key, number)
        setattr(config, key, number)
    for key, fact in _FACTS.items():
        if fact in facts and key in settable and key not in arguments:
            setattr(config, key, facts[fact])
    if "vocabulary" in facts:
        config.pad_token_id = PADDING  # of the batches, whatever a tokenizer had
    config.use_cache, config.return_dict, config.dtype = False, True, torch.float32
    return lambda: known(config)


def _checked(reference: Reference) -> Mapping[str, Any]:
    """Read the file's fields. Raises UsageError if it has none, or one that is refused."""
    try:
        fields = read_json(Path(reference.place))
    except (UnreadableError, OSError) as error:
        raise UsageError(f"model: {reference.text} cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        raise UsageError(f"model: {reference.text} is not a JSON object with the fields of a configuration.")
    for key, part in _every_field(fields):
        if key in _REFUSED and part:
            raise UsageError(f"model: {reference.text} has the field {key!r}, which may import code or read files elsewhere; take it out.")
        _refuse_large(reference, key, part)
    return fields


def _every_field(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in fields.items():
        yield key, part
        for inner in part if isinstance(part, list) else [part]:
            if isinstance(inner, dict):
                yield from _every_field(inner)


def _refuse_large(reference: Reference, key: str, part: Any) -> None:
    most = MAX_LAYERS if "layer" in key or "depth" in key else MAX_SIZE
    for number in part if isinstance(part, list) else [part]:
        if isinstance(number, int) and abs(number) > most:
            raise UsageError(f"model: {reference.text} has {key}={number!r:.40}; at most {most:,} is allowed.")
