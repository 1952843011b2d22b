"""How a worker's ops get at the dataset that the worker's own process has open, so that no example crosses the network.

An async worker is a bare TensorFlow server: its ops run by the chief's order, and its Python code has no say in them. But an op can
read a file, and ``/dev/fd/N`` is one that only this process has: the worker puts the arrays into anonymous files at agreed numbers,
and the chief's dataset function reads those numbers on each worker. Nothing is left behind, however the process ends. Large columns of
sequences stay in the store's files, which the worker opens at agreed numbers for the ops to map.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....data.base import Dataset, Split
from ..data import SPLITS, VALUES, Layout, file_contents

__all__ = ["publish", "read"]

_FIRST_DESCRIPTOR = 200

_FIRST_MAPPED_DESCRIPTOR = 400
"""Of files of the store. Numbers of their own: what is at the others is emptied when it has been read."""


def publish(data: Dataset, layout: Layout) -> None:
    """Worker: lay out the arrays of every split, and open its mapped files. Raises RuntimeError where a number is taken already."""
    number = _FIRST_DESCRIPTOR
    for split in SPLITS:
        arrays = layout.arrays(data, split)
        for name in layout.array_specs(split):
            if name in arrays:
                _put(number, arrays[name])
            number += 1
    for number, file in enumerate(layout.mapped.values(), _FIRST_MAPPED_DESCRIPTOR):
        with open(file.filename, "rb") as opened:
            _give(number, opened)


def read(layout: Layout) -> Mapping[Split, Mapping[str, tf.Tensor]]:
    """In ops that run on a worker: read what it offers, once; the files are empty afterwards.

    Returns a split's arrays by name, as `Layout.array_specs` says. The ops fail where the worker's dataset has another size.
    """
    found: dict[Split, dict[str, tf.Tensor]] = {}
    mapped = {
        (split, name + VALUES): file_contents(file, f"/dev/fd/{number}")
        for number, ((split, name), file) in enumerate(layout.mapped.items(), _FIRST_MAPPED_DESCRIPTOR)
    }
    number = _FIRST_DESCRIPTOR
    for split in SPLITS:
        found[split] = {}
        for name, spec in layout.array_specs(split).items():
            if (split, name) in mapped:
                found[split][name] = mapped[split, name]
            else:
                shape = [-1 if size is None else size for size in spec.shape.as_list()]
                found[split][name] = tf.reshape(_read(number, spec.dtype), shape)
            number += 1
    return found


def _put(number: int, array: NDArray[Any]) -> None:
    """Write an array's bytes to an anonymous file and give it the number."""
    with _anonymous_file() as file:
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        _give(number, file)


def _give(number: int, file: IO[bytes]) -> None:
    """Have an open file at a number, for as long as the process lives."""
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        pass  # the number is free, as it should be
    else:
        raise RuntimeError(f"file descriptor {number} is in use, so the dataset cannot be handed to TensorFlow's worker")
    os.dup2(file.fileno(), number, inheritable=False)


def _anonymous_file() -> IO[bytes]:
    """Open a file without a name: in memory where the system can (Linux), on disk elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dataset"), "wb")
    return tempfile.TemporaryFile()


def _read(number: int, dtype: tf.DType) -> tf.Tensor:
    """Return a file's contents as a vector, and free the file's memory."""
    path = f"/dev/fd/{number}"
    values = tf.io.decode_raw(tf.io.read_file(path), dtype)
    with tf.control_dependencies([values]):
        emptied = tf.io.write_file(path, "")
    with tf.control_dependencies([emptied]):
        return tf.identity(values)
