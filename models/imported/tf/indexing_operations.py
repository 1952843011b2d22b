"""ATen operations on TensorFlow that move elements to computed places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .operations import Pass, canonical, operation, promoted, reshaped, shape_of


def _to_last(x: tf.Tensor, dim: int) -> tuple[tf.Tensor, list[int]]:
    """Return a tensor with a dimension moved to the end, and the order that moves it back."""
    rank = x.shape.rank
    if not rank:
        return x[None], []
    axis = dim % rank
    order = [place for place in range(rank) if place != axis] + [axis]
    return (x, order) if axis == rank - 1 else (tf.transpose(x, order), [int(place) for place in np.argsort(order)])


def _in_order(x: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return x[0] if not order else x if list(order) == sorted(order) else tf.transpose(x, order)


def _coordinates(index: tf.Tensor, dim: int) -> tf.Tensor:
    """Return where each element of an index points to, [*index.shape, rank]."""
    rank, sizes = index.shape.rank, shape_of(index)
    places = [
        tf.reshape(tf.range(size, dtype=tf.int64), [-1 if axis == place else 1 for axis in range(rank)]) for place, size in enumerate(sizes)
    ]
    places[dim % rank] = tf.cast(index, tf.int64)
    return tf.stack([tf.broadcast_to(place, tf.shape(index)) for place in places], -1)


@operation(
    *(f"aten.scatter.{kind}" for kind in ("src", "value", "reduce", "value_reduce")),
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def _scatter(
    run: Pass, self: Any, dim: int, index: Any, src: Any = None, value: Any = None, reduce: str | None = None, include_self: bool = True
) -> tf.Tensor:
    """Put `src`, or a number, to the places of an index along a dimension."""
    x, index = canonical(self), canonical(index)
    if not x.shape.rank:
        return _scatter(
            run, x[None], 0, tf.reshape(index, [1]), None if src is None else tf.reshape(src, [1]), value, reduce, include_self
        )[0]
    if src is None:
        source = tf.fill(tf.shape(index), tf.cast(value, x.dtype))
    else:
        source = tf.cast(canonical(src), x.dtype)[tuple(slice(size) for size in shape_of(index))]
    return _put(x, _coordinates(index, dim), source, "sum" if "add" in run.operation else reduce, include_self)


def _put(x: tf.Tensor, places: tf.Tensor, source: tf.Tensor, reduce: str | None, include_self: bool = True) -> tf.Tensor:
    if reduce is None:
        return tf.tensor_scatter_nd_update(x, places, source)
    if not include_self:
        start = {"sum": 0, "add": 0, "mean": 0, "prod": 1, "multiply": 1, "amax": x.dtype.min, "amin": x.dtype.max}[reduce]
        x = tf.tensor_scatter_nd_update(x, places, tf.fill(tf.shape(source), tf.cast(start, x.dtype)))
    if reduce in ("sum", "add", "mean"):
        y = tf.tensor_scatter_nd_add(x, places, source)
        if reduce != "mean":
            return y
        counts = tf.tensor_scatter_nd_add(tf.fill(tf.shape(x), tf.cast(include_self, x.dtype)), places, tf.ones_like(source))
        return y / tf.maximum(counts, tf.ones([], x.dtype))
    if reduce in ("amax", "amin"):
        y = tf.stop_gradient((tf.tensor_scatter_nd_max if reduce == "amax" else tf.tensor_scatter_nd_min)(x, places, source))
        kept, put = tf.cast(x == y, x.dtype), tf.cast(source == tf.gather_nd(y, places), x.dtype)
        sharing = tf.tensor_scatter_nd_add(kept, places, put)  # equal ones share the gradient, as on torch
        moved = tf.tensor_scatter_nd_add(kept * (x - tf.stop_gradient(x)), places, put * (source - tf.stop_gradient(source)))
        return y + moved / tf.maximum(sharing, 1)
    raise NotImplementedError(f"scatter_reduce by {reduce}")


@operation("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(run: Pass, self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> tf.Tensor:
    """Replace the elements at indices, or by a mask, which must be the only index."""
    x, values = canonical(self), canonical(values)
    positions = [None if index is None else canonical(index) for index in indices]
    axes = [axis for axis, index in enumerate(positions) if index is not None]
    if any(index is not None and index.dtype == tf.bool for index in positions):
        return _put_by_mask(x, positions, axes, values, accumulate)
    order = [*axes, *(axis for axis in range(x.shape.rank) if axis not in axes)]
    moved, sizes = tf.transpose(x, order), shape_of(x)
    parts = [tf.cast(positions[axis], tf.int64) for axis in axes]
    parts = [tf.where(part < 0, part + tf.cast(sizes[axis], tf.int64), part) for axis, part in zip(axes, parts, strict=True)]
    places = tf.stack([part + sum(tf.zeros_like(more) for more in parts) for part in parts], -1)
    rank, before = places.shape.rank - 1, axes[0] if axes[-1] - axes[0] < len(axes) else 0  # as in torch, theirs come first else
    whole = [sizes[axis] for axis in range(x.shape.rank) if axis not in axes]
    whole[before:before] = shape_of(places)[:-1]
    source = tf.broadcast_to(tf.cast(values, x.dtype), tf.stack([tf.cast(size, tf.int32) for size in whole]))
    source = tf.transpose(source, [*range(before, before + rank), *range(before), *range(before + rank, len(whole))])
    return tf.transpose(_put(moved, places, source, "sum" if accumulate else None), [int(place) for place in np.argsort(order)])


def _put_by_mask(x: tf.Tensor, positions: Sequence[Any], axes: Sequence[int], values: tf.Tensor, accumulate: bool) -> tf.Tensor:
    mask = positions[axes[0]]
    if len(axes) > 1 or (values.shape.rank and values.shape.num_elements() != 1):
        raise NotImplementedError("an assignment of several values to a mask; use torch.where")
    rank = mask.shape.rank
    mask = reshaped(mask, [*[1] * axes[0], *shape_of(mask), *[1] * (x.shape.rank - rank - axes[0])])
    value = tf.cast(tf.reshape(values, []), x.dtype)
    return tf.where(mask, x + value if accumulate else value, x)


@operation("aten.index_add.default", "aten.index_copy.default", "aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def _index_add(run: Pass, self: Any, dim: int, index: Any, source: Any = None, value: Any = None, alpha: float = 1) -> tf.Tensor:
    x, index = canonical(self), canonical(index)
    rank, axis = x.shape.rank, dim % x.shape.rank
    order = [axis, *(place for place in range(rank) if place != axis)]
    first = tf.transpose(x, order)
    if source is None:
        part = tf.fill(tf.concat([tf.shape(index), tf.shape(first)[1:]], 0), tf.cast(canonical(value), x.dtype))
    else:
        part = tf.transpose(tf.cast(canonical(source), x.dtype), order) * tf.cast(alpha, x.dtype)
    put = _put(first, tf.cast(index, tf.int64)[:, None], part, "sum" if "add" in run.operation else None)
    return tf.transpose(put, [*range(1, axis + 1), 0, *range(axis + 1, rank)])


@operation("aten.masked_scatter.default")
def _masked_scatter(run: Pass, self: Any, mask: Any, source: Any) -> tf.Tensor:
    """Put the elements of `source`, in order, where a mask is true."""
    x = canonical(self)
    chosen = tf.reshape(tf.broadcast_to(canonical(mask), tf.shape(x)), [-1])
    places = tf.maximum(tf.cumsum(tf.cast(chosen, tf.int64)) - 1, 0)
    picked = tf.gather(tf.reshape(canonical(source), [-1]), places)
    return tf.where(tf.reshape(chosen, tf.shape(x)), tf.reshape(picked, tf.shape(x)), x)


def _sorted(x: tf.Tensor, descending: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Sort along the last dimension; return values and positions."""
    places = tf.argsort(x, -1, "DESCENDING" if descending else "ASCENDING", stable=True)
    return tf.gather(x, places, axis=-1, batch_dims=x.shape.rank - 1), tf.cast(places, tf.int64)


