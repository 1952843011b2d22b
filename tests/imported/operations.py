"""Operations of ATen on one framework: ``operations.py torch|tf FILE``.

Results and gradients of every case are written.
A case has the operation's arguments by name. Arrays are tensors; those of floats have a gradient.
"""

import sys
import traceback

import numpy as np

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def positive(*shape):
    return np.abs(normal(*shape)) + 0.2


def bounded(*shape):
    return np.tanh(normal(*shape)) * 0.9


def whole(largest, *shape):
    return RANDOM.integers(0, largest, shape)


def tied(*shape):
    """Numbers of which many are equal to each other and to bounds, as of a constant background."""
    return RANDOM.integers(-1, 3, shape).astype(np.float32)


ELEMENTWISE = {
    normal: (
        "abs atan asinh ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh i0 leaky_relu log_sigmoid"
        " mish neg relu relu6 round selu sigmoid sign silu sin sinh softplus special_i0e special_i1 special_i1e square tan tanh trunc"
    ),
    positive: "digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt",
    bounded: "acos asin atanh erfinv",
}
TIED = ("abs", "amax", "amin", "celu", "elu", "hardsigmoid", "max", "min", "relu", "relu6", "selu")
IMAGE = {"input": normal(2, 4, 7, 8)}
POOLED = {"self": normal(2, 3, 7, 9)}
SOLID = {"input": normal(2, 4, 5, 6, 7)}


def transposed(shape, groups, **options):
    """Arguments of a transposed convolution of 4 channels to two for each group."""
    dimensions = len(shape)
    defaults = {"padding": [1] * dimensions, "output_padding": [0] * dimensions, "dilation": [1] * dimensions, "stride": [2] * dimensions}
    return {
        "input": normal(2, 4, *shape),
        "weight": normal(4, 2, *[3] * dimensions),
        "bias": normal(2 * groups),
        **defaults,
        "groups": groups,
        **options,
    }


