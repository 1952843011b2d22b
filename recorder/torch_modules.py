"""Record modules, optimisers and tensors of torch."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np

from .recording import EVALUATION, Array, Recording, matched

_PLAIN = {  # settings by layer: ours, and the module's
    "Dropout": {"rate": "p"}, "LeakyReLU": {"slope": "negative_slope"}, "ELU": {"alpha": "alpha"}, "GELU": {"approximate": "approximate"},
    "Hardtanh": {"most": "max_val"}, "ReLU6": {}, "Softmax": {}, "Embedding": {},
}  # fmt: skip
FUNCTIONS = (
    "relu",
    "relu6",
    "gelu",
    "silu",
    "elu",
    "selu",
    "leaky_relu",
    "tanh",
    "sigmoid",
    "softmax",
    "log_softmax",
    "hardtanh",
    "flatten",
)
REVERSE = " (reverse)"
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm", "InstanceNorm2d", "RMSNorm")


def knows(value: Any) -> bool:
    """Return whether a value is a tensor or module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.Tensor, torch.nn.Module))


def array(value: Any) -> Array:
    """Return a tensor's values; bf16 and fp16 as float32."""
    detached = value.detach().cpu()
    return np.array((detached.float() if detached.is_floating_point() and detached.element_size() < 4 else detached).numpy())


def tensor(recording: Recording, name: str, value: Any, layer: str = "") -> Any:
    """Record a tensor and its gradient; return it."""
    recording.add("forward", name, array(value), layer)
    if value.requires_grad and recording.is_wanted:
        value.register_hook(lambda slope: recording.add("slope", name, array(slope), layer))
    return value


def state(recording: Recording, part: str, module: Any) -> None:
    """Record a module's parameters and buffers."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if value.is_floating_point():
            recording.add(part, name, array(value), _layer_of(name))


def _layer_of(name: str) -> str:
    """Return the layer that a weight belongs to; a recurrent layer's way back is one of its own."""
    return name.rpartition(".")[0] + (REVERSE if name.endswith("_reverse") else "")


def watch(recording: Recording, module: Any, optimizer: Any) -> None:
    """Record a module in training, and its updates."""
    layers = _Pass(recording, module)
    for name, layer in module.named_modules():
        if not any(layer.children()):
            layer.register_forward_pre_hook(layers.enter)
            layer.register_forward_hook(layers.recorder(name or "output"))
    module.register_forward_pre_hook(layers.begin)
    module.register_forward_hook(layers.end, always_call=True)
    if optimizer is not None:
        _watch_updates(recording, module, optimizer, layers)


