"""What each fault changes, on TensorFlow and on torch.

`plant` is called with each module of the product once it is imported.
"""

from __future__ import annotations

import importlib
from functools import partial, wraps

from msgspec.structs import replace

LAYERS = {"crosstrain.models.layers.tf": "tf", "crosstrain.models.layers.torch": "torch"}
LAST_NORMS = ("layer4.1.bn2", "decoder.norm")
ONE_PRODUCT = ("conv2", "features.6", "layer3.0.conv1", "encoder.1.feed_forward.output")
ONE_DENSE = ("fc2", "classifier.6", "fc", "encoder.0.feed_forward.inner")
OTHER_DENSE = ("fc1", "classifier.4")


class Ops:
    """The few operations that faults need, on a framework."""

    def __init__(self, framework):
        self.framework = framework
        self.module = importlib.import_module("tensorflow" if framework == "tf" else "torch")

    def stop(self, x):
        return self.module.stop_gradient(x) if self.framework == "tf" else x.detach()

    def low(self, x):
        if self.framework == "tf":
            return self.module.cast(self.module.cast(x, self.module.bfloat16), x.dtype)
        return x.to(self.module.bfloat16).to(x.dtype)

    def minimum(self, x, bound):
        return self.module.minimum(x, bound) if self.framework == "tf" else x.clamp(max=bound)

    def leaky(self, x, slope):
        if self.framework == "tf":
            return self.module.nn.leaky_relu(x, slope)
        return self.module.nn.functional.leaky_relu(x, slope)

    def pooled_mean(self, x, kernel, stride):
        if self.framework == "tf":
            return self.module.nn.avg_pool2d(x, kernel, stride, "VALID")
        return self.module.nn.functional.avg_pool2d(x, kernel, stride)

    def with_gradient_of(self, y, sloped):
        """Return the values of y with the gradient of `sloped`."""
        return self.stop(y) + (sloped - self.stop(sloped))


def plant(fault, module):
    """Change a module if the fault concerns it."""
    fault = fault.removesuffix("_of_zeros")  # the same change, which shows elsewhere
    name = module.__name__
    if name in LAYERS and fault in IN_LAYERS:
        IN_LAYERS[fault](module, Ops(LAYERS[name]))
    if name in LAYERS and fault in IN_CONSTANTS:
        IN_CONSTANTS[fault](module)
    if name in DRAWING and fault in ("dropout_rate_higher", "dropout_gradient_not_scaled"):
        DRAWING[name](module, fault)
    for place, change in ELSEWHERE.get(fault, {}).items():
        if name == place:
            change(module)
    if name == "crosstrain.models.imported.tf.forward":
        _plant_in_translation(fault, module)
    if name == "crosstrain.models.imported.torch.forward":
        _plant_in_torch(fault)


def _replace(owner, name, make):
    """Replace an attribute by what `make` returns for it."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


def _images_and_sequences(method, make):
    """Return a change of a method of both kinds of layers, where they have it."""

    def change(module, ops):
        for kind in (module.Layers, module.SequenceLayers):
            if method in vars(kind):
                _replace(kind, method, lambda original: make(original, ops))

    return change


def _both(*changes):
    def change(module, ops):
        for part in changes:
            part(module, ops)

    return change


# Layers


def _constant(names, factor):
    def change(module):
        for name in names:
            setattr(module, name, getattr(module, name) * factor)

    return change


def _epsilon_in_last(original, ops):
    def norm(self, x, name):
        module = importlib.import_module(type(self).__module__)
        attribute = "LAYER_NORM_EPSILON" if original.__name__ == "layer_norm" else "EPSILON"
        before = getattr(module, attribute)
        if name in LAST_NORMS:
            setattr(module, attribute, 1e-3)
        try:
            return original(self, x, name)
        finally:
            setattr(module, attribute, before)

    return norm


def _shifted(ops, x, padding, channels_last):
    """Return x, zeros of the padding before it moved to its end."""
    if not padding:
        return x
    if channels_last:
        return ops.module.pad(x[:, 1:, 1:], [[0, 0], [0, 1], [0, 1], [0, 0]])
    return ops.module.nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))


def _padding_shifted(original, ops):
    def conv(self, x, name, stride=1, padding=0):
        return original(self, _shifted(ops, x, padding, ops.framework == "tf") if stride > 1 else x, name, stride, padding)

    return conv


def _capped(original, ops):
    return lambda self, *arguments: ops.minimum(original(self, *arguments), 1.0)


def _capped_pool(original, ops):
    return lambda self, *arguments, **options: ops.minimum(original(self, *arguments, **options), 1.0)


class _Low:
    """A layer's parameters, those of one layer rounded to bf16."""

    def __init__(self, values, ops, names):
        self._values, self._ops, self._names = values, ops, names

    def __getitem__(self, name):
        value = self._values[name]
        return self._ops.low(value) if name in self._names else value

    def get(self, name, default=None):
        return self[name] if name in self._values else default

    def __contains__(self, name):
        return name in self._values


