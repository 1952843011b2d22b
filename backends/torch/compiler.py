"""torch.compile: what it needs, when it is used, and the compiled loss of a batch."""

from __future__ import annotations

import os
import shutil
import signal
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.errors import UsageError
from ...core.job import Job
from ...data.sampler import Batches
from ...models.base import ForwardContext
from ..compiling import Timing, compiled_sizes, settle, timed
from .data import Columns, ResidentSplit, Tensors, part_of
from .model import Dropout, Model

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps compiled code; users may choose a lasting folder
TICK_SECONDS = 0.05


def find_missing_part() -> str | None:
    """Return the part missing for torch.compile and how to install it, or None."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0] if compiler.strip() else "g++") is None:
        return f"torch.compile needs a C++ compiler, and there is no {compiler!r} here: apt install g++, or name another by CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python's headers, which are not here: apt install python3-dev"
    return None


def configure_compiler() -> None:
    """Import the compiler, with temporary files of this task.

    It starts no processes apart from those that compile.
    """
    os.environ.setdefault(CACHE_VARIABLE, os.path.join(os.environ.get("TMPDIR") or tempfile.gettempdir(), "torchinductor"))
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes
    torch._inductor.config.cpp.threads = torch.get_num_threads()  # also where another thread compiles
    torch._dynamo.config.optimize_ddp = False  # which would cut a forward pass along DDP's buckets


def kill_children(thread: threading.Thread) -> None:
    """Kill a thread's child processes until it has ended, in the background."""

    def end() -> None:
        while thread.is_alive():
            for pid in list(_descendants(f"/proc/self/task/{thread.native_id}/children")):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(TICK_SECONDS)

    threading.Thread(target=end, name="end of compiling", daemon=True).start()


def _descendants(children: str) -> Iterator[int]:
    try:
        pids = [int(pid) for pid in Path(children).read_text().split()]
    except OSError:  # has ended since
        return
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                yield from _descendants(f"/proc/{pid}/task/{task}/children")
        yield pid


# Compiled for the sizes of almost all batches, as a function of only tensors: dropout masks come from outside, as arguments.

Context = ForwardContext[torch.Tensor]
Compute = Callable[[Mapping[str, torch.Tensor], Columns, Columns, Context], torch.Tensor]
"""(parameters, inputs, target, context) -> Σ losses."""

Mask = tuple[torch.Tensor, float, int]  # a tensor like dropout's argument, rate, layer


class GivenUpError(Exception):
    """Compiling was given up."""


