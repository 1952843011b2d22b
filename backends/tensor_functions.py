"""What turns arrays into a framework's tensors and back, so that a model's functions can be called by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["HasTensors", "TensorFunctions"]


@dataclass(frozen=True, slots=True)
class TensorFunctions:
    """The two directions, on the CPU. Whole numbers become what forward functions are given: int32 on TensorFlow, int64 on torch."""

    tensor: Callable[[NDArray[Any]], Any]
    array: Callable[[Any], NDArray[Any]]


class HasTensors(Protocol):
    """What a backend has besides, whose models of sequences the suite for models (`conformance.model_suite`) compares."""

    def tensor_functions(self) -> TensorFunctions:
        """Import the framework, and return them."""
        ...