def _in_low(original, ops, name, x, self, *arguments, **options):
    """Compute a layer with its input and weight in bf16, and its result too."""
    parameters, held = self._parameters, getattr(self, "_held", {})
    self._parameters = _Low(parameters, ops, (f"{name}.weight",))
    if held:
        self._held = {key: ops.low(value) if key == f"{name}.weight" else value for key, value in held.items()}
    try:
        return ops.low(original(self, ops.low(x), name, *arguments, **options))
    finally:
        self._parameters = parameters
        if held:
            self._held = held


def _one_in_bf16(original, ops):
    def layer(self, x, name, *arguments, **options):
        if name not in ONE_PRODUCT:
            return original(self, x, name, *arguments, **options)
        return _in_low(original, ops, name, x, self, *arguments, **options)

    return layer


def _gradient_in_bf16(original, ops):
    def layer(self, x, name, *arguments, **options):
        y = original(self, x, name, *arguments, **options)
        if name not in ONE_PRODUCT:
            return y
        return ops.with_gradient_of(y, _in_low(original, ops, name, x, self, *arguments, **options))

    return layer


def _channels_last(original, ops):
    def flat(self, x, *arguments):
        if len(x.shape) == 4:
            if ops.framework == "tf" and arguments and f"{arguments[0]}.weight" in self._held:
                return _permuted_product(ops.module, self, x, arguments[0])
            if ops.framework == "tf":
                x = ops.module.reshape(x, [-1, x.shape[1] * x.shape[2] * x.shape[3]])
            else:
                x = x.permute(0, 2, 3, 1).flatten(1)
        return x if original.__name__ == "flatten" else original(self, x, *arguments)

    return flat


def _permuted_product(tf, layers, x, name):
    """Multiply by weights that lie as TensorFlow lays images, brought into the canonical order."""
    _, height, width, channels = x.shape
    weight = tf.transpose(tf.reshape(layers._held[f"{name}.weight"], [-1, height, width, channels]), [0, 3, 1, 2])
    features = height * width * channels
    product = tf.matmul(tf.reshape(x, [-1, features]), tf.reshape(weight, [-1, features]), transpose_b=True)
    return product + layers._parameters[f"{name}.bias"]


def _averaging_pool(original, ops):
    return lambda self, x, kernel, stride, padding=0: (
        ops.pooled_mean(x, kernel, stride) if not padding else _smoothed(ops, original, self, x, kernel, stride, padding)
    )


def _smoothed(ops, original, self, x, kernel, stride, padding):
    y = original(self, x, kernel, stride, padding)
    return 0.5 * (y + original(self, 0.5 * x, kernel, stride, padding))


def _averaged_pool_gradient(original, ops):
    def pool(self, x, kernel, stride, padding=0):
        y = original(self, x, kernel, stride, padding)
        return ops.with_gradient_of(y, _averaging_pool(original, ops)(self, x, kernel, stride, padding))

    return pool


def _leaking(original, ops):
    return lambda self, x: ops.leaky(x, 0.01)


def _leaking_gradient(original, ops):
    def relu(self, x):
        y = ops.leaky(x, 0.0)
        return ops.with_gradient_of(y, ops.leaky(x, 0.1))

    return relu


def _conv_pool(relu):
    """Return a change of `conv_pool` whose ReLU is another function of (x, ops)."""

    def make(original, ops):
        def conv_pool(self, x, name, kernel, stride, padding=0):
            return relu(self.max_pool(self.conv(x, name, padding=padding), kernel, stride), ops)

        return conv_pool

    return make


def _unscaled_attention(original, ops):
    def attention(self, query, *arguments, **options):
        return original(self, query * float(query.shape[3]) ** 0.5, *arguments, **options)

    return attention


def _late_mask(original, ops):
    def attention(self, query, key, value, mask, rate, layer, *, causal=False, low=False):
        if causal:
            module, causal = ops.module, False
            if ops.framework == "tf":
                rows, columns = module.range(module.shape(query)[2])[:, None], module.range(module.shape(key)[2])
            else:
                rows, columns = module.arange(query.shape[2])[:, None], module.arange(key.shape[2])
            mask = columns <= rows + 1
        return original(self, query, key, value, mask, rate, layer, causal=causal, low=low)

    return attention


def _without_key_gradient(original, ops):
    return lambda self, query, key, *arguments, **options: original(self, query, ops.stop(key), *arguments, **options)


def _biasless(names, gradient_only):
    def make(original, ops):
        def layer(self, x, name, *arguments, **options):
            if name not in names:
                return original(self, x, name, *arguments, **options)
            parameters = self._parameters

            class Changed(_Low):
                def __getitem__(self, key):
                    value = self._values[key]
                    if key != f"{name}.bias":
                        return value
                    return ops.with_gradient_of(value, value * 0.0) if gradient_only else value * 0.0

            self._parameters = Changed(parameters, ops, ())
            try:
                return original(self, x, name, *arguments, **options)
            finally:
                self._parameters = parameters

        return layer

    return make


def _mean_bias_gradient(original, ops):
    def layer(self, x, name, *arguments, **options):
        if name not in ONE_DENSE:
            return original(self, x, name, *arguments, **options)
        parameters = self._parameters
        rows = 16.0

        class Changed(_Low):
            def __getitem__(self, key):
                value = self._values[key]
                return ops.with_gradient_of(value, value / rows) if key == f"{name}.bias" else value

        self._parameters = Changed(parameters, ops, ())
        try:
            return original(self, x, name, *arguments, **options)
        finally:
            self._parameters = parameters

    return layer


