"""Record Keras models, their optimisers, and tensors of TensorFlow.

Values are turned to torch's layout as they are recorded: channels first, kernels with outputs first, and the features of a flattened
image in the order of its channels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import torch_modules
from .keras_weights import GATES, parts_of, recurrent_kind, variable_of
from .recording import Array, Recording, matched

_FLAT = "Flatten"
_OF_CELLS = {"activation": "activation", "recurrent activation": "recurrent_activation"}
_WITH_CHANNELS = ("Conv", "Depthwise", "Separable", "MaxPooling", "AveragePooling", "ZeroPadding", "UpSampling")


def knows(value: Any) -> bool:
    """Return whether a value is of Keras or TensorFlow."""
    keras, tensorflow = sys.modules.get("keras"), sys.modules.get("tensorflow")
    if keras is not None and isinstance(value, (keras.layers.Layer, keras.Variable)):
        return True
    return tensorflow is not None and isinstance(value, (tensorflow.Tensor, tensorflow.Variable))


def array(value: Any) -> Array:
    """Return a tensor's values; bf16 and fp16 as float32. Raises TypeError within a graph."""
    if not hasattr(value, "numpy"):
        raise TypeError("recorder: a tensor within tf.function has no values; use recorder.tensor there, or recorder.watch.")
    return _plain(np.asarray(value.numpy()))


def _plain(values: Any) -> Array:
    values = np.asarray(values)
    return values.astype(np.float32) if values.dtype.name in ("bfloat16", "float16") else np.array(values)


def _deliver(function: Callable[..., None], tensors: Sequence[Any]) -> None:
    """Call a function with the tensors' values, now or when a graph is carried out."""
    if any(torch_modules.knows(item) for item in tensors):
        function(*map(torch_modules.array, tensors))
        return
    tensorflow = sys.modules["tensorflow"]
    if tensorflow.executing_eagerly():
        function(*(_plain(item.numpy()) for item in tensors))
        return

    def carried_out(*values: Any) -> Any:
        function(*map(_plain, values))
        return np.int32(0)

    tensorflow.numpy_function(carried_out, list(tensors), tensorflow.int32)


def tensor(recording: Recording, name: str, value: Any, layer: str = "", turned: Callable[[Array], Array] = np.array) -> Any:
    """Record a tensor and its gradient; return it."""
    if torch_modules.knows(value):
        recording.add("forward", name, turned(torch_modules.array(value)), layer)
        if value.requires_grad and recording.is_wanted:
            value.register_hook(lambda slope: recording.add("slope", name, turned(torch_modules.array(slope)), layer))
        return value
    tensorflow = sys.modules["tensorflow"]

    @tensorflow.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: Any) -> Any:
        _deliver(lambda values: recording.add("forward", name, turned(values), layer), [x])

        def gradient(slope: Any) -> Any:
            _deliver(lambda values: recording.add("slope", name, turned(values), layer), [slope])
            return slope

        return tensorflow.identity(x), gradient

    return identity(value)


def state(recording: Recording, part: str, model: Any) -> None:
    """Record a model's variables."""
    for name, layer, value in Watched(model).variables():
        recording.add(part, name, value, layer)


def watch(recording: Recording, model: Any, optimizer: Any) -> None:
    """Record a model in training, and its updates."""
    Watched(model).watch(recording, optimizer or getattr(model, "optimizer", None))


def adopt(model: Any, weights: list[tuple[str, Array]]) -> None:
    """Set a model's variables in their order. Raises ValueError."""
    Watched(model).adopt(weights)


