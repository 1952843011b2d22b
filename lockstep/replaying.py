"""Layers one by one on a backend, in a process of its own.

``python -m crosstrain.lockstep.replaying`` answers a `ReplayRequest` a line of standard input, by results in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..backends.base import make_sampler
from ..backends.loading import load_backend
from ..backends.replay import LayerOnTape, Replay, ReplayedPass
from ..core.errors import UsageError
from ..core.job import Job
from ..data.base import Dataset
from ..data.sampler import Batches
from ..data.store.stored_dataset import open_dataset
from ..engine.epochs import EpochIndex
from ..models.build import build_model
from .arrays import read, write_arrays
from .serving import serve_layers

Array = NDArray[Any]
TAPE, STATE = "tape.arrays", "state.arrays"
DATA, TARGET, LOSS, INDICES = "data/", "target/", "loss", "indices"  # prefixes of a batch's columns; the loss; the examples


class ReplayRequest(msgspec.Struct, tag="layers"):
    """What to compute, with the state in the folder: the first `examples` of update `step`.

    `layers`: None for the nodes of an imported model's graph.
    """

    job: dict[str, Any]
    folder: str
    results: str
    step: int
    examples: int
    layers: list[LayerOnTape] | None = None


def examples_of(job: Job, data: Dataset, weight: str, step: int, count: int) -> Batches:
    """Return the first examples of an update's global batch, as one batch."""
    sampler = make_sampler(job, data, weight)
    place = EpochIndex(sampler).place(step)
    whole = sampler.whole(place.epoch, place.first_in_epoch, 1, place.skip, place.arranged)
    count = min(count, int(whole.offsets[1]))
    changes = None if whole.changes is None else whole.changes[:count]
    sizes = np.array([count], np.int32)
    return replace(whole, indices=whole.indices[:count], offsets=np.array([0, count], np.int32), examples=sizes, changes=changes)


def _loaded(job_fields: Mapping[str, Any]) -> tuple[Job, Any]:
    """Return a job and its backend, whose framework is imported then."""
    job = Job.model_validate(job_fields)
    backend: Any = load_backend(job.backend)
    if not hasattr(backend, "replayed"):
        raise UsageError(f"backend: {job.backend!r} does not compute layers by themselves.")
    backend.preload(job)
    return job, backend


def _write(request: ReplayRequest) -> None:
    (job, backend), folder = _loaded(request.job), Path(request.folder)
    data = open_dataset(job.data, job.data_dir)
    spec = build_model(job.model, data.info, job.loss)
    state = read(str(folder / STATE))
    parameters, buffers = (
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for prefix in ("parameters/", "buffers/")
    )
    replayed: ReplayedPass = backend.replayed(job, spec, data, parameters, buffers)
    batches = examples_of(job, data, spec.objective.weight, request.step, request.examples)
    x, y = replayed.columns(batches)
    results = (
        {INDICES: batches.indices} | {DATA + name: value for name, value in x.items()} | {TARGET + name: value for name, value in y.items()}
    )
    tape = read(str(folder / TAPE))
    if request.layers is None:
        results |= replayed.nodes(batches, request.step, tape)
    else:
        replay = Replay(replayed, request.layers, tape)
        replayed.forward(batches, replay.around, request.step)
        if not replay.complete:
            raise RuntimeError("the network called other layers than the reference")
        results |= replay.results
    wanted = {name.removeprefix(TARGET): value for name, value in tape.items() if name.startswith(TARGET)}
    loss, slope = replayed.loss(replayed.tensor(tape[f"{LOSS}/input 0"]), wanted)
    results[f"{LOSS}/output"], results[f"{LOSS}/slope of input 0"] = replayed.array(loss), replayed.array(slope)
    write_arrays(str(folder / request.results), results)


def main() -> None:
    """Serve standard input."""
    serve_layers(_loaded, _write, "a layer could not be computed by itself on {backend}", ReplayRequest)


if __name__ == "__main__":
    main()
