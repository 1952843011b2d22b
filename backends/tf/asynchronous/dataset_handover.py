"""How a worker's ops get at the dataset that the worker's own process has open, so that no example crosses the network.

An async worker is a bare TensorFlow server: its ops run by the chief's order, and its Python code has no say in them. But an op can
read a file, and ``/dev/fd/N`` is one that only this process has: the worker puts the arrays into anonymous files at agreed numbers,
and the chief's dataset function reads those numbers on each worker. Nothing is left behind, however the process ends.
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
from ..data import Layout

__all__ = ["publish", "read"]

_FIRST_DESCRIPTOR = 200
_SPLITS: tuple[Split, ...] = ("train", "test")


def publish(data: Dataset, layout: Layout) -> None:
    """Worker: lay out uint8 images and int32 labels of every split. Raises RuntimeError where a number is taken already."""
    for split in _SPLITS:
        _put(_descriptor(split, "images"), layout.laid(data.images(split)))
        _put(_descriptor(split, "labels"), data.labels(split).astype(np.int32))


def read(layout: Layout) -> Mapping[Split, tuple[tf.Tensor, tf.Tensor]]:
    """In ops that run on a worker: read what it offers, once; the files are empty afterwards.

    Returns per split uint8 images, as the layout lays them, and int32 labels [n]. The ops fail where the worker's dataset has another size.
    """
    found: dict[Split, tuple[tf.Tensor, tf.Tensor]] = {}
    for split in _SPLITS:
        size = layout.info.sizes[split]
        images = tf.reshape(_read(_descriptor(split, "images"), tf.uint8), [size, *layout.image_shape])
        found[split] = images, tf.reshape(_read(_descriptor(split, "labels"), tf.int32), [size])
    return found


def _descriptor(split: Split, kind: str) -> int:
    return _FIRST_DESCRIPTOR + 2 * _SPLITS.index(split) + (kind == "labels")


def _put(number: int, array: NDArray[Any]) -> None:
    """Write an array's bytes to an anonymous file and give it the number."""
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        pass  # the number is free, as it should be
    else:
        raise RuntimeError(f"file descriptor {number} is in use, so the dataset cannot be handed to TensorFlow's worker")
    with _anonymous_file() as file:
        file.write(np.ascontiguousarray(array).data)
        file.flush()
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
