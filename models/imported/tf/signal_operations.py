"""ATen operations on complex numbers, spectra, matrices and distances, on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .operations import Pass, canonical, length, operation


@operation("aten.view_as_complex.default")
def _as_complex(run: Pass, self: Any) -> tf.Tensor:
    x = canonical(self)
    return tf.complex(x[..., 0], x[..., 1])


@operation("aten.view_as_real.default")
def _as_real(run: Pass, self: Any) -> tf.Tensor:
    x = canonical(self)
    return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)


@operation("aten.complex.default")
def _complex(run: Pass, real: Any, imag: Any) -> tf.Tensor:
    return tf.complex(canonical(real), canonical(imag))


@operation("aten.polar.default")
def _polar(run: Pass, abs: Any, angle: Any) -> tf.Tensor:
    length, angle = canonical(abs), canonical(angle)
    return tf.complex(length * tf.cos(angle), length * tf.sin(angle))


def _axes_last(x: tf.Tensor, dims: Sequence[int]) -> tuple[tf.Tensor, list[int]]:
    """Return a tensor with dimensions moved to the end, and the order that moves them back."""
    rank = x.shape.rank
    wanted = [axis % rank for axis in dims]
    order = [axis for axis in range(rank) if axis not in wanted] + wanted
    return tf.transpose(x, order), [order.index(axis) for axis in range(rank)]


def _scaled(x: tf.Tensor, size: tf.Tensor, normalization: int) -> tf.Tensor:
    """Divide by nothing (0), the root of the size (1), or the size (2), as torch numbers them."""
    count = tf.cast(size, tf.float64)
    factor = tf.ones([], tf.float64) if normalization == 0 else tf.math.rsqrt(count) if normalization == 1 else 1 / count
    return x * tf.cast(factor, x.dtype)


@operation("aten._fft_c2c.default", "aten._fft_r2c.default")
def _fourier(run: Pass, self: Any, dim: Sequence[int], normalization: int, forward: bool = True, onesided: bool = False) -> tf.Tensor:
    """Transform each dimension; a one-sided result has the first half of the last one."""
    x, back = _axes_last(canonical(self), dim)
    size = tf.reduce_prod(tf.shape(x)[-len(dim) :])
    length = x.shape[-1]
    x = x if x.dtype.is_complex else tf.cast(x, tf.complex128 if x.dtype == tf.float64 else tf.complex64)
    transform = tf.signal.fft if forward else tf.signal.ifft
    for position in range(1, len(dim) + 1):
        swapped, restored = _axes_last(x, [-position])
        x = tf.transpose(transform(swapped), restored)
    if not forward:
        x = x * tf.cast(size, x.dtype)
    x = _scaled(x, size, normalization)
    return tf.transpose(x[..., : length // 2 + 1] if onesided else x, back)


@operation("aten._fft_c2r.default")
def _real_fourier(run: Pass, self: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> tf.Tensor:
    x, back = _axes_last(canonical(self), dim)
    for position in range(2, len(dim) + 1):
        swapped, restored = _axes_last(x, [-position])
        x = tf.transpose(tf.signal.ifft(swapped), restored)
    y = tf.signal.irfft(x, [last_dim_size])
    size = tf.reduce_prod(tf.shape(y)[-len(dim) :])
    return tf.transpose(_scaled(y * tf.cast(size, y.dtype), size, normalization), back)


@operation("aten._cdist_forward.default", "aten.cdist.default")
def _distances(run: Pass, x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> tf.Tensor:
    """Return distances of all pairs of rows."""
    return length(canonical(x1)[..., :, None, :] - canonical(x2)[..., None, :, :], p, [-1])


@operation("aten._linalg_solve_ex.default", "aten.linalg_solve.default")
def _solved(run: Pass, A: Any, B: Any, left: bool = True, check_errors: bool = False) -> Any:  # noqa: N803
    matrix, sides = canonical(A), canonical(B)
    is_vector = sides.shape.rank == matrix.shape.rank - 1
    sides = sides[..., None] if is_vector else sides
    if left:
        x = tf.linalg.solve(matrix, sides)
    else:
        x = tf.linalg.matrix_transpose(tf.linalg.solve(matrix, tf.linalg.matrix_transpose(sides), adjoint=True))
    x = x[..., 0] if is_vector else x
    return x if run.operation == "aten.linalg_solve.default" else (x, None, None, None)


@operation("aten.linalg_inv_ex.default", "aten.linalg_inv.default", "aten.inverse.default")
def _inverse(run: Pass, self: Any = None, A: Any = None, check_errors: bool = False) -> Any:  # noqa: N803
    y = tf.linalg.inv(canonical(self if A is None else A))
    return (y, None) if run.operation == "aten.linalg_inv_ex.default" else y


@operation("aten._linalg_det.default", "aten.linalg_det.default")
def _determinant(run: Pass, self: Any = None, A: Any = None) -> Any:  # noqa: N803
    y = tf.linalg.det(canonical(self if A is None else A))
    return (y, None, None) if run.operation == "aten._linalg_det.default" else y


@operation("aten._linalg_slogdet.default")
def _log_determinant(run: Pass, A: Any) -> tuple[tf.Tensor, tf.Tensor, None, None]:  # noqa: N803
    sign, logarithm = tf.linalg.slogdet(canonical(A))
    return sign, logarithm, None, None


@operation("aten.linalg_matrix_exp.default")
def _matrix_exponential(run: Pass, self: Any) -> tf.Tensor:
    return tf.linalg.expm(canonical(self))


@operation("aten.linalg_cholesky_ex.default", "aten.linalg_cholesky.default")
def _cholesky(run: Pass, self: Any, upper: bool = False, check_errors: bool = False) -> Any:
    y = tf.linalg.cholesky(canonical(self))
    y = tf.linalg.matrix_transpose(y) if upper else y
    return (y, None) if run.operation == "aten.linalg_cholesky_ex.default" else y


@operation("aten.linalg_solve_triangular.default")
def _solved_triangular(run: Pass, self: Any, B: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> tf.Tensor:  # noqa: N803
    matrix, sides = canonical(self), canonical(B)
    if unitriangular:
        matrix = tf.linalg.set_diag(matrix, tf.ones_like(tf.linalg.diag_part(matrix)))
    if left:
        return tf.linalg.triangular_solve(matrix, sides, lower=not upper)
    solved = tf.linalg.triangular_solve(matrix, tf.linalg.matrix_transpose(sides), lower=not upper, adjoint=True)
    return tf.linalg.matrix_transpose(solved)


@operation("aten.linalg_householder_product.default")
def _reflected(run: Pass, input: Any, tau: Any) -> tf.Tensor:
    """Multiply reflections I − τ v vᵀ.

    https://docs.pytorch.org/docs/stable/generated/torch.linalg.householder_product.html
    """
    vectors, scales = canonical(input), canonical(tau)
    rows, columns = vectors.shape[-2], vectors.shape[-1]
    below = tf.linalg.band_part(vectors, -1, 0)
    unit = tf.linalg.set_diag(below, tf.ones_like(tf.linalg.diag_part(below)))
    y = tf.eye(rows, columns, dtype=vectors.dtype)
    for place in reversed(range(scales.shape[-1])):
        v = unit[..., place, None]
        y = y - scales[..., place, None, None] * tf.matmul(v, tf.matmul(v, y, transpose_a=True))
    return y