class _Pass:
    """A module's pass: the results of its layers, and of activations that are functions."""

    def __init__(self, recording: Recording, module: Any) -> None:
        self._recording, self._module, self._torch = recording, module, sys.modules["torch"]
        self._counts: Counter[str] = Counter()
        self._mode: Any = None
        self._within = 0
        self.modes: set[bool] = set()  # of the passes with gradients since the last update, whether they train

    @property
    def _is_recorded(self) -> bool:
        return self._recording.is_wanted and self._module.training and self._torch.is_grad_enabled()

    def begin(self, _: Any, __: Any) -> None:
        """See functions from now on."""
        self._counts.clear()
        self._within = 0
        if self._torch.is_grad_enabled():
            self.modes.add(self._module.training)
        if self._is_recorded:
            overrides, layers = self._torch.overrides, self

            class Mode(overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
                def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                    result = function(*args, **(kwargs or {}))
                    kind = getattr(function, "__name__", "").rstrip("_")
                    if kind in FUNCTIONS and not layers._within and isinstance(result, layers._torch.Tensor):
                        layers.add(kind, kind, {}, result)
                    return result

            self._mode = Mode()
            self._mode.__enter__()

    def end(self, _: Any, __: Any, ___: Any) -> None:
        """See functions no longer."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def end_update(self) -> None:
        """Note a module that was not told to train."""
        if self.modes == {False}:
            self._recording.layer(EVALUATION, "mode", {}, "torch")
        self.modes.clear()

    def enter(self, _: Any, __: Any) -> None:
        """Begin a layer, whose functions are its own."""
        self._within += 1

    def recorder(self, name: str) -> Any:
        """Return what is called with each result of a layer."""

        def record(layer: Any, inputs: Any, output: Any) -> None:
            self._within -= 1
            if not self._is_recorded:
                return
            shape = tuple(inputs[0].shape) if inputs and isinstance(inputs[0], self._torch.Tensor) else ()
            if isinstance(layer, self._torch.nn.RNNBase):
                states = output[1][0] if isinstance(output[1], tuple) else output[1]
                for place in range(2 if layer.bidirectional else 1):  # the last layer's state after the last step
                    self.add(name + REVERSE * place, *layer_settings(layer, shape), states[place - (2 if layer.bidirectional else 1)])
            elif isinstance(output, self._torch.Tensor):
                self.add(name, *layer_settings(layer, shape), output)

        return record

    def add(self, name: str, kind: str, settings: dict[str, Any], output: Any) -> None:
        """Record a result; a layer's second one of a pass is numbered."""
        self._counts[name] += 1
        place = name if self._counts[name] == 1 else f"{name} ({self._counts[name]})"
        self._recording.layer(place, kind, settings, "torch")
        self._recording.layer(f"{place} (precision)", str(output.dtype).removeprefix("torch."), {}, "torch")
        tensor(self._recording, place, output, name)


def _watch_updates(recording: Recording, module: Any, optimizer: Any, layers: _Pass) -> None:
    names = {parameter: name for name, parameter in module.named_parameters()}

    def add_gradient(parameter: Any) -> None:
        if parameter.grad is not None and parameter in names:
            recording.add("gradient", names[parameter], array(parameter.grad), _layer_of(names[parameter]))

    def before_step(_: Any, *__: Any) -> None:
        recording.layer("optimizer", type(optimizer).__name__, optimizer_settings(optimizer), "torch")
        layers.end_update()
        if recording.is_wanted:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    add_gradient(parameter)
            recording.add("rate", "learning rate", np.asarray(float(optimizer.param_groups[0]["lr"])))

    def after_step(_: Any, *__: Any) -> None:
        if recording.is_wanted:
            state(recording, "after", module)
        recording.advance()
        if recording.is_wanted:
            state(recording, "before", module)

    state(recording, "before", module)
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def layer_settings(layer: Any, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Return a layer's kind and settings, in terms that hold for all frameworks."""
    kind = type(layer).__name__
    if kind in _NORMS:
        settings: dict[str, Any] = {"epsilon": layer.eps}
        if kind.startswith("BatchNorm"):
            count = int(np.prod(shape)) // max(shape[1], 1) if len(shape) > 1 else 0
            settings |= {"momentum": layer.momentum, "running variance": f"by n − 1 = {count - 1}"}
        return "batch norm" if kind.startswith("BatchNorm") else "layer norm" if kind == "LayerNorm" else kind, settings
    if kind.startswith("ConvTranspose"):
        return "transposed convolution", {"stride": list(layer.stride), "dilation": list(layer.dilation)}
    if kind.startswith("Conv"):
        pads: Any = layer.padding if isinstance(layer.padding, str) else [[item, item] for item in layer.padding]
        return "convolution", {"stride": list(layer.stride), "padding": pads, "dilation": list(layer.dilation), "groups": layer.groups}
    if kind.startswith(("MaxPool", "AvgPool")):
        size, stride, padding = (_pair(getattr(layer, part)) for part in ("kernel_size", "stride", "padding"))
        settings = {"size": size, "stride": stride, "padding": [[item, item] for item in padding]}
        return "max pool" if kind.startswith("Max") else "average pool", settings
    if kind in ("GRU", "LSTM"):
        gates = {"activation": "tanh", "recurrent activation": "sigmoid"}
        return kind.lower(), gates | ({"reset after the product": True} if kind == "GRU" else {})
    known = _PLAIN.get(kind, {})
    return kind.lower(), {ours: getattr(layer, theirs) for ours, theirs in known.items()}


def _pair(value: Any) -> list[int]:
    return [int(value)] * 2 if isinstance(value, int) else [int(item) for item in value]


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return an optimiser's settings, in terms that hold for all frameworks."""
    group, kind = optimizer.param_groups[0], type(optimizer).__name__
    settings: dict[str, Any] = {"rule": kind.lower(), "weight decay": float(group.get("weight_decay", 0.0))}
    if "betas" in group:
        settings |= {
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "epsilon": group["eps"],
            "amsgrad": group.get("amsgrad", False),
        }
    elif "momentum" in group:
        settings |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
    if settings["weight decay"]:
        decoupled = kind == "AdamW" or bool(group.get("decoupled_weight_decay", False))
        settings["kind of weight decay"] = "decoupled" if decoupled else "coupled (added to the gradient)"
    return settings


def adopt(module: Any, weights: list[tuple[str, Array]]) -> None:
    """Set a module's parameters and buffers in their order. Raises ValueError."""
    torch = sys.modules["torch"]
    ours = [(name, value) for name, value in [*module.named_parameters(), *module.named_buffers()] if value.is_floating_point()]
    with torch.no_grad():
        for (_, value), (_, new) in zip(ours, matched([(name, tuple(value.shape)) for name, value in ours], weights), strict=True):
            value.copy_(torch.from_numpy(new.copy()))