CASES = [
    *((f"aten.{name}.default", {"self": make(3, 4)}) for make, names in ELEMENTWISE.items() for name in names.split()),
    ("aten.acosh.default", {"self": positive(3, 4) + 1}),
    ("aten.fmod.Scalar", {"self": normal(3, 4), "other": 0.7}),
    ("aten.fmod.Tensor", {"self": normal(3, 4), "other": normal(3, 4)}),
    ("aten.remainder.Scalar", {"self": normal(3, 4), "other": -0.7}),
    ("aten.div.Tensor_mode", {"self": normal(3, 4), "other": positive(3, 4), "rounding_mode": "trunc"}),
    ("aten.div.Tensor_mode", {"self": normal(3, 4), "other": positive(3, 4), "rounding_mode": "floor"}),
    ("aten.floor_divide.default", {"self": whole(9, 3, 4), "other": whole(3, 3, 4) + 1}),
    ("aten.clamp.Tensor", {"self": normal(3, 4), "min": np.float32(-0.3) + np.zeros(4, np.float32), "max": positive(3, 4)}),
    ("aten.atan2.default", {"self": normal(3, 4), "other": normal(3, 4)}),
    ("aten.hypot.default", {"self": normal(3, 4), "other": normal(3, 4)}),
    ("aten.copysign.Tensor", {"self": normal(3, 4), "other": normal(3, 4)}),
    ("aten.round.decimals", {"self": normal(3, 4), "decimals": 1}),
    ("aten.special_erfcx.default", {"self": np.array([-2.0, 0.3, 4.9, 5.1, 30.0], np.float32)}),
    ("aten.polygamma.default", {"n": 1, "self": positive(3, 4)}),
    ("aten._linalg_slogdet.default", {"A": normal(3, 3)}),
    (
        "aten.scaled_dot_product_attention.default",
        {"query": normal(2, 4, 3, 5), "key": normal(2, 2, 6, 5), "value": normal(2, 2, 6, 5), "enable_gqa": True, "scale": 0.3},
    ),
    ("aten.lerp.Tensor", {"self": normal(3, 4), "end": normal(3, 4), "weight": normal(4)}),
    ("aten.prelu.default", {"self": normal(2, 3, 4), "weight": normal(3)}),
    ("aten.cumsum.default", {"self": normal(3, 4), "dim": 1}),
    ("aten.cumprod.default", {"self": normal(3, 4), "dim": 0}),
    ("aten.logcumsumexp.default", {"self": normal(3, 4), "dim": -1}),
    ("aten.cummax.default", {"self": normal(3, 4, 2), "dim": 1}),
    ("aten.cummin.default", {"self": normal(3, 4), "dim": 0}),
    ("aten.sort.default", {"self": normal(3, 4, 2), "dim": 1, "descending": True}),
    ("aten.sort.stable", {"self": normal(3, 4), "stable": True, "dim": 0}),
    ("aten.argsort.default", {"self": normal(3, 4), "dim": 0}),
    ("aten.topk.default", {"self": normal(3, 5, 2), "k": 2, "dim": 1, "largest": False}),
    ("aten.kthvalue.default", {"self": normal(3, 5), "k": 2, "dim": 0, "keepdim": True}),
    ("aten.median.dim", {"self": normal(3, 4), "dim": 1}),
    ("aten.median.default", {"self": normal(3, 4)}),
    ("aten.searchsorted.Tensor", {"sorted_sequence": np.sort(normal(5)), "self": normal(3, 4), "right": True}),
    ("aten.bucketize.Tensor", {"self": whole(7, 3, 4), "boundaries": np.array([1.0, 2.5, 4.0], np.float32)}),
    ("aten.gather.default", {"self": normal(3, 5, 2), "dim": 1, "index": whole(5, 3, 4, 2)}),
    ("aten.scatter.src", {"self": normal(3, 5), "dim": 1, "index": np.argsort(normal(2, 5))[:, :3], "src": normal(2, 3)}),
    ("aten.scatter.value", {"self": normal(3, 5), "dim": -1, "index": whole(5, 3, 2), "value": 0.5}),
    ("aten.scatter_add.default", {"self": normal(3, 5), "dim": 0, "index": whole(3, 4, 5), "src": normal(4, 5)}),
    *(
        (
            "aten.scatter_reduce.two",
            {"self": normal(3, 5), "dim": 1, "index": whole(5, 3, 6), "src": normal(3, 6), "reduce": kind, "include_self": included},
        )
        for kind in ("sum", "mean", "amax", "amin")
        for included in (True, False)
    ),
    ("aten.index_add.default", {"self": normal(3, 5, 2), "dim": 1, "index": whole(5, 4), "source": normal(3, 4, 2), "alpha": 2}),
    ("aten.index_copy.default", {"self": normal(3, 5), "dim": 1, "index": np.array([4, 0]), "source": normal(3, 2)}),
    ("aten.index_fill.int_Scalar", {"self": normal(3, 5), "dim": 0, "index": np.array([2]), "value": 0.5}),
    ("aten.index_put.default", {"self": normal(3, 5, 2), "indices": [None, np.array([4, -5])], "values": normal(3, 2, 2)}),
    (
        "aten.index_put.default",
        {"self": normal(3, 5), "indices": [np.array([0, 0, 2]), np.array([1, 1, 3])], "values": normal(3), "accumulate": True},
    ),
    ("aten.index_put.default", {"self": normal(3, 5), "indices": [normal(3, 5) > 0], "values": normal()}),
    ("aten.index_put.default", {"self": normal(3, 5), "indices": [normal(3) > 0], "values": normal(1)}),
    ("aten.index.Tensor", {"self": normal(3, 5, 2), "indices": [None, whole(5, 2, 3), whole(2, 3)]}),
    ("aten.index.Tensor", {"self": normal(3, 5, 2), "indices": [whole(3, 4), None, whole(2, 4)]}),
    ("aten.index_put.default", {"self": normal(3, 5, 4), "indices": [whole(3, 2), None, np.array([1, 3])], "values": normal(2, 5)}),
    ("aten.masked_scatter.default", {"self": normal(3, 5), "mask": normal(3, 5) > 0, "source": normal(20)}),
    ("aten.unfold.default", {"self": normal(3, 9, 2), "dimension": 1, "size": 3, "step": 2}),
    ("aten.im2col.default", {**POOLED, "kernel_size": [3, 2], "dilation": [2, 1], "padding": [1, 2], "stride": [1, 2]}),
    (
        "aten.col2im.default",
        {"self": normal(2, 12, 30), "output_size": [6, 7], "kernel_size": [3, 2], "dilation": [1, 1], "padding": [1, 2], "stride": [1, 2]},
    ),
    ("aten.as_strided.default", {"self": normal(4, 6), "size": [3, 2, 2], "stride": [6, 2, 1], "storage_offset": 1}),
    ("aten.diagonal.default", {"self": normal(3, 4, 5), "offset": 1, "dim1": 2, "dim2": 0}),
    ("aten.diag_embed.default", {"self": normal(3, 4), "offset": -1, "dim1": 0, "dim2": 2}),
    *(
        ("aten._embedding_bag.default", {"weight": normal(6, 3), "indices": whole(6, 7), "offsets": np.array([0, 2, 2, 5]), "mode": mode})
        for mode in (0, 1)
    ),
    ("aten.conv2d.default", {**IMAGE, "weight": normal(8, 1, 3, 3), "bias": normal(8), "stride": [2, 1], "padding": [1, 0], "groups": 4}),
    ("aten.conv2d.default", {**IMAGE, "weight": normal(6, 4, 3, 3), "stride": [2, 2], "dilation": [2, 1], "padding": [2, 1]}),
    ("aten.conv2d.default", {**IMAGE, "weight": normal(4, 2, 3, 2), "stride": [2, 2], "dilation": [1, 2], "groups": 2}),
    ("aten.conv2d.padding", {**IMAGE, "weight": normal(6, 4, 4, 3), "padding": "same", "dilation": [2, 1]}),
    (
        "aten.conv1d.default",
        {"input": normal(2, 4, 9), "weight": normal(6, 2, 3), "stride": [2], "padding": [1], "dilation": [2], "groups": 2},
    ),
    ("aten.conv1d.padding", {"input": normal(2, 4, 9), "weight": normal(6, 4, 2), "padding": "same"}),
    (
        "aten.conv3d.default",
        {**SOLID, "weight": normal(6, 2, 2, 3, 3), "bias": normal(6), "stride": [2, 1, 2], "padding": [1, 0, 1], "groups": 2},
    ),
    ("aten.conv3d.default", {**SOLID, "weight": normal(3, 4, 2, 3, 2), "dilation": [2, 1, 2]}),
    ("aten.conv3d.padding", {**SOLID, "weight": normal(3, 4, 2, 3, 2), "padding": "same"}),
    ("aten.conv_transpose2d.input", transposed((4, 5), 1, output_padding=[1, 0])),
    ("aten.conv_transpose2d.input", transposed((4, 5), 2, stride=[3, 2], output_padding=[1, 1])),
    ("aten.conv_transpose2d.input", transposed((4, 5), 1, dilation=[2, 1], stride=[1, 2], padding=[3, 0])),
    ("aten.conv_transpose1d.default", transposed((5,), 4)),
    ("aten.conv_transpose3d.input", transposed((3, 4, 3), 2, output_padding=[0, 1, 0])),
    (
        "aten.max_pool2d.default",
        {**POOLED, "kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 1], "dilation": [2, 1], "ceil_mode": True},
    ),
    ("aten.max_pool2d_with_indices.default", {**POOLED, "kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 1], "ceil_mode": True}),
    (
        "aten.max_pool3d_with_indices.default",
        {"self": normal(2, 3, 4, 5, 6), "kernel_size": [2], "stride": [1, 2, 2], "padding": [1], "dilation": [1]},
    ),
    ("aten.max_pool1d.default", {"self": normal(2, 3, 9), "kernel_size": [3], "stride": [2], "padding": [1], "ceil_mode": True}),
    (
        "aten.avg_pool2d.default",
        {**POOLED, "kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 1], "ceil_mode": True, "count_include_pad": True},
    ),
    (
        "aten.avg_pool3d.default",
        {"self": normal(2, 3, 4, 5, 6), "kernel_size": [2, 3, 3], "stride": [1, 2, 2], "padding": [1, 1, 0], "ceil_mode": True},
    ),
    ("aten.avg_pool3d.default", {"self": normal(2, 3, 4, 5, 6), "kernel_size": [2], "padding": [1], "count_include_pad": False}),
    ("aten._adaptive_avg_pool3d.default", {"self": normal(2, 3, 4, 5, 6), "output_size": [2, 3, 4]}),
    ("aten.adaptive_max_pool2d.default", {**POOLED, "output_size": [3, 4]}),
    *(
        (f"aten.{kind}2d.default", {**POOLED, "output_size": [11, 5], "align_corners": corners})
        for kind in ("upsample_bilinear", "upsample_bicubic", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
        for corners in (False, True)
        if not kind.endswith("aa")
    ),
    *(
        (f"aten._upsample_{kind}2d_aa.default", {**POOLED, "output_size": [3, 20], "align_corners": False})
        for kind in ("bilinear", "bicubic")
    ),
    *((f"aten.{kind}2d.default", {**POOLED, "output_size": [11, 5]}) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
    ("aten.upsample_nearest2d.vec", {"input": POOLED["self"], "output_size": None, "scale_factors": [1.5, 2.3]}),
    ("aten.upsample_bicubic2d.vec", {"input": POOLED["self"], "output_size": None, "align_corners": False, "scale_factors": [1.5, 0.6]}),
    ("aten.upsample_trilinear3d.default", {"self": normal(2, 3, 4, 5, 6), "output_size": [5, 4, 9], "align_corners": False}),
    ("aten.upsample_linear1d.default", {"self": normal(2, 3, 7), "output_size": [10], "align_corners": True}),
    *((f"aten.{kind}_pad2d.default", {**POOLED, "padding": [1, 2, 3, 0]}) for kind in ("reflection", "replication")),
    ("aten.pad.default", {**POOLED, "pad": [1, 2, 0, 3], "mode": "circular"}),
    ("aten.pad.default", {**POOLED, "pad": [-1, 2, 3, -1], "mode": "constant", "value": 0.5}),
    *(
        (
            "aten.grid_sampler_2d.default",
            {**IMAGE, "grid": normal(2, 3, 4, 2), "interpolation_mode": 0, "padding_mode": padding, "align_corners": padding == 1},
        )
        for padding in (0, 1)
    ),
    ("aten.pixel_unshuffle.default", {"self": normal(2, 3, 4, 6), "downscale_factor": 2}),
    ("aten.channel_shuffle.default", {"self": normal(2, 6, 3), "groups": 3}),
    ("aten.group_norm.default", {**IMAGE, "num_groups": 2, "weight": normal(4), "bias": normal(4)}),
    (
        "aten.instance_norm.default",
        {**IMAGE, "weight": normal(4), "bias": normal(4), "running_mean": None, "running_var": None}
        | {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False},
    ),
    ("aten.rms_norm.default", {"input": normal(3, 4, 5), "normalized_shape": [4, 5], "weight": normal(4, 5)}),
    ("aten._fft_r2c.default", {"self": normal(3, 4, 5), "dim": [2], "normalization": 1, "onesided": True}),
    ("aten._fft_r2c.default", {"self": normal(3, 4, 5), "dim": [0, 2], "normalization": 0, "onesided": False}),
    ("aten._fft_c2c.default", {"self": normal(3, 4) + 1j * normal(3, 4), "dim": [0, 1], "normalization": 2, "forward": False}),
    ("aten._fft_c2r.default", {"self": normal(3, 4) + 1j * normal(3, 4), "dim": [0, 1], "normalization": 2, "last_dim_size": 6}),
    ("aten.view_as_complex.default", {"self": normal(3, 2)}),
    ("aten.view_as_real.default", {"self": normal(3, 2) + 1j * normal(3, 2)}),
    ("aten.polar.default", {"abs": positive(3), "angle": normal(3)}),
    ("aten.angle.default", {"self": normal(3) + 1j * normal(3)}),
    *(
        ("aten._cdist_forward.default", {"x1": normal(2, 3, 4), "x2": normal(2, 5, 4), "p": p, "compute_mode": None})
        for p in (1.0, 2.0, 3.0)
    ),
    ("aten._linalg_solve_ex.default", {"A": normal(2, 3, 3), "B": normal(2, 3, 2)}),
    ("aten._linalg_solve_ex.default", {"A": normal(3, 3), "B": normal(2, 3), "left": False}),
    ("aten.linalg_inv_ex.default", {"A": normal(2, 3, 3)}),
    ("aten.linalg_matrix_exp.default", {"self": normal(3, 3)}),
    (
        "aten.linalg_solve_triangular.default",
        {"self": np.eye(3, dtype=np.float32) * 2 + normal(3, 3) * 0.1, "B": normal(3, 2), "upper": True},
    ),
    ("aten.linalg_householder_product.default", {"input": normal(4, 3), "tau": positive(3)}),
    ("aten.linalg_vector_norm.default", {"self": normal(3, 4), "ord": 3.0, "dim": [1], "keepdim": True}),
    ("aten.bilinear.default", {"input1": normal(3, 4), "input2": normal(3, 5), "weight": normal(2, 4, 5), "bias": normal(2)}),
    ("aten.var_mean.correction", {"self": normal(3, 4), "dim": [1], "correction": 1, "keepdim": True}),
    # Where values are equal, a gradient is a matter of convention.
    *((f"aten.{name}.default", {"self": tied(3, 5)}) for name in TIED),
    ("aten.clamp.Tensor", {"self": tied(3, 5), "min": tied(3, 5), "max": tied(3, 5) + 1}),
    ("aten.hardtanh.default", {"self": tied(3, 5), "min_val": 0.0, "max_val": 1.0}),
    ("aten.clamp.default", {"self": tied(3, 5), "min": 0.0, "max": 1.0}),
    ("aten.clamp_min.default", {"self": tied(3, 5), "min": 0.0}),
    *((f"aten.{name}.default", {"self": tied(3, 5), "other": tied(3, 5)}) for name in ("maximum", "minimum")),
    *((f"aten.{name}.dim", {"self": tied(3, 5), "dim": 1, "keepdim": keep}) for name, keep in (("max", False), ("min", True))),
    *((f"aten.{name}.default", {"self": tied(3, 5), "dim": 1}) for name in ("cummax", "cummin", "cumprod")),
    *((f"aten.median.{kind}", {"self": tied(3, 5), **more}) for kind, more in (("default", {}), ("dim", {"dim": 1}))),
    ("aten.sort.stable", {"self": tied(3, 5), "stable": True, "dim": 1, "descending": True}),
    ("aten.adaptive_max_pool2d.default", {"self": tied(2, 3, 5, 7), "output_size": [2, 3]}),
    ("aten.max_pool2d.default", {"self": tied(2, 3, 6, 6), "kernel_size": [2, 2], "stride": [2, 2]}),
    ("aten.std.correction", {"self": np.repeat(tied(3, 1), 4, 1), "dim": [1]}),
    (
        "aten.scatter_reduce.two",
        {"self": tied(3, 5), "dim": 1, "index": whole(5, 3, 5), "src": tied(3, 5), "reduce": "amax", "include_self": True},
    ),
    ("aten.cat.default", {"tensors": [np.zeros(0, np.float32), normal(2, 3), normal(2, 1)], "dim": -1}),  # as caches of keys begin
    ("aten.select_scatter.default", {"self": normal(3, 4), "src": normal(3), "dim": 1, "index": -1}),
    ("aten.slice_scatter.default", {"self": normal(3, 6), "src": normal(3, 2), "dim": 1, "start": 1, "end": 5, "step": 2}),
]


def mapped(value, function):
    if isinstance(value, list):
        return [mapped(part, function) for part in value]
    return function(value) if isinstance(value, np.ndarray | np.generic) else value


def flat(result):
    return [part for part in (result if isinstance(result, tuple | list) else [result]) if part is not None]


def weights(place, shape):
    """Weights of a result's elements in the sum whose gradient is compared."""
    return np.cos(np.arange(np.prod(shape)) + place).reshape(shape).astype(np.float32)


def by_torch(name, arguments):
    import torch

    namespace, operation, overload = name.split(".")
    leaves = []

    def tensor(array):
        value = torch.tensor(array)
        if value.is_floating_point() or value.is_complex():
            leaves.append(value.requires_grad_())
        return value

    values = {key: mapped(value, tensor) for key, value in arguments.items()}
    results = flat(getattr(getattr(getattr(torch.ops, namespace), operation), overload)(**values))
    floats = [part for part in results if isinstance(part, torch.Tensor) and part.requires_grad]
    gradients = []
    if floats:
        reals = [torch.view_as_real(part) if part.is_complex() else part for part in floats]
        total = sum((part * torch.from_numpy(weights(place, part.shape))).sum() for place, part in enumerate(reals))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [part.detach().numpy() for part in results], [None if part is None else part.resolve_conj().numpy() for part in gradients]


def by_tf(name, arguments):
    import tensorflow as tf

    from crosstrain.models.imported.tf.forward import OPERATIONS, canonical

    leaves = []

    class Run:
        operation = name
        training = True

        def low(self, x):
            return x

        def kernel(self, weight):
            return tf.transpose(weight, [2, 3, 1, 0])

    def tensor(array):
        value = tf.constant(array)
        if value.dtype.is_floating or value.dtype.is_complex:
            leaves.append(value)
            tape.watch(value)
        return value

    with tf.GradientTape() as tape:
        values = {key: mapped(value, tensor) for key, value in arguments.items()}
        results = [canonical(part) for part in flat(OPERATIONS[name](Run(), **values))]
        floats = [part for part in results if part.dtype.is_floating or part.dtype.is_complex]
        reals = [tf.stack([tf.math.real(part), tf.math.imag(part)], -1) if part.dtype.is_complex else part for part in floats]
        total = sum(tf.reduce_sum(part * weights(place, part.shape)) for place, part in enumerate(reals))
    gradients = tape.gradient(total, leaves) if floats else []
    return [part.numpy() for part in results], [None if part is None else tf.convert_to_tensor(part).numpy() for part in gradients]


def main(framework, path):
    arrays = {}
    for number, (name, arguments) in enumerate(CASES):
        try:
            results, gradients = {"torch": by_torch, "tf": by_tf}[framework](name, arguments)
        except Exception:  # noqa: BLE001 -- of any kind, to be reported with the others'
            arrays[f"{number} {name} failed"] = np.array(traceback.format_exc(limit=-3))
            continue
        arrays |= {f"{number} {name} result {place}": part for place, part in enumerate(results)}
        arrays |= {f"{number} {name} gradient {place}": part for place, part in enumerate(gradients) if part is not None}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
