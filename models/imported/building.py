"""Find what a reference names, and its arguments; imports the user's code alone."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import TrainerError, UsageError, raised
from ...core.suggestions import did_you_mean
from ...core.units import decimal_number
from ...data.base import IMAGE
from .reference import Reference
from .requests import DataFacts

# Parameters of constructors that get a fact of the data, if it has it, unless they are given.
_FACTS: Mapping[str, str] = {
    **dict.fromkeys(("classes", "num_classes", "n_classes", "num_labels", "out_features", "output_dim"), "outputs"),
    **dict.fromkeys(("features", "in_features", "num_features", "n_features", "input_dim", "in_dim"), "features"),
    **dict.fromkeys(("vocab_size", "vocabulary_size", "num_embeddings", "num_tokens", "n_tokens"), "vocabulary"),
    **dict.fromkeys(("channels", "in_channels", "in_chans", "num_channels", "input_channels"), "channels"),
    **dict.fromkeys(("input_shape", "image_shape", "in_shape"), "shape"),
    **dict.fromkeys(("image_size", "img_size"), "side"),
}


def found(reference: Reference) -> Any:
    """Import what a reference names. Raises UsageError."""
    module = _imported(reference)
    value: Any = module
    for name in reference.attribute.split("."):
        if not hasattr(value, name):
            public = [known for known in vars(value) if not known.startswith("_")]
            raise UsageError(f"model: {reference.place} has no {reference.attribute!r}.{did_you_mean(name, public)}")
        value = getattr(value, name)
    return value


def _imported(reference: Reference) -> ModuleType:
    try:
        if reference.kind != "file":
            return importlib.import_module(reference.place)
        path = Path(reference.place)
        name = path.stem
        if (known := sys.modules.get(name)) is not None and getattr(known, "__file__", None) == str(path):
            return known
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"model: {str(path)!r} cannot be imported.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except TrainerError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"model: {reference.place} cannot be imported: there is no module {error.name!r}.") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"model: {reference.place} cannot be imported: {raised(error)}.") from error
    return module


def constructed(reference: Reference, build: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call what a reference names. Raises UsageError for any exception."""
    try:
        return build(**values)
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise UsageError(f"model: {reference.text}({shown}) fails: {raised(error)}.") from error


def facts_of(data: DataFacts, outputs: int) -> dict[str, Any]:
    """Return the facts of the data by name; `features`: numbers of an example of a table."""
    facts: dict[str, Any] = {"outputs": max(1, outputs)}
    columns = {column.name: column for column in data.inputs}
    if IMAGE in columns:
        channels, height, width = columns[IMAGE].shape
        facts |= {"channels": channels, "shape": (channels, height, width), "side": height if height == width else (height, width)}
    numbers = [math.prod(column.fixed_shape) for column in columns.values() if column.dtype == "float32" and not column.varies]
    vocabularies = {column.limit for column in columns.values() if column.varies and column.limit}
    return facts | ({"features": sum(numbers)} if numbers else {}) | ({"vocabulary": vocabularies.pop()} if len(vocabularies) == 1 else {})


def constructor_arguments(
    reference: Reference, build: Callable[..., Any], arguments: Mapping[str, str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a class or function: those typed, and facts of the data.

    Raises UsageError for unknown and missing ones.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(build).parameters
    except ValueError:  # some callables of C have no signature
        parameters = {}
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    values: dict[str, Any] = {name: facts[_FACTS[name]] for name in named if _FACTS.get(name) in facts}
    if anything and reference.kind == "torchvision":
        values["num_classes"] = facts["outputs"]
    for name, text in arguments.items():
        if name not in named and not anything:
            allowed = ", ".join(f"{known}=…" for known in named) or "no arguments"
            raise UsageError.of(f"model: argument of {reference.text}", name, allowed, named)
        parameter = named.get(name)
        values[name] = argument_value(
            reference, name, text, None if parameter is None or parameter.default is parameter.empty else parameter.default
        )
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in values]
    if missing:
        example = "&".join(f"{name}=…" for name in missing)
        raise UsageError(f"model: {reference.text} needs a value for {', '.join(missing)}; write {reference.text}?{example}.")
    return values


def argument_value(reference: Reference, name: str, text: str, default: Any) -> Any:
    """Read an argument as its default's type, else as a literal of Python."""
    if isinstance(default, str):
        return text
    literals = {"true": True, "false": False, "none": None}
    if text.lower() in literals:
        value: Any = literals[text.lower()]
    else:
        try:
            value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else decimal_number(text)
        except ValueError:
            value = text
    wanted = type(default)
    fits = default is None or isinstance(value, wanted) or (wanted is float and isinstance(value, int)) or value is None
    if not fits or (wanted is int and isinstance(value, bool)):
        kinds = {int: "a whole number", float: "a number", bool: "true or false"}
        raise UsageError.of(f"model: {name} of {reference.text}", text, kinds.get(wanted, wanted.__name__))
    return float(value) if wanted is float and value is not None else value
