"""Wraps a model in DistributedDataParallel without importing torch's compiler, of which a run that compiles nothing uses nothing.

DDP's constructor asks the compiler (torch._dynamo) for a setting, and its first forward pass for a mark that only the compiler reads.
Importing it for these two takes 1.2 s of a core and 150 MB of memory in each rank (torch 2.14).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

__all__ = ["compiler_deferred", "data_parallel"]

COMPILER = "torch._dynamo"


class _Deferred(ModuleType):
    """Stands for a module of the compiler: has the attributes that are given, and takes any other from the real one, importing it."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, attribute: str) -> Any:
        _import_when_used()
        return getattr(importlib.import_module(self.__name__), attribute)


def _same(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Return a function as it is: nothing needs to be kept from compiling it."""
    return function


def _default_ddp_mode() -> str:
    """Return the compiler's setting for DDP as it is where nobody has imported the compiler and changed it."""
    return "ddp_optimizer"


def data_parallel(module: torch.nn.Module, device_ids: list[torch.device] | None) -> torch.nn.parallel.DistributedDataParallel:
    """Return a module wrapped in DDP. What is the user's, the module's forward pass, runs without the stand-in for the compiler."""
    with compiler_deferred():
        wrapped = torch.nn.parallel.DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)
        around_forward = getattr(wrapped, "_inside_ddp_forward", None)  # what its first forward pass asks the compiler for
        if around_forward is not None:
            with around_forward():
                pass
    return wrapped


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Within the block, DDP is constructed and first called without an import of the compiler; whoever needs it else imports it as ever.

    Where it is imported already, by a model that compiles, nothing is changed.
    """
    if COMPILER in sys.modules:
        yield
        return
    utils = _Deferred(f"{COMPILER}.utils", get_optimize_ddp_mode=_default_ddp_mode)
    sys.modules[COMPILER] = torch._dynamo = _Deferred(COMPILER, disable=_same, utils=utils)
    try:
        yield
    finally:
        _import_when_used()


def _import_when_used() -> None:
    """Have the next use of the compiler import it, as torch itself does at the first one."""
    if isinstance(sys.modules.get(COMPILER), _Deferred):
        del sys.modules[COMPILER], torch._dynamo