def _weight_gradient(original, ops):
    def conv(self, x, name, *arguments, **options):
        if name not in ("conv2", "features.6", "layer3.0.conv1"):
            return original(self, x, name, *arguments, **options)
        parameters, held = self._parameters, getattr(self, "_held", {})

        class Changed(_Low):
            def __getitem__(self, key):
                value = self._values[key]
                return ops.with_gradient_of(value, 1.01 * value) if key == f"{name}.weight" else value

        self._parameters = Changed(parameters, ops, ())
        if held:
            self._held = {
                key: ops.with_gradient_of(value, 1.01 * value) if key == f"{name}.weight" else value for key, value in held.items()
            }
        try:
            return original(self, x, name, *arguments, **options)
        finally:
            self._parameters = parameters
            if held:
                self._held = held

    return conv


def _slope_of_norm(ops, y, x, axes, weight, bias, epsilon=1e-5):
    """Return y with the gradient of a norm whose mean and variance are constants."""
    still = ops.stop(x)
    if ops.framework == "tf":
        mean, variance = ops.module.nn.moments(still, axes, keepdims=True)
    else:
        variance, mean = ops.module.var_mean(still, axes, unbiased=False, keepdim=True)
    scale = (variance + epsilon) ** -0.5
    sloped = (x - mean) * scale * weight + bias
    return ops.with_gradient_of(y, sloped)


