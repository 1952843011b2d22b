"""Build and describe nn.Modules."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ....core.errors import UsageError
from ..building import argument_value, constructed, constructor_arguments, facts_of, found
from ..reference import HF, Reference
from ..requests import DataFacts
from .configured import configured


def built(reference: Reference, arguments: Mapping[str, str], data: DataFacts, outputs: int, seed: int) -> torch.nn.Module:
    """Build the module with the initial values of a seed, on the CPU. Raises UsageError."""
    facts = facts_of(data, outputs)
    values: dict[str, Any] = {}
    if reference.kind == HF:
        build = configured(reference, arguments, facts, partial(argument_value, reference))
    else:
        build = _class_or_function(reference)
        values = constructor_arguments(reference, build, arguments, facts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.mha.set_fastpath_enabled(False)  # evaluates padded places otherwise than training and the export do
    module = constructed(reference, build, values)
    is_keras = any(part.__module__.partition(".")[0] == "keras" for part in type(module).__mro__)
    if is_keras or not isinstance(module, torch.nn.Module):  # on torch, Keras's layers are modules too
        advice = " Keep a Keras model in a file that does not import torch." if is_keras else ""
        raise UsageError(f"model: {reference.text} returned {type(module).__name__}, not an nn.Module.{advice}")
    return module


def _class_or_function(reference: Reference) -> Callable[..., Any]:
    value = found(reference)
    if isinstance(value, torch.nn.Module):
        raise UsageError(f"model: {reference.text} is a module that is built already. Name its class, or a function that returns it.")
    if not callable(value):
        raise UsageError(f"model: {reference.text} is {type(value).__name__}, not an nn.Module class or a function that returns one.")
    build: Callable[..., Any] = value
    return build


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that training changes, each once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def carried(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state without a gradient: float buffers, then frozen parameters."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    return buffers | {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