class Watched:
    """A model, and how its tensors are turned."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._images: dict[str, tuple[int, ...]] = {}  # rows, columns and channels of flattened features, by layer
        self._pending: tuple[int, ...] | None = None
        self._is_permuted = False  # whether images have their axes in an order of the model's own
        self._has_channels = False  # whether sequences are a convolution's, with channels
        self._names: dict[int, str] = {}
        for layer in self._layers():
            try:
                shape = tuple(layer.input.shape)
            except (AttributeError, ValueError):  # of a model that is a class, known when it is called
                continue
            self._see(layer, shape)

    def _layers(self) -> Iterator[Any]:
        """Yield the layers without layers within, in their order."""
        layers = list(self._model._flatten_layers(include_self=False, recursive=True))
        cells = {id(part) for layer in layers if recurrent_kind(layer) for part in layer._flatten_layers(include_self=False)}
        for layer in layers:
            if id(layer) not in cells and (recurrent_kind(layer) or not layer._layers):
                yield layer

    def _name(self, layer: Any) -> str:
        """Return a layer's path, which some get only when they are built."""
        return self._names.setdefault(id(layer), str(layer.path or layer.name))

    def _see(self, layer: Any, shape: tuple[int, ...]) -> None:
        """Note what a layer does to a flattened image, from its input's shape."""
        kind = type(layer).__name__
        if kind.startswith(_WITH_CHANNELS) or kind in ("Permute", "Embedding", "Reshape") or recurrent_kind(layer):
            self._has_channels = kind.startswith(_WITH_CHANNELS)
            self._is_permuted = kind == "Permute"
        if kind == _FLAT and not self._is_permuted and len(shape) > (2 if self._has_channels else 3) and self._channels_last(layer):
            self._pending = tuple(shape[1:])
        if self._pending is not None and (type(layer).__name__ == _FLAT or int(np.prod(shape[1:])) == int(np.prod(self._pending))):
            self._images[self._name(layer)] = self._pending
            if type(layer).__name__ == "Dense":
                self._pending = None

    @staticmethod
    def _channels_last(layer: Any) -> bool:
        keras = sys.modules["keras"]
        return str(getattr(layer, "data_format", None) or keras.config.image_data_format()) == "channels_last"

    def _turned(self, layer: Any, values: Array) -> Array:
        """Return a layer's result in torch's layout."""
        if (values.ndim in (4, 5) or (values.ndim == 3 and type(layer).__name__.startswith(_WITH_CHANNELS))) and self._channels_last(layer):
            return np.moveaxis(values, -1, 1)
        image = self._images.get(self._name(layer))
        if image is not None and values.ndim == 2 and values.shape[1] == int(np.prod(image)) and type(layer).__name__ != "Dense":
            return np.moveaxis(values.reshape(-1, *image), -1, 1).reshape(len(values), -1)
        return values

    def _parts(self, layer: Any, variable: Any, values: Array) -> list[tuple[str, Array]]:
        """Return names and arrays of a variable in torch's layout."""
        name = self._name(layer)
        if recurrent_kind(layer) and recurrent_kind(layer) not in GATES:
            return [(variable.path, values)]  # of a cell within a cell
        return [(f"{name}.{role}", part) for role, part in parts_of(layer, variable.name, values, self._images.get(name))]

    def _entries(self) -> Iterator[tuple[Any, Any]]:
        for layer in self._layers():
            for variable in layer.variables:
                if str(variable.dtype).startswith(("float", "bfloat")):
                    yield layer, variable

    def variables(self, *, trainable: bool | None = None) -> Iterator[tuple[str, str, Array]]:
        """Yield name, layer and value of the variables, in torch's layout."""
        for layer, variable in self._entries():
            if trainable is None or bool(variable.trainable) is trainable:
                values = _plain(sys.modules["keras"].ops.convert_to_numpy(variable))
                for name, part in self._parts(layer, variable, values):
                    yield name, self._name(layer), part

    def adopt(self, weights: list[tuple[str, Array]]) -> None:
        """Set the variables in their order. Raises ValueError."""
        entries = [(layer, variable, self._parts(layer, variable, np.zeros(variable.shape))) for layer, variable in self._entries()]
        chosen = iter(matched([(name, part.shape) for *_, parts in entries for name, part in parts], weights))
        for layer, variable, parts in entries:
            arrays = [next(chosen)[1] for _ in parts]
            image = self._images.get(self._name(layer))
            variable.assign(variable_of(layer, variable.name, tuple(variable.shape), image, arrays))

    def watch(self, recording: Recording, optimizer: Any) -> None:
        """Record layers and updates from now on."""
        keras = sys.modules["keras"]
        if keras.backend.backend() not in ("tensorflow", "torch"):
            raise TypeError(f"recorder: a Keras model on {keras.backend.backend()} is not recorded; its backend is tensorflow or torch.")
        self._model.jit_compile = False  # a compiled step shows no values
        for layer in self._layers():
            self._hook(recording, layer)
        for name, layer, value in self.variables(trainable=False):
            recording.add("before", name, value, layer)
        if getattr(self._model, "compute_loss", None) is not None:
            self._hook_loss(recording)
        if optimizer is not None:
            self._hook_optimizer(recording, optimizer)

    def _hook(self, recording: Recording, layer: Any) -> None:
        original, name = layer.call, self._name(layer)

        def add(value: Any, place: str) -> Any:
            if type(value).__name__ == "KerasTensor":
                return value
            recording.layer(f"{place} (precision)", sys.modules["keras"].backend.standardize_dtype(value.dtype), {}, "keras")
            return tensor(recording, place, value, name, lambda values: self._turned(layer, values))

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if layer._get_call_context().training is False or not arguments or not hasattr(arguments[0], "shape"):
                return original(*arguments, **options)
            shape = tuple(arguments[0].shape)
            self._see(layer, shape)
            recording.layer(name, *layer_settings(layer, shape), "keras")
            if recurrent_kind(layer):
                output = original(*arguments, **options)
                self._add_last_step(recording, layer, output)
                return output
            activation = getattr(layer, "activation", None)
            if activation is None or activation.__name__ == "linear" or type(layer).__name__ == "Activation":
                output = original(*arguments, **options)
                return output if isinstance(output, (tuple, list, dict)) else add(output, name)
            within = f"{name}/{activation.__name__}"
            recording.layer(within, activation.__name__, {}, "keras")
            layer.activation = lambda x: add(activation(add(x, name)), within)
            try:
                return original(*arguments, **options)
            finally:
                layer.activation = activation

        layer.call = call

    def _add_last_step(self, recording: Recording, layer: Any, output: Any) -> None:
        """Record a recurrent layer's result after its last step."""
        result = output[0] if isinstance(output, (tuple, list)) else output
        if type(result).__name__ != "KerasTensor":
            name = self._name(layer)
            _deliver(lambda values: recording.add("forward", name, values, name), [result[:, -1] if layer.return_sequences else result])

    def _hook_loss(self, recording: Recording) -> None:
        original = self._model.compute_loss

        def compute_loss(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True, **options: Any
        ) -> Any:
            value = original(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training, **options)
            if training:
                described = loss_settings(self._model)
                recording.layer("loss", described.pop("name"), described, "keras")
                columns = {
                    f"{part}{number or ''}": item for part, column in (("x", x), ("y", y)) for number, item in enumerate(_list(column))
                }
                for name, column in columns.items():
                    _deliver(functools.partial(recording.add, "batch", name), [column])
                _deliver(functools.partial(recording.add, "loss", "loss"), [value])
            return value

        self._model.compute_loss = compute_loss

    def _hook_optimizer(self, recording: Recording, optimizer: Any) -> None:
        original = optimizer.apply

        @functools.wraps(original)
        def apply(grads: Any, trainable_variables: Any = None, **options: Any) -> Any:
            recording.layer("optimizer", type(optimizer).__name__, optimizer_settings(optimizer), "keras")
            variables = list(trainable_variables) if trainable_variables is not None else list(optimizer._trainable_variables)
            pairs = [(variable, item) for variable, item in zip(variables, _entering(optimizer, grads), strict=True) if item is not None]
            self._add_values(recording, "gradient", [variable for variable, _ in pairs], [item for _, item in pairs])
            self._add_values(recording, "before", variables, variables)
            _deliver(functools.partial(recording.add, "rate", "learning rate"), [_tensor(optimizer.learning_rate)])
            result = original(grads, trainable_variables, **options)
            everything = [variable for _, variable in self._entries()]
            self._add_values(recording, "after", everything, everything)
            _deliver(lambda _: recording.advance(), [_tensor(optimizer.learning_rate)])
            still = [variable for variable in everything if not variable.trainable]
            self._add_values(recording, "before", still, still)
            return result

        optimizer.apply = apply

    def _add_values(self, recording: Recording, part: str, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Record values that belong to variables, now or when a graph is carried out."""
        layers = {variable.path: layer for layer, variable in self._entries()}

        def add(*arrays: Array) -> None:
            for variable, held in zip(variables, arrays, strict=True):
                layer = layers.get(variable.path)
                if layer is None:
                    recording.add(part, variable.path, held)
                    continue
                for name, values_of_part in self._parts(layer, variable, held):
                    recording.add(part, name, values_of_part, self._name(layer))

        _deliver(add, [_tensor(item) for item in values])


def _entering(optimizer: Any, gradients: Any) -> list[Any]:
    """Return gradients as they enter an optimiser's rule: dense, unscaled and clipped."""
    dense = [None if item is None else _tensor(item) for item in gradients]
    scale = optimizer.loss_scale_factor
    clipped = optimizer._clip_gradients(dense if scale is None else [None if item is None else item / scale for item in dense])
    return list(clipped)


def _tensor(value: Any) -> Any:
    if type(value).__name__ == "IndexedSlices":  # a gradient of some rows, as an embedding's
        return sys.modules["tensorflow"].convert_to_tensor(value)
    return sys.modules["keras"].ops.convert_to_tensor(value)


def _list(column: Any) -> list[Any]:
    if column is None:
        return []
    return list(column.values()) if isinstance(column, dict) else list(column) if isinstance(column, (list, tuple)) else [column]


def layer_settings(layer: Any, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Return a layer's kind and settings, in terms that hold for all frameworks."""
    kind = type(layer).__name__
    if kind == "BatchNormalization":
        size = int(np.prod([item or 1 for item in shape])) // max(int(shape[-1] or 1), 1)
        return "batch norm", {"epsilon": layer.epsilon, "momentum": round(1 - layer.momentum, 12), "running variance": f"by n = {size}"}
    if kind == "LayerNormalization":
        return "layer norm", {"epsilon": layer.epsilon}
    if kind.startswith(("Conv", "DepthwiseConv")):
        return _convolution(layer, kind, shape)
    if "Pooling" in kind and not kind.startswith("Global"):
        inside = shape[1:-1] if Watched._channels_last(layer) else shape[2:]
        padding = _padding(layer.padding, inside, layer.pool_size, layer.strides, (1,) * len(layer.pool_size))
        settings = {"size": list(layer.pool_size), "stride": list(layer.strides), "padding": padding}
        return "max pool" if kind.startswith("Max") else "average pool", settings
    if kind == "ReLU":
        capped = layer.max_value is not None
        return (f"relu{layer.max_value:g}" if capped else "leakyrelu" if layer.negative_slope else "relu"), {}
    plain = {"Dropout": ("rate", "rate"), "LeakyReLU": ("slope", "negative_slope"), "ELU": ("alpha", "alpha")}
    if kind in plain:
        ours, theirs = plain[kind]
        return kind.lower(), {ours: getattr(layer, theirs)}
    if kind == "Activation":
        return layer.activation.__name__, {}
    if recurrent := recurrent_kind(layer):
        functions = {ours: getattr(getattr(layer.cell, theirs, None), "__name__", "") for ours, theirs in _OF_CELLS.items()}
        gates: dict[str, Any] = {ours: name for ours, name in functions.items() if name}
        if hasattr(layer.cell, "reset_after"):
            gates["reset after the product"] = layer.cell.reset_after
        return recurrent.lower(), gates
    return {"Dense": "linear"}.get(kind, kind.lower()), _penalty(layer)


def _convolution(layer: Any, kind: str, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    if kind.endswith("Transpose"):
        return "transposed convolution", {"stride": list(layer.strides), "dilation": list(layer.dilation_rate), **_penalty(layer)}
    is_last = Watched._channels_last(layer)
    padding = _padding(layer.padding, shape[1:-1] if is_last else shape[2:], layer.kernel_size, layer.strides, layer.dilation_rate)
    groups = shape[-1 if is_last else 1] if kind.startswith("Depthwise") else layer.groups
    settings = {"stride": list(layer.strides), "padding": padding, "dilation": list(layer.dilation_rate), "groups": groups}
    return "convolution", {**settings, **_penalty(layer)}


def _penalty(layer: Any) -> dict[str, Any]:
    regularizer = getattr(layer, "kernel_regularizer", None)
    return {"penalty of its weights": regularizer.get_config()} if regularizer is not None else {}


def _padding(kind: str, inside: Sequence[Any], size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Return the padding before and after, by axis."""
    if kind == "valid" or any(item is None for item in inside):
        return [[0, 0] for _ in size] if kind == "valid" else kind
    pairs = []
    for length, width, step, apart in zip(inside, size, stride, dilation, strict=True):
        total = max((-(-int(length) // step) - 1) * step + apart * (width - 1) + 1 - int(length), 0)
        pairs.append([total // 2, total - total // 2])
    return pairs


def loss_settings(model: Any) -> dict[str, Any]:
    """Return the name and the settings of a compiled model's loss."""
    loss: Any = getattr(model, "loss", None)
    if hasattr(loss, "get_config"):
        config = loss.get_config()
        return {
            "name": type(loss).__name__,
            **{key: config[key] for key in ("from_logits", "reduction", "label_smoothing") if key in config},
        }
    return {"name": str(loss) if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)}


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return an optimiser's settings, in terms that hold for all frameworks."""
    settings: dict[str, Any] = {"rule": type(optimizer).__name__.lower(), "weight decay": float(optimizer.weight_decay or 0.0)}
    for ours, theirs in {
        "beta1": "beta_1", "beta2": "beta_2", "epsilon": "epsilon", "amsgrad": "amsgrad", "momentum": "momentum", "nesterov": "nesterov",
    }.items():  # fmt: skip
        if hasattr(optimizer, theirs):
            settings[ours] = getattr(optimizer, theirs)
    for theirs, ours in {"clipnorm": "norm clipped by tensor", "global_clipnorm": "norm clipped", "clipvalue": "values clipped"}.items():
        if getattr(optimizer, theirs, None) is not None:
            settings[ours] = getattr(optimizer, theirs)
    if getattr(optimizer, "use_ema", False):
        settings["moving average"] = optimizer.ema_momentum
    if settings["weight decay"]:
        settings["kind of weight decay"] = "decoupled"
    if isinstance(optimizer, sys.modules["keras"].optimizers.Adam):
        settings["epsilon hat"] = True  # it is added before the second moment is corrected
    return settings