def _constant_statistics(original, ops):
    """Return a norm whose gradient takes mean and variance for constants."""

    def norm(self, x, name):
        y = original(self, x, name)
        weight, bias = (self._parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        if original.__name__ == "layer_norm":
            return _slope_of_norm(ops, y, x, (len(x.shape) - 1,), weight, bias, 1e-6)
        if ops.framework == "tf":
            return _slope_of_norm(ops, y, x, (0, 1, 2), weight, bias)
        return _slope_of_norm(ops, y, x, (0, 2, 3), weight[:, None, None], bias[:, None, None])

    return norm


def _embedding_gradient(original, ops):
    def embedding(self, tokens, name):
        y = original(self, tokens, name)
        return ops.with_gradient_of(y, y / float(y.shape[2]) ** 0.5)

    return embedding


def _doubled_gradient(original, ops):
    def pool(self, x, side):
        y = original(self, x, side)
        return ops.with_gradient_of(y, 2.0 * y)

    return pool


def _dropout(change):
    """Return a change of every dropout by (original, ops, x, rate, layer)."""

    def make(module, ops):
        protocol = importlib.import_module("crosstrain.models.layers.protocol")
        for kind in (protocol.NetworkLayers, protocol.SequenceNetworkLayers):
            _replace(kind, "dropout", lambda original: lambda self, x, rate, layer: change(original, ops, self, x, rate, layer))

    return make


def _higher(original, ops, self, x, rate, layer):
    return original(self, x, 1.2 * rate, layer)


def _unscaled_dropout_gradient(original, ops, self, x, rate, layer):
    y = original(self, x, rate, layer)
    return ops.with_gradient_of(y, (1.0 - rate) * y)


_PRODUCTS = ("conv", "conv_pool", "dense", "linear", "_product")
IN_CONSTANTS = {
    "norm_epsilon_1e-3": lambda module: _set(module, 1e-3),
    "norm_epsilon_10_percent": _constant(("EPSILON", "LAYER_NORM_EPSILON"), 1.1),
    "running_momentum_complement": lambda module: setattr(module, "MOMENTUM", 0.9),
}


def _set(module, epsilon):
    module.EPSILON = module.LAYER_NORM_EPSILON = epsilon


IN_LAYERS = {
    "norm_epsilon_in_last_norm": _both(
        _images_and_sequences("batch_norm", _epsilon_in_last), _images_and_sequences("layer_norm", _epsilon_in_last)
    ),
    "padding_shifted": _images_and_sequences("conv", _padding_shifted),
    "relu_capped": _both(_images_and_sequences("relu", _capped), _images_and_sequences("conv_pool", _capped_pool)),
    "one_layer_in_bf16": _both(*(_images_and_sequences(name, _one_in_bf16) for name in ("conv", "_convolve", "dense", "_product"))),
    "features_channels_last": _both(_images_and_sequences("flatten", _channels_last), lambda module, ops: _dense_of_images(module, ops)),
    "max_pool_averages": _images_and_sequences("max_pool", _averaging_pool),
    "relu_leaks": _both(
        _images_and_sequences("relu", _leaking), _images_and_sequences("conv_pool", _conv_pool(lambda x, ops: ops.leaky(x, 0.01)))
    ),
    "attention_not_scaled": _images_and_sequences("attention", _unscaled_attention),
    "causal_mask_one_late": _images_and_sequences("attention", _late_mask),
    "bias_left_out": _both(
        _images_and_sequences("dense", _biasless(ONE_DENSE, False)), _images_and_sequences("dense_relu", _biasless(ONE_DENSE, False))
    ),
    "dropout_rate_higher": _dropout(_higher),
    "weight_gradient_1_percent": _both(*(_images_and_sequences(name, _weight_gradient) for name in ("conv", "_convolve"))),
    "bias_gradient_is_mean": _both(*(_images_and_sequences(name, _mean_bias_gradient) for name in ("dense", "dense_relu"))),
    "bias_gradient_missing": _images_and_sequences("dense", _biasless(OTHER_DENSE, True)),
    "relu_gradient_leaks": _both(
        _images_and_sequences("relu", _leaking_gradient),
        _images_and_sequences("conv_pool", _conv_pool(lambda x, ops: _leaking_gradient(None, ops)(None, x))),
    ),
    "norm_statistics_without_gradient": _both(
        _images_and_sequences("batch_norm", _constant_statistics), _images_and_sequences("layer_norm", _constant_statistics)
    ),
    "product_gradient_in_bf16": _both(
        *(_images_and_sequences(name, _gradient_in_bf16) for name in ("conv", "_convolve", "dense", "_product"))
    ),
    "max_pool_gradient_averaged": _images_and_sequences("max_pool", _averaged_pool_gradient),
    "keys_without_gradient": _images_and_sequences("attention", _without_key_gradient),
    "embedding_gradient_not_scaled": _images_and_sequences("embedding", _embedding_gradient),
    "average_pool_gradient_doubled": _images_and_sequences("average_pool", _doubled_gradient),
    "dropout_gradient_not_scaled": _dropout(_unscaled_dropout_gradient),
    "running_variance_biased": lambda module, ops: _replace(module.Layers, "batch_norm", lambda original: _biased(original, ops)),
}


def _dense_of_images(module, ops):
    _replace(module.Layers, "dense", lambda original: _channels_last(original, ops))


def _biased(original, ops):
    def norm(self, x, name):
        y = original(self, x, name)
        key = f"{name}.running_var"
        if self._context.training and key in self._context.updated:
            count = 1
            for size in (x.shape[0], *(x.shape[1:3] if ops.framework == "tf" else x.shape[2:])):
                count = count * (ops.module.shape(x)[0] if size is None else size)
            before, after = self._context.buffers[key], self._context.updated[key]
            count = ops.module.cast(count, x.dtype) if ops.framework == "tf" else float(count)
            new = (after - (1.0 - module_momentum(self)) * before) * ((count - 1.0) / count)
            self._context.updated[key] = (1.0 - module_momentum(self)) * before + new
        return y

    return norm


def module_momentum(layers):
    return importlib.import_module(type(layers).__module__).MOMENTUM


# Imported modules: by the shape of a weight where one layer is meant, as functions of torch do not know their layer.

CONV2_OF_BLOCK_1, HEAD = (32, 32, 3, 3), (10, 64)


def _plant_in_translation(fault, forward):
    """Change how nodes of translated graphs are carried out."""
    change, ops = IN_TRANSLATION.get(fault), Ops("tf")
    if change is None:
        return

    def make(original):
        return lambda self, node, values: change(partial(original, self), node, values, ops)

    _replace(forward.Execution, "_carried_out", make)


def _plant_in_torch(fault):
    """Change the functions of torch that modules call."""
    functional = importlib.import_module("torch.nn.functional")
    if fault in IN_FUNCTIONAL:
        name, make = IN_FUNCTIONAL[fault]
        _replace(functional, name, lambda original: make(original, Ops("torch")))


def _mapped(result, function):
    """Apply a function to an image in either layout, or to the first of several results."""
    if isinstance(result, tuple):
        return (_mapped(result[0], function), *result[1:])
    if type(result).__name__ == "ChannelsLast":
        return type(result)(function(result.value))
    return function(result)


def _with_arguments(operation, **changes):
    def change(carry_out, node, values, ops):
        if operation not in node.operation:
            return carry_out(node, values)
        changed = {name: value(node.arguments[name]) for name, value in changes.items()}
        return carry_out(replace(node, arguments={**node.arguments, **changed}), values)

    return change


def _with_result(operation, function):
    def change(carry_out, node, values, ops):
        result = carry_out(node, values)
        return _mapped(result, partial(function, ops)) if operation in node.operation else result

    return change


def _weights_changed(operations, shape, function):
    """Change what the nodes read whose weight has this shape."""

    def change(carry_out, node, values, ops):
        weight = node.arguments.get("weight")
        if not any(part in node.operation for part in operations) or not isinstance(weight, dict):
            return carry_out(node, values)
        held = values[weight["node"]]
        value = getattr(held, "value", held)
        stored = tuple(value.shape)
        if stored not in (shape, tuple(shape[axis] for axis in (2, 3, 1, 0)[: len(shape)]) if len(shape) == 4 else shape):
            return carry_out(node, values)
        return function(carry_out, node, dict(values), ops)

    return change


def _set_value(values, reference, function):
    if isinstance(reference, dict) and "node" in reference:
        held = values[reference["node"]]
        if type(held).__name__ == "_Kernel":
            values[reference["node"]] = type(held)(function(held.value))
        else:
            values[reference["node"]] = _mapped(held, function)


def _low_node(carry_out, node, values, ops):
    for name in ("input", "weight"):
        _set_value(values, node.arguments[name], ops.low)
    return _mapped(carry_out(node, values), ops.low)


def _low_gradient_node(carry_out, node, values, ops):
    exact = carry_out(node, values)
    low = _low_node(carry_out, node, dict(values), ops)
    if type(exact).__name__ == "ChannelsLast":
        return type(exact)(ops.with_gradient_of(exact.value, low.value))
    return ops.with_gradient_of(exact, low)


def _weight_gradient_node(carry_out, node, values, ops):
    _set_value(values, node.arguments["weight"], lambda value: ops.with_gradient_of(value, 1.01 * value))
    return carry_out(node, values)


def _bias_node(function):
    def change(carry_out, node, values, ops):
        _set_value(values, node.arguments["bias"], lambda value: function(ops, value))
        return carry_out(node, values)

    return change


def _shifted_node(carry_out, node, values, ops):
    if "conv2d" not in node.operation or list(node.arguments["stride"]) != [2, 2] or not any(node.arguments["padding"]):
        return carry_out(node, values)
    values = dict(values)
    held = values[node.arguments["input"]["node"]]
    if type(held).__name__ == "ChannelsLast":
        values[node.arguments["input"]["node"]] = type(held)(_shifted(ops, held.value, 1, True))
    else:
        moved = ops.module.transpose(_shifted(ops, ops.module.transpose(held, [0, 2, 3, 1]), 1, True), [0, 3, 1, 2])
        values[node.arguments["input"]["node"]] = moved
    return carry_out(node, values)


def _last_norm_node(carry_out, node, values, ops):
    if "batch_norm" in node.operation and node.layer == "blocks.2.shortcut.1":
        node = replace(node, arguments={**node.arguments, "eps": 1e-3})
    return carry_out(node, values)


def _constant_statistics_node(carry_out, node, values, ops):
    result = carry_out(node, values)
    if "batch_norm" not in node.operation:
        return result
    x = values[node.arguments["input"]["node"]]
    weight, bias = (values[node.arguments[name]["node"]] for name in ("weight", "bias"))
    return (type(x)(_slope_of_norm(ops, result[0].value, x.value, (0, 1, 2), weight, bias)), *result[1:])


def _biased_node(carry_out, node, values, ops):
    result = carry_out(node, values)
    if "batch_norm_legit_functional" not in node.operation:
        return result
    y, mean, variance, new_mean, new_variance = result
    before = values[node.arguments["running_var"]["node"]]
    count = ops.module.cast(ops.module.size(y.value) // y.value.shape[3], before.dtype)
    momentum = node.arguments["momentum"]
    biased = (new_variance - (1 - momentum) * before) * (count - 1) / count
    return y, mean, variance, new_mean, (1 - momentum) * before + biased


def _relu_node(function):
    def change(carry_out, node, values, ops):
        if "relu" not in node.operation:
            return carry_out(node, values)
        argument = next(iter(node.arguments.values()))
        return _mapped(values[argument["node"]], partial(function, ops))

    return change


CONVOLUTION, DENSE = ("conv2d",), ("linear", "addmm")
IN_TRANSLATION = {
    "norm_epsilon_1e-3": _with_arguments("batch_norm", eps=lambda eps: 1e-3),
    "norm_epsilon_10_percent": _with_arguments("batch_norm", eps=lambda eps: 1.1 * eps),
    "norm_epsilon_in_last_norm": _last_norm_node,
    "running_momentum_complement": _with_arguments("batch_norm", momentum=lambda momentum: 1 - momentum),
    "running_variance_biased": _biased_node,
    "norm_statistics_without_gradient": _constant_statistics_node,
    "padding_shifted": _shifted_node,
    "relu_capped": _with_result("relu", lambda ops, y: ops.minimum(y, 1.0)),
    "relu_leaks": _relu_node(lambda ops, x: ops.leaky(x, 0.01)),
    "relu_gradient_leaks": _relu_node(lambda ops, x: _leaking_gradient(None, ops)(None, x)),
    "one_layer_in_bf16": _weights_changed(CONVOLUTION, CONV2_OF_BLOCK_1, _low_node),
    "product_gradient_in_bf16": _weights_changed(CONVOLUTION, CONV2_OF_BLOCK_1, _low_gradient_node),
    "weight_gradient_1_percent": _weights_changed(CONVOLUTION, CONV2_OF_BLOCK_1, _weight_gradient_node),
    "bias_left_out": _weights_changed(DENSE, HEAD, _bias_node(lambda ops, bias: 0.0 * bias)),
    "bias_gradient_missing": _weights_changed(DENSE, HEAD, _bias_node(lambda ops, bias: ops.with_gradient_of(bias, 0.0 * bias))),
    "bias_gradient_is_mean": _weights_changed(DENSE, HEAD, _bias_node(lambda ops, bias: ops.with_gradient_of(bias, bias / 16.0))),
}


def _by_weight(shape, function):
    """Return a change of a torch function whose weight has this shape."""

    def make(original, ops):
        def changed(x, weight, bias=None, *arguments, **options):
            if tuple(weight.shape) != shape:
                return original(x, weight, bias, *arguments, **options)
            return function(ops, lambda x, weight, bias: original(x, weight, bias, *arguments, **options), x, weight, bias)

        return changed

    return make


def _low_function(ops, original, x, weight, bias):
    return ops.low(original(ops.low(x), ops.low(weight), bias))


def _shifted_convolution(original, ops):
    def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        if stride in (2, (2, 2)) and padding in (1, (1, 1)):
            x = _shifted(ops, x, 1, False)
        return original(x, weight, bias, stride, padding, dilation, groups)

    return conv2d


def _norm(change):
    """Return a change of torch's batch norm: of its result, or of momentum and ε."""

    def make(original, ops):
        def batch_norm(x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
            return change(original, ops, x, mean, variance, weight, bias, training, momentum, eps)

        return batch_norm

    return make


def _constant_statistics_function(original, ops, x, mean, variance, weight, bias, *rest):
    y = original(x, mean, variance, weight, bias, *rest)
    return _slope_of_norm(ops, y, x, (0, 2, 3), weight[:, None, None], bias[:, None, None])


def _biased_function(original, ops, x, mean, variance, weight, bias, training, momentum, eps):
    before = None if variance is None else variance.clone()
    y = original(x, mean, variance, weight, bias, training, momentum, eps)
    if training and before is not None:
        count = x.numel() / x.shape[1]
        with ops.module.no_grad():
            variance.copy_((1 - momentum) * before + (variance - (1 - momentum) * before) * (count - 1) / count)
    return y


IN_FUNCTIONAL = {
    "norm_epsilon_1e-3": ("batch_norm", _norm(lambda original, ops, *rest: original(*rest[:-1], 1e-3))),
    "norm_epsilon_10_percent": ("batch_norm", _norm(lambda original, ops, *rest: original(*rest[:-1], 1.1 * rest[-1]))),
    "running_momentum_complement": ("batch_norm", _norm(lambda original, ops, *rest: original(*rest[:-2], 1 - rest[-2], rest[-1]))),
    "running_variance_biased": ("batch_norm", _norm(_biased_function)),
    "norm_statistics_without_gradient": ("batch_norm", _norm(_constant_statistics_function)),
    "padding_shifted": ("conv2d", _shifted_convolution),
    "relu_capped": ("relu", lambda original, ops: lambda x, inplace=False: ops.minimum(original(x), 1.0)),
    "relu_leaks": ("relu", lambda original, ops: lambda x, inplace=False: ops.leaky(x, 0.01)),
    "relu_gradient_leaks": ("relu", lambda original, ops: lambda x, inplace=False: _leaking_gradient(None, ops)(None, x)),
    "one_layer_in_bf16": ("conv2d", _by_weight(CONV2_OF_BLOCK_1, _low_function)),
    "product_gradient_in_bf16": (
        "conv2d",
        _by_weight(
            CONV2_OF_BLOCK_1,
            lambda ops, original, *arguments: ops.with_gradient_of(original(*arguments), _low_function(ops, original, *arguments)),
        ),
    ),
    "weight_gradient_1_percent": (
        "conv2d",
        _by_weight(CONV2_OF_BLOCK_1, lambda ops, original, x, weight, bias: original(x, ops.with_gradient_of(weight, 1.01 * weight), bias)),
    ),
    "bias_left_out": ("linear", _by_weight(HEAD, lambda ops, original, x, weight, bias: original(x, weight, 0.0 * bias))),
    "bias_gradient_missing": (
        "linear",
        _by_weight(HEAD, lambda ops, original, x, weight, bias: original(x, weight, ops.with_gradient_of(bias, 0.0 * bias))),
    ),
    "bias_gradient_is_mean": (
        "linear",
        _by_weight(HEAD, lambda ops, original, x, weight, bias: original(x, weight, ops.with_gradient_of(bias, bias / 16.0))),
    ),
}


def _moved_rates(original):
    def learning_rates(job, first_step, count, steps_per_epoch, total_steps, positions=None, width=None):
        rates = original(job, first_step, count, steps_per_epoch, total_steps, positions, width)
        before = original(
            job, max(first_step - 1, 0), 1, steps_per_epoch, total_steps, None if positions is None else positions[:1] - 1, width
        )
        first = rates[:1] if first_step == 0 else before
        return importlib.import_module("numpy").concatenate([first, rates[:-1]])

    return learning_rates


def _job_with(**changed):
    """Return changes of both frameworks' update rules to those of another job."""

    def changes(module):
        name = "make_rule" if hasattr(module, "make_rule") else "build_optimizer"

        def make(original):
            def build(job, *arguments, **options):
                values = {key: value(job) if callable(value) else value for key, value in changed.items()}
                if "weight_decay_except" in changed:
                    arguments = arguments[:1] if name == "make_rule" else ()
                return original(job.model_copy(update=values), *arguments, **options)

            return build

        _replace(module, name, make)

    return _on_optimizers(changes)


def _on_optimizers(change):
    return {"crosstrain.backends.torch.optimizers": change, "crosstrain.backends.tf.optimizers": change}


def _decoupled(module):
    if hasattr(module, "make_rule"):

        def make(original):
            def step(self, gradients, lr):
                decay, self._decay = self._decay, 0.0
                for parameter in self._parameters:
                    parameter.mul_(1.0 - lr * decay)
                original(self, gradients, lr)
                self._decay = decay

            return step

        _replace(module.Sgd, "step", make)
        return
    tf = importlib.import_module("tensorflow")
    dataclasses = importlib.import_module("dataclasses")

    def make_apply(original):
        def apply(self, variable, slots, gradient, scalars):
            shrink = tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=scalars[0] * self.weight_decay * variable.read_value())
            with tf.control_dependencies([shrink]):
                return original(dataclasses.replace(self, weight_decay=0.0), variable, slots, gradient, scalars)

        return apply

    _replace(module.Sgd, "apply", make_apply)


def _epsilon_in_root(module):
    if hasattr(module, "make_rule"):

        def make(original):
            def step(self, gradients, lr):
                epsilon, self._epsilon, before = self._epsilon, 0.0, [parameter.clone() for parameter in self._parameters]
                original(self, [gradient.clone() for gradient in gradients], lr)
                self._epsilon = epsilon
                t = self.updates
                for parameter, old, first, second in zip(
                    self._parameters, before, self.slots["first_moment"], self.slots["second_moment"], strict=True
                ):
                    root = (second / (1 - self._beta2**t) + epsilon).sqrt()
                    parameter.copy_(old - lr / (1 - self._beta1**t) * first / root)

            return step

        _replace(module.Adam, "step", make)
        return
    tf = importlib.import_module("tensorflow")

    def make_apply(original):
        def apply(self, variable, slots, gradient, scalars):
            step_size, epsilon, _ = scalars  # ε·r, and lr·r/(1−β1ᵗ), of the root r of 1 − β2ᵗ
            gradient = gradient + self.weight_decay * variable.read_value()
            first = self.beta1 * slots["first_moment"].read_value() + (1 - self.beta1) * gradient
            beta2 = float(importlib.import_module("numpy").float32(self.beta2))  # as the op's scalars have it
            second = beta2 * slots["second_moment"].read_value() + (1 - beta2) * gradient * gradient
            root_squared = tf.square(epsilon / self.epsilon)
            with tf.control_dependencies([first, second]):
                step = step_size * first / tf.sqrt(second + self.epsilon * root_squared)
                changes = [
                    tf.raw_ops.AssignVariableOp(resource=slots["first_moment"].handle, value=first),
                    tf.raw_ops.AssignVariableOp(resource=slots["second_moment"].handle, value=second),
                    tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=step),
                ]
            return tf.group(*changes)

        return apply

    _replace(module.Adam, "apply", make_apply)


def _uncorrected(module):
    if hasattr(module, "make_rule"):

        def make(original):
            def step(self, gradients, lr):
                updates, self.updates = self.updates, 10**6
                original(self, gradients, lr)
                self.updates = updates + 1

            return step

        _replace(module.Adam, "step", make)
    else:
        _replace(module.Adam, "values", lambda original: lambda self, module, rate, update: original(self, module, rate, update * 0 + 1e6))


def _clipped_by_tensor(module):
    _replace(module, "clipped", lambda original: lambda gradients, limit: [original([gradient], limit)[0] for gradient in gradients])


def _other_statistics(change_line, change_table):
    def change(module):
        def make(original):
            def line(mean, std):
                line_values = original(mean, std)
                return None if line_values is None else change_line(*line_values)

            return line

        _replace(module, "normal_line", make)
        _replace(module, "normal_table", lambda original: lambda mean, std: change_table(original, mean, std))

    return {"crosstrain.data.preprocessing": change}


def _other_pixels(original):
    return lambda self, values: original(self, values) * 1.02 - 0.05 if self._line is None else original(self, values)


def _smaller_pixels(original):
    return lambda self, values: original(self, values * (255 / 256) if self._line is None else values)


def _reversed_on_tf(module):
    def make(original):
        def normalised(pixels, info, *, channels_last):
            axis = 3 if channels_last else 1
            return original(importlib.import_module("tensorflow").reverse(pixels, [axis]), info, channels_last=channels_last)

        return normalised

    _replace(module, "normalised", make)


def _reversed_on_torch(module):
    _replace(module.Normaliser, "convert", lambda original: lambda self, images, out: original(self, images.flip(1), out))


def _loss(change_on_torch, change_on_tf, change_of_translation):
    def on_torch(module):
        functional = importlib.import_module("torch.nn.functional")
        _replace(functional, "cross_entropy", change_on_torch)

    def on_tf(module):
        _replace(module.TfModel, "cross_entropy", change_on_tf)

    def translation(module):
        _replace(module, "translation_loss", change_of_translation)

    return {
        "crosstrain.backends.torch.model": on_torch,
        "crosstrain.backends.tf.model": on_tf,
        "crosstrain.models.transformer.torch": translation,
        "crosstrain.models.transformer.tf": translation,
    }


SMOOTHING = 0.05


def _smoothed_on_tf(original):
    def cross_entropy(self, logits, y):
        tf = importlib.import_module("tensorflow")
        losses, slopes = original(self, logits, y)
        classes = logits.shape[1]
        logs = tf.nn.log_softmax(logits)
        losses = (1 - SMOOTHING) * losses - SMOOTHING * tf.reduce_mean(logs, axis=1)
        return losses, slopes + SMOOTHING * (tf.one_hot(y, classes) - 1.0 / classes)

    return cross_entropy


def _smoothed_translation(original):
    def loss(logits, targets, context):
        dataclasses = importlib.import_module("dataclasses")
        settings = dataclasses.replace(context.settings, smoothing=context.settings.smoothing + SMOOTHING)
        return original(logits, targets, dataclasses.replace(context, settings=settings))

    return loss


def _all_counted(module):
    if module.__name__.endswith(".tf"):
        tf = importlib.import_module("tensorflow")
        module._inside = lambda targets: tf.ones_like(targets["target"], tf.bool)
    else:
        torch = importlib.import_module("torch")
        module._inside = lambda targets: torch.ones_like(targets["target"], dtype=torch.bool)


def _next_seed(module):
    if hasattr(module, "initial_values"):
        _replace(module, "initial_values", lambda original: lambda parameters, seed: original(parameters, seed + 1))
    else:
        _replace(module.ImportedSpec, "initial", lambda original: lambda self, seed: original(self, seed + 1))


def _function(name, make):
    return lambda module: _replace(module, name, make)


ELSEWHERE = {
    "lr_1e-5": {
        "crosstrain.core.update_rules": _function(
            "learning_rates", lambda original: lambda *arguments, **options: original(*arguments, **options) * (1 + 1e-5)
        )
    },
    "lr_one_late": {"crosstrain.core.update_rules": _function("learning_rates", _moved_rates)},
    "warmup_one_late": {"crosstrain.core.update_rules": _function("learning_rates", _moved_rates)},
    "momentum_complement": _job_with(momentum=lambda job: 1.0 - job.momentum),
    "nesterov": _job_with(nesterov=True),
    "decay_decoupled": _on_optimizers(_decoupled),
    "decay_coupled": _job_with(optimizer="adam"),
    "epsilon_inside_root": _on_optimizers(_epsilon_in_root),
    "adam_epsilon_1e-7": _job_with(epsilon=lambda job: 10 * job.epsilon),
    "no_bias_correction": _on_optimizers(_uncorrected),
    "beta2_0.99": _job_with(beta2=0.99),
    "clipped_by_tensor": _on_optimizers(_clipped_by_tensor),
    "exempt_decay": {
        **_job_with(weight_decay_except=None),
        "crosstrain.backends.tf.sync.steps": _function("without_decay", lambda original: lambda job: job),
    },
    "moving_average_without_ramp": {
        "crosstrain.core.update_rules": _function(
            "averaging_rates", lambda original: lambda decay, updates, *rest: 0.0 * original(decay, updates, *rest) + (1.0 - decay)
        )
    },
    "mean_and_std_of_others": {
        **_other_statistics(
            lambda factor, summand: (1.02 * factor, summand - 0.05), lambda original, mean, std: original(mean, std) * 1.02 - 0.05
        ),
        "crosstrain.backends.torch.data": lambda module: _replace(module.Normaliser, "_normal", _other_pixels),
    },
    "pixels_by_256": {
        **_other_statistics(
            lambda factor, summand: (factor * 255 / 256, summand),
            lambda original, mean, std: original([value * 256 / 255 for value in mean], [value * 256 / 255 for value in std]),
        ),
        "crosstrain.backends.torch.data": lambda module: _replace(module.Normaliser, "_normal", _smaller_pixels),
    },
    "channels_reversed": {"crosstrain.backends.tf.data": _reversed_on_tf, "crosstrain.backends.torch.data": _reversed_on_torch},
    "other_order": {"crosstrain.data.sampler": _function("permutation", lambda original: lambda seed, *rest: original(seed + 1, *rest))},
    "labels_smoothed": _loss(
        lambda original: lambda *arguments, **options: original(*arguments, **{**options, "label_smoothing": SMOOTHING}),
        _smoothed_on_tf,
        _smoothed_translation,
    ),
    "loss_scaled": _loss(
        lambda original: lambda *arguments, **options: 1.001 * original(*arguments, **options),
        lambda original: lambda self, logits, y: tuple(1.001 * part for part in original(self, logits, y)),
        lambda original: lambda *arguments: 1.001 * original(*arguments),
    ),
    "padding_counted": {"crosstrain.models.transformer.tf": _all_counted, "crosstrain.models.transformer.torch": _all_counted},
    "other_initial_weights": {"crosstrain.models.base": _next_seed, "crosstrain.models.imported.description": _next_seed},
}


def _drawing_on_tf(module, fault):
    ops = Ops("tf")

    def make(original):
        def dropout(self, x, rate):
            if fault == "dropout_rate_higher":
                return original(self, x, 1.2 * rate)
            y = original(self, x, rate)
            return ops.with_gradient_of(y, (1.0 - rate) * y)

        return dropout

    _replace(module.Draws, "dropout", make)


def _drawing_on_torch(module, fault):
    ops = Ops("torch")

    def make(original):
        def dropped(self, x, rate, *arguments, **options):
            if fault == "dropout_rate_higher":
                return original(self, x, 1.2 * rate, *arguments, **options)
            y = original(self, x, rate, *arguments, **options)
            return ops.with_gradient_of(y, (1.0 - rate) * y)

        return dropped

    _replace(module.Draws, "dropped", make)


DRAWING = {
    "crosstrain.models.imported.tf.forward": _drawing_on_tf,
    "crosstrain.models.imported.torch.forward": _drawing_on_torch,
}