class CompiledLoss:
    """The compiled function, for batches of `sizes` examples."""

    def __init__(self, compute: Compute, sizes: frozenset[int]) -> None:
        self._compute, self._sizes = compute, sizes
        self._masks: dict[int, list[Mask]] = {}
        self._given_up = False
        self._function = torch.compile(self._on_tensors, dynamic=False, backend=self._backend)

    def takes(self, y: Columns) -> bool:
        """Return whether a batch's size is compiled."""
        return isinstance(y, torch.Tensor) and len(y) in self._sizes

    def give_up(self) -> None:
        """End compiling with GivenUpError at its next step."""
        self._given_up = True

    def __call__(
        self, named: Mapping[str, torch.Tensor], x: Columns, y: torch.Tensor, context: Context, *, apart: bool = False
    ) -> torch.Tensor:
        """Return the sum of losses, and new buffers in `context`.

        `apart` changes nothing of training, not even generators.
        """
        masks = {layer: self._factors(context, like, rate, layer, apart=apart) for like, rate, layer in self._drawn(named, x, y, context)}
        loss, updated = self._function(dict(named), dict(context.buffers), x, y, masks, context.compute, context.settings)
        if not apart:
            context.updated.update(updated)
        return loss

    def _on_tensors(
        self,
        named: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        x: Columns,
        y: torch.Tensor,
        masks: Mapping[int, torch.Tensor],
        low: torch.dtype | None,
        settings: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        context: Context = ForwardContext(training=True, buffers=buffers, compute=low, settings=settings)
        context.dropout = lambda x, rate, layer: x * masks[layer]
        return self._compute(named, x, y, context), context.updated

    def _backend(self, graph: Any, inputs: Tensors) -> Any:
        if self._given_up:
            raise GivenUpError("compiling was given up")
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    @staticmethod
    def _factors(context: Context, like: torch.Tensor, rate: float, layer: int, *, apart: bool) -> torch.Tensor:
        if apart or not isinstance(context.dropout, Dropout):
            return torch.ones_like(like)
        return context.dropout.factors(like, rate, layer)

    def _drawn(self, named: Mapping[str, torch.Tensor], x: Columns, y: torch.Tensor, outer: Context) -> list[Mask]:
        if not isinstance(outer.dropout, Dropout):
            return []
        if len(y) not in self._masks:
            masks: list[Mask] = []

            def note(x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
                masks.append((torch.empty_like(x), rate, layer))
                return x

            context: Context = ForwardContext(training=True, buffers=outer.buffers, compute=outer.compute, settings=outer.settings)
            context.dropout = note
            with torch.no_grad():
                self._compute(named, x, y, context)
            self._masks[len(y)] = masks
        return self._masks[len(y)]


def choose(job: Job, model: Model, data: ResidentSplit, first: Batches, step: Callable[[], float], tasks: int, *, timing: bool) -> None:
    """Compile training losses if required, or if faster on all `tasks` with `timing`.

    Raises UsageError if impossible.
    """
    if job.compile == "off" or (job.compile == "auto" and not timing):
        return
    problem = find_missing_part()
    if job.compile == "on":
        if problem is not None:
            raise UsageError(
                f"compile: got 'on', as typed or as 'auto' has chosen for this run before, but {problem}. Allowed without it: off, and for "
                "a new run auto (which does not compile then)."
            )
        configure_compiler()
        model.compiled = _loss(job, model, first)
        _compute_isolated(model, _copied(data, first, job.accumulate), model.compiled)
    elif problem is not None:
        settle(Timing(step(), None, problem), tasks)  # the other tasks receive the reason, and no task compiles
    else:
        _compile_if_faster(job, model, data, first, step, tasks)


def _compile_if_faster(job: Job, model: Model, data: ResidentSplit, first: Batches, step: Callable[[], float], tasks: int) -> None:
    made: list[CompiledLoss] = []
    compiling: list[threading.Thread] = []
    given_up = threading.Event()
    batches = _copied(data, first, job.accumulate)

    def compile_loss() -> None:
        compiling.append(threading.current_thread())
        configure_compiler()
        made.append(_loss(job, model, first))
        if given_up.is_set():
            made[0].give_up()
        _compute_isolated(model, batches, made[0])

    def give_up() -> None:
        given_up.set()
        for loss in made:
            loss.give_up()
        for thread in compiling:
            kill_children(thread)

    def compiled() -> float:
        model.compiled = made[0]
        return step()

    faster = settle(timed(step, compile_loss, compiled, give_up), tasks)
    model.compiled = made[0] if faster else None  # also where the timing itself failed


def _loss(job: Job, model: Model, first: Batches) -> CompiledLoss:
    size = int(first.offsets[-1] - first.offsets[0])
    return CompiledLoss(model.compute_loss, compiled_sizes(size, job.accumulate))


def _copied(data: ResidentSplit, first: Batches, accumulate: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of a micro-batch of each size in a batch.

    The next batch overwrites the split's own memory.
    """
    ((x, y),) = next(iter(data.blocks(first)))
    parts, _ = first.in_micro_batches(accumulate)
    sizes = {int(size) for size in np.diff(parts.offsets)} - {0}
    cut = [(part_of(x, 0, size), part_of(y, 0, size)) for size in sorted(sizes)]
    return [(x.clone(), y.clone()) for x, y in cut if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)]


def _compute_isolated(model: Model, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], loss: CompiledLoss) -> None:
    for x, y in batches:
        torch.autograd.grad(loss(model.named, x, y, model.passes.separate_training(), apart=True), model.leaves)
