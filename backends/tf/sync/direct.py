"""Collectives of the direct exchange: a Python function between ops of a traced function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....core.cluster import Task
from ....core.job import Job
from ....exchange.all_reduce import cut_into_buckets
from ....exchange.authentication import gpu_error
from ....exchange.mesh import Mesh
from ....models.base import Array
from ..data import Tensors
from .collectives import Collectives, NativeCollectives, Traced

ALIGNMENT_BYTES = 64  # TensorFlow uses arrays aligned so without a copy


class TcpCollectives(Collectives):
    """Collectives of a mesh: as a single process with sums over all ranks."""

    def __init__(self, mesh: Mesh, device: str, *, sequential: bool) -> None:
        super().__init__(device, sequential=sequential)
        self._mesh = mesh
        self._rooms: dict[tuple[int, tuple[tuple[int, ...], ...], np.dtype[Any]], _Room] = {}

    def compiled(self, function: Traced, *signature: tf.TensorSpec) -> Traced | None:
        """Return None: XLA has no Python functions."""
        return None

    def all_reduce(self, tensors: Tensors) -> Tensors:
        """Return sums over all ranks, in ops, by bucket while others are computed.

        TensorFlow runs Python functions in order.
        """
        tensors = list(tensors)
        known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        buckets = (
            cut_into_buckets([tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors])
            if known
            else [list(range(len(tensors)))]
        )
        if len(buckets) <= 1:
            return _in_ops(self._reduce_arrays, tensors, tensors)
        rooms = [self._room(number, [tensors[place] for place in bucket]) for number, bucket in enumerate(buckets)]
        for bucket, room in zip(buckets, rooms, strict=True):
            _in_ops(partial(self._submit, room), [tensors[place] for place in bucket], [])
        sums: list[tf.Tensor] = [None] * len(tensors)
        for bucket, room in zip(buckets, rooms, strict=True):
            like = [tensors[place] for place in bucket]
            for place, total in zip(bucket, _in_ops(partial(self._await, room), [], like), strict=True):
                sums[place] = total
        return sums

    def _room(self, number: int, tensors: Tensors) -> _Room:
        """Return a bucket's memory, shared by all traced functions with such gradients.

        Only one runs at a time.
        """
        shapes, kind = tuple(tuple(tensor.shape) for tensor in tensors), np.dtype(tensors[0].dtype.as_numpy_dtype)
        key = number, shapes, kind
        if key not in self._rooms:
            self._rooms[key] = _Room(shapes, kind)
        return self._rooms[key]

    def _reduce_arrays(self, *arrays: NDArray[Any]) -> list[NDArray[Any]]:
        vector = np.concatenate([array.ravel() for array in arrays])
        self._mesh.all_reduce(vector)
        pieces = np.split(vector, np.cumsum([array.size for array in arrays])[:-1])
        return [piece.reshape(array.shape) for piece, array in zip(pieces, arrays, strict=True)]

    def _submit(self, room: _Room, *arrays: NDArray[Any]) -> list[NDArray[Any]]:
        self._mesh.submit(room.fill(arrays))
        return []

    def _await(self, room: _Room) -> list[NDArray[Any]]:
        self._mesh.wait()
        return room.views

    def sum_in_order(self, vector: tf.Tensor) -> tf.Tensor:
        """In ops: return a vector's sum over all ranks."""
        return self.all_reduce([vector])[0]

    def messages(self, sizes_bytes: Sequence[int]) -> int:
        """Return the number of messages for gradients of these sizes."""
        return len(cut_into_buckets(sizes_bytes))

    def broadcast(self, array: Array | None, shape: tuple[int, ...]) -> Array:
        """Broadcast the first rank's array."""
        return self._mesh.broadcast(array, shape)

    def leave(self) -> None:
        """Close the connections after a barrier."""
        self._mesh.leave()


class _Room:
    """Memory for a bucket, twice.

    TensorFlow may read a step's sums while the next step's gradients are copied.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], kind: np.dtype[Any]) -> None:
        self._shapes, self._kind = shapes, np.dtype(kind)
        self._flats = [self._made(), self._made()]
        self._number = 0

    def _made(self) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        step = ALIGNMENT_BYTES // self._kind.itemsize
        starts, stop = [], 0
        for shape in self._shapes:
            starts.append(stop)
            stop += -(-int(np.prod(shape, dtype=np.int64)) // step) * step
        raw = np.zeros(stop * self._kind.itemsize + ALIGNMENT_BYTES, np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT_BYTES
        flat = raw[begin : begin + stop * self._kind.itemsize].view(self._kind)
        views = [
            flat[start : start + int(np.prod(shape, dtype=np.int64))].reshape(shape)
            for start, shape in zip(starts, self._shapes, strict=True)
        ]
        return flat, views

    def fill(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        self._number = 1 - self._number
        flat, views = self._flats[self._number]
        for view, array in zip(views, arrays, strict=True):
            np.copyto(view, array)
        return flat

    @property
    def views(self) -> list[NDArray[Any]]:
        return self._flats[self._number][1]


def _in_ops(function: Any, tensors: Tensors, like: Tensors) -> list[tf.Tensor]:
    results = tf.numpy_function(function, list(tensors), [tensor.dtype for tensor in like])
    if not like:
        return []
    for result, tensor in zip(results, like, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


def init_collectives(task: Task, job: Job, device: str, *, sequential: bool) -> Collectives:
    """Connect the job's ranks.

    Raises RunFailedError after `job.start_timeout`, OSError(EADDRINUSE) if the port was taken.
    """
    if not job.wrapped:
        return Collectives(device, sequential=sequential)
    if job.exchange == "direct":
        if device.startswith("GPU"):
            raise gpu_error()
        return TcpCollectives(Mesh(task, job.start_timeout, job.node_timeout), device, sequential=sequential)
    return NativeCollectives(task, job, device)
