"""The tape of an imported model in float64, in a process with its framework.

``python -m crosstrain.lockstep.graph_tape`` answers a `TapeRequest` a line of standard input, by the tape, what is exact, and the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..data.store.stored_dataset import StoredDataset, open_dataset
from ..models.build import build_model
from ..models.dropout_masks import drawn_rate, keep_mask_of_shape
from ..models.imported.keras.library import usable_framework
from ..models.imported.reference import read_reference
from ..models.imported.tape import SIZE
from .arrays import read, write_arrays
from .batch import batch_columns
from .losses import loss_of
from .replaying import LOSS, STATE, TAPE, TARGET, examples_of
from .serving import serve_layers

Array = NDArray[Any]
EXACT, ON_TAPE = "exact.arrays", "nodes.json"
NODES = "crosstrain.models.imported.{framework}.nodes"


class TapeRequest(msgspec.Struct, tag="tape"):
    """What to compute, with the state in the folder: the first `examples` of update `step`."""

    job: dict[str, Any]
    folder: str
    step: int
    examples: int


def _opened(job_fields: Mapping[str, Any]) -> tuple[Job, StoredDataset, Any, Any]:
    """Return a job, its data, its model, and what computes nodes with the model's framework."""
    job = Job.model_validate(job_fields)
    data = open_dataset(job.data, job.data_dir)
    spec: Any = build_model(job.model, data.info, job.loss)
    framework = usable_framework(read_reference(spec.settings.reference)) if spec.settings.is_keras else spec.framework
    return job, data, spec, import_module(NODES.format(framework=framework))


def _write(request: TapeRequest) -> None:
    job, data, spec, library = _opened(request.job)
    folder = Path(request.folder)
    state = read(str(folder / STATE))
    batches = examples_of(job, data, spec.objective.weight, request.step, request.examples)
    columns, target = batch_columns(data, spec.inputs, batches), batch_columns(data, (spec.target,), batches)
    exact: dict[str, Array] = {}

    def kept_share(shape: Sequence[int], rate: float, layer: int) -> Array:
        rate = drawn_rate(rate)
        return keep_mask_of_shape(job.seed, request.step, layer, batches.indices, shape, rate) / (1.0 - rate)

    def slope_of(result: Array) -> Array:
        (total, size), (slope, slope_size) = loss_of(spec, result, target)
        exact[f"{LOSS}/output"], exact[f"{LOSS}/slope of input 0"] = np.asarray(total), slope
        exact[f"{LOSS}/{SIZE}output"], exact[f"{LOSS}/{SIZE}slope of input 0"] = np.asarray(size), slope_size
        return slope

    inputs = [columns[name] for name in spec.settings.inputs]
    arrays: dict[str, Array]
    arrays, nodes = library.tape_of_arrays(spec.settings, state, inputs, kept_share, slope_of)
    (folder / ON_TAPE).write_bytes(msgspec.json.encode(nodes))
    tape = {name: value for name, value in arrays.items() if _is_on_tape(name.rpartition("/")[2])}
    exact |= {name: value for name, value in arrays.items() if name not in tape and name != "result"}
    tape |= {TARGET + name: value for name, value in target.items()}
    tape[f"{LOSS}/input 0"] = arrays["result"].astype(np.float32)
    write_arrays(str(folder / TAPE), tape)
    write_arrays(str(folder / EXACT), exact)


def _is_on_tape(name: str) -> bool:
    """Return whether frameworks are given an array, rather than compared with it."""
    return name.startswith(("input ", "result ")) or (name.startswith("slope ") and not name.startswith("slope of "))


def main() -> None:
    """Serve standard input."""
    serve_layers(_opened, _write, "the model could not be computed in float64", TapeRequest)


if __name__ == "__main__":
    main()
