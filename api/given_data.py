"""Arrays, DataFrames and Datasets of Python as data of a job.

They are written into the data cache, into files that are named by their content.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..core.console import note
from ..core.errors import UsageError
from ..data.sources.arrays.pairs import DRAWN_ONCE, as_array, is_dataset, write_pairs
from ..data.store.location import cache_root

GIVEN = ".given"  # folder of the data cache
_NAMES = ("x", "y", "x_test", "y_test")


def data_name(data: Any, target: str | None) -> str:
    """Return data as a job names it. Raises UsageError for what cannot be data."""
    if isinstance(data, str):
        if target is not None:
            raise UsageError(f"target: is for a DataFrame; write it into the name: {data}?target={target}")
        return data
    if hasattr(data, "columns") and _is_frame(data):
        if target is None:
            raise UsageError("data: which column of the DataFrame is to be predicted? Give target=NAME.")
        if not isinstance(target, str) or not all(isinstance(name, str) for name in data.columns):
            raise UsageError("data: columns of a DataFrame need names of text: frame.columns = [str(name) for name in frame.columns]")
        return table(data, target=target)
    if target is not None:
        raise UsageError("target: is for a DataFrame; of arrays the second is the target")
    if isinstance(data, tuple | list) and len(data) in (2, 4) and not any(is_dataset(part) and not _is_frame(part) for part in data):
        return _arrays(data)
    parts = data if isinstance(data, tuple | list) else (data,)
    if 1 <= len(parts) <= 2 and all(is_dataset(part) for part in parts):
        return _datasets(parts)
    raise UsageError("data: give a name, arrays (x, y) or (x, y, x_test, y_test), a DataFrame with target=, or one or two Datasets")


def _is_frame(part: Any) -> bool:
    return hasattr(part, "to_numpy") and hasattr(part, "iloc")


def table(frame: Any, *, target: str, test: Any = None, **choices: str) -> str:
    """Return a DataFrame as a job names it.

    `test` is a DataFrame of the rows for the test; `choices` are as after ``csv:PATH?``, such as missing="mean". Raises UsageError for
    columns of objects that are neither text, numbers nor truth values.
    """
    if target not in list(frame.columns):
        raise UsageError.of("target", target, ", ".join(map(str, frame.columns)), [str(name) for name in frame.columns])
    arguments = {"target": target, **{key.replace("_", "-"): value for key, value in choices.items()}}
    if test is not None:
        arguments["test"] = str(_written_frame(test))
    for key, value in arguments.items():
        if any(sign in value for sign in ",&="):
            raise UsageError(f"{key}: {value!r} has one of the characters , & =; rename it")
    path = _written_frame(frame)
    return f"{path.suffix[1:]}:{path}?{','.join(f'{key}={value}' for key, value in arguments.items())}"


def _written_frame(frame: Any) -> Path:
    frame = frame.reset_index(drop=True)
    for name in frame.columns:
        kinds = {type(value) for value in frame[name].dropna()} if frame[name].dtype == object else set()
        if kinds - {str, bool} and not all(issubclass(kind, int | float | np.number) for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UsageError(f"data: the column {str(name)!r} of the DataFrame has objects of {names}; give numbers or text")
    form = "parquet" if find_spec("pyarrow") else "csv"
    return _kept(form, lambda path: frame.to_parquet(path, index=False) if form == "parquet" else frame.to_csv(path, index=False))


def _arrays(data: Sequence[Any]) -> str:
    arrays = [as_array(part) for part in data]
    for place, (name, array) in enumerate(zip(_NAMES, arrays, strict=False)):
        if array.dtype == object and all(isinstance(value, str) for value in array.flat):
            arrays[place] = array.astype(str)
        elif array.dtype == object:
            raise UsageError(f"data: {name} is an array of objects; give numbers, or text as the target")
    named: dict[str, Any] = dict(zip(_NAMES, arrays, strict=False))
    return f"npz:{_kept('npz', lambda path: np.savez(path, **named))}"


def _datasets(parts: Sequence[Any]) -> str:
    def write(path: Path) -> None:
        files = [path.with_name(f"{name}.npy") for name in _NAMES[: 2 * len(parts)]]
        drawn = [write_pairs("the Dataset", part, files[2 * number : 2 * number + 2]) for number, part in enumerate(parts)]
        if any(drawn):
            note(DRAWN_ONCE)
        named: dict[str, Any] = {file.stem: np.load(file, mmap_mode="r") for file in files}
        np.savez(path, **named)

    try:
        return f"npz:{_kept('npz', write)}"
    except ValueError as error:
        raise UsageError(f"data: {error}") from error


def _kept(form: str, write: Any) -> Path:
    """Write a file and name it by its content."""
    folder = Path(cache_root(), GIVEN)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".draft-") as draft:
        path = Path(draft, f"data.{form}")
        write(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
        kept = folder / f"{digest}.{form}"
        if not kept.exists():  # its time would change, and the data be prepared again
            path.rename(kept)
    return kept