@operation("aten.sort.default", "aten.sort.stable")
def _sort(run: Pass, self: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    x, order = _to_last(canonical(self), dim)
    values, places = _sorted(x, descending)
    return _in_order(values, order), _in_order(places, order)


@operation("aten.argsort.default", "aten.argsort.stable")
def _argsort(run: Pass, self: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tf.Tensor:
    return _sort(run, self, dim, descending)[1]


@operation("aten.kthvalue.default")
def _kth_value(run: Pass, self: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    return _picked(canonical(self), dim, keepdim, lambda count: k - 1)


@operation("aten.median.dim", "aten.nanmedian.dim")
def _median(run: Pass, self: Any, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the lower of two medians, as torch does."""
    return _picked(canonical(self), dim, keepdim, lambda count: (count - 1) // 2)


@operation("aten.median.default", "aten.nanmedian.default")
def _whole_median(run: Pass, self: Any) -> tf.Tensor:
    """Return the lower of two medians; elements equal to it share its gradient, as on torch."""
    x = tf.reshape(canonical(self), [-1])
    value = tf.stop_gradient(_picked(x, 0, False, lambda count: (count - 1) // 2)[0])
    equal = tf.cast(x == value, x.dtype)
    mean = tf.reduce_sum(equal * tf.where(x == value, x, tf.zeros_like(x))) / tf.maximum(tf.reduce_sum(equal), 1)
    return value + (mean - tf.stop_gradient(mean))


def _picked(x: tf.Tensor, dim: int, keepdim: bool, place: Any) -> tuple[tf.Tensor, tf.Tensor]:
    last, order = _to_last(x, dim)
    values, places = (part[..., place(shape_of(last)[-1])][..., None] for part in _sorted(last, False))
    values, places = _in_order(values, order), _in_order(places, order)
    return (values, places) if keepdim or not order else (tf.squeeze(values, dim), tf.squeeze(places, dim))


@operation("aten.cummax.default", "aten.cummin.default")
def _cumulative_extreme(run: Pass, self: Any, dim: int) -> tuple[tf.Tensor, tf.Tensor]:
    x, order = _to_last(canonical(self), dim)
    keys = x if "max" in run.operation else -x
    length = shape_of(x)[-1]
    before = tf.range(length)[None] <= tf.range(length)[:, None]
    scores = tf.where(before, keys[..., None, :], tf.constant(-math.inf, keys.dtype))
    places = tf.cast(length, tf.int64) - 1 - tf.argmax(tf.reverse(scores, [-1]), -1)  # of equal ones torch takes the last
    return _in_order(tf.gather(x, places, axis=-1, batch_dims=x.shape.rank - 1), order), _in_order(places, order)


@operation("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def _searched(
    run: Pass,
    self: Any,
    sorted_sequence: Any = None,
    boundaries: Any = None,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> tf.Tensor:
    edges, x = canonical(boundaries if sorted_sequence is None else sorted_sequence), canonical(self)
    edges, x = promoted(edges, x)
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter")
    end = "right" if right or side == "right" else "left"
    if edges.shape.rank == 1:
        places = tf.searchsorted(edges, tf.reshape(x, [-1]), end, tf.int64)
        places = tf.reshape(places, tf.shape(x))
    else:
        places = tf.searchsorted(edges, x, end, tf.int64)
    return tf.cast(places, tf.int32) if out_int32 else places


@operation("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(run: Pass, self: Any, dimension: int, size: int, step: int) -> tf.Tensor:
    """Return windows along a dimension; the window's elements are the last dimension."""
    x = canonical(self)
    axis = dimension % x.shape.rank
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = tf.gather(x, starts[:, None] + np.arange(size), axis=axis)
    rank = x.shape.rank
    return tf.transpose(windows, [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@operation("aten.im2col.default")
def _windows(
    run: Pass, self: Any, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tf.Tensor:
    """Return [b, c · kernel, windows].

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Unfold.html
    """
    x = canonical(self)
    x = tf.pad(x, [[0, 0], [0, 0], *([amount, amount] for amount in padding)])
    rows, columns = (_window_places(x.shape[2 + axis], kernel_size[axis], dilation[axis], stride[axis]) for axis in (0, 1))
    picked = tf.gather(tf.gather(x, rows.ravel(), axis=2), columns.ravel(), axis=3)
    picked = tf.reshape(picked, [-1, x.shape[1], *rows.shape, *columns.shape])  # [b, c, windows, kernel] of both dimensions
    picked = tf.transpose(picked, [0, 1, 3, 5, 2, 4])
    return tf.reshape(picked, [-1, x.shape[1] * rows.shape[1] * columns.shape[1], rows.shape[0] * columns.shape[0]])


def _window_places(side: int, kernel: int, dilation: int, stride: int) -> Any:
    starts = np.arange(0, side - dilation * (kernel - 1), stride)
    return starts[:, None] + dilation * np.arange(kernel)


@operation("aten.col2im.default")
def _summed_windows(
    run: Pass,
    self: Any,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> tf.Tensor:
    """Sum windows where they overlap: the transpose of `_windows`."""
    x = canonical(self)
    sides = [size + 2 * amount for size, amount in zip(output_size, padding, strict=True)]
    rows, columns = (_window_places(sides[axis], kernel_size[axis], dilation[axis], stride[axis]) for axis in (0, 1))
    channels = x.shape[1] // (rows.shape[1] * columns.shape[1])
    parts = tf.reshape(x, [-1, channels, rows.shape[1], columns.shape[1], rows.shape[0], columns.shape[0]])
    down, across = (tf.constant(_placement(places, side), x.dtype) for places, side in zip((rows, columns), sides, strict=True))
    y = tf.einsum("bcijkl,kih,ljw->bchw", parts, down, across)
    return y[:, :, padding[0] : sides[0] - padding[0], padding[1] : sides[1] - padding[1]]


def _placement(places: Any, side: int) -> Any:
    """Return 1 where an element of a window lies, [windows, kernel, side]."""
    return (places[:, :, None] == np.arange(side)).astype(np.float64)


@operation("aten.as_strided.default", "aten.as_strided_copy.default")
def _strided(run: Pass, self: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: int | None = None) -> tf.Tensor:
    """Return elements of a contiguous tensor by strides."""
    x = canonical(self)
    place = tf.cast(storage_offset or 0, tf.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        steps = tf.range(tf.cast(count, tf.int64)) * tf.cast(step, tf.int64)
        place = place + tf.reshape(steps, [-1 if axis == position else 1 for position in range(len(size))])
    return tf.gather(tf.reshape(x, [-1]), place)


@operation("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(run: Pass, self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> tf.Tensor:
    x = canonical(self)
    rank = x.shape.rank
    last = [dim1 % rank, dim2 % rank]
    return tf.linalg.diag_part(tf.transpose(x, [*(axis for axis in range(rank) if axis not in last), *last]), k=offset)


@operation("aten.diag_embed.default")
def _diagonal_matrix(run: Pass, self: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> tf.Tensor:
    y = tf.linalg.diag(canonical(self), k=offset)
    rank = y.shape.rank
    order = [axis for axis in range(rank) if axis not in (dim1 % rank, dim2 % rank)]
    source = dict(zip([*order, dim1 % rank, dim2 % rank], range(rank), strict=True))
    return tf.transpose(y, [source[axis] for axis in range(rank)])


@operation("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(
    run: Pass,
    weight: tf.Tensor,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[tf.Tensor, None, None, None]:
    """Return sums (mode 0), means (1) or maxima (2) of rows; a bag begins at each offset."""
    indices, offsets = canonical(indices), tf.cast(canonical(offsets), tf.int64)
    if include_last_offset:
        offsets = offsets[:-1]
    bags, count = shape_of(offsets)[0], tf.shape(indices)[0]
    bag = tf.searchsorted(offsets, tf.range(tf.cast(count, tf.int64)), "right") - 1
    rows = tf.gather(weight, indices)
    kept = tf.ones_like(indices, weight.dtype) if padding_idx < 0 else tf.cast(indices != padding_idx, weight.dtype)
    if mode == 2:
        most = tf.math.unsorted_segment_max(tf.where(kept[:, None] > 0, rows, weight.dtype.min), bag, bags)
        return tf.where(most == weight.dtype.min, tf.zeros_like(most), most), None, None, None
    shares = kept if per_sample_weights is None else kept * canonical(per_sample_weights)
    sums = tf.math.unsorted_segment_sum(rows * shares[:, None], bag, bags)
    if mode == 1:
        sums = sums / tf.maximum(tf.math.unsorted_segment_sum(kept, bag, bags), 1.0)[:, None]
    return sums, None, None, None
