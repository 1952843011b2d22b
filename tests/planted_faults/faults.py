"""The faults: where each shows, in which part of an update, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NET = Path(__file__).parents[2] / "examples/own_torch/net.py"
MODELS = {  # model, and the settings of its runs
    "cnn": {"model": "cnn", "data": "glyphs", "global_batch_size": 32},
    "alexnet": {"model": "alexnet", "data": "glyphs", "global_batch_size": 8},
    "resnet18": {"model": "resnet18", "data": "glyphs", "global_batch_size": 16},
    "transformer": {"model": "transformer?size=tiny", "data": "numbers", "global_batch_size": 16},
    "imported": {"model": f"{NET}:Net", "data": "glyphs", "global_batch_size": 16},
}
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4, "lr": 0.01}
ADAM = {"optimizer": "adam", "weight_decay": 1e-4, "lr": 0.001}
ADAMW = {"optimizer": "adamw", "weight_decay": 0.01, "lr": 0.001}
EVERYWHERE = dict.fromkeys(MODELS, "")


@dataclass(frozen=True)
class Fault:
    """A fault, and the diagnosis.

    `layers`: by model the first layer at which it shows, "" for a part without layers. `part` and `cause` are words of the diagnosis;
    without a cause it is in no catalogue. `update` is the first one that shows it, from 0; by model in `updates` where it is later.
    """

    name: str
    part: str
    layers: Mapping[str, str]
    cause: str | None = None
    update: int = 0
    updates: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=lambda: SGD)


FIRST_CONVOLUTION = {"cnn": "conv1", "alexnet": "features.0", "imported": "stem.0"}
ONE_DENSE = {
    "cnn": "fc2",
    "alexnet": "classifier.6",
    "resnet18": "fc",
    "transformer": "encoder.0.feed_forward.inner",
    "imported": "head",
}
ONE_PRODUCT = {
    "cnn": "conv2",
    "alexnet": "features.6",
    "resnet18": "layer3.0.conv1",
    "transformer": "encoder.1.feed_forward.output",
    "imported": "blocks.1.conv2",
}
ONE_CONVOLUTION = {name: layer for name, layer in ONE_PRODUCT.items() if name != "transformer"}
FIRST_NORM = {"resnet18": "bn1", "transformer": "encoder.0.self_attention_norm", "imported": "stem.1"}
LAST_NORM = {"resnet18": "layer4.1.bn2", "transformer": "decoder.norm", "imported": "blocks.2.shortcut.1"}
STRIDED = {"alexnet": "features.0", "resnet18": "conv1", "imported": "blocks.1.conv1"}
FIRST_RELU = {"cnn": "conv1", "alexnet": "relu 1", "resnet18": "relu 1", "imported": "stem.2"}
AFTER_MAXIMA = {"resnet18": "relu 2", "alexnet": "relu 3"}  # those before max-pooling have slopes at maxima alone, which are positive
DROPPING = {"alexnet": "dropout 1", "transformer": "dropout 1", "imported": "dropout"}
FIRST_POOL = {"cnn": "conv1", "alexnet": "max_pool 1", "resnet18": "max_pool 1"}

FORWARD = [
    Fault("norm_epsilon_1e-3", "forward", FIRST_NORM, "epsilon"),
    Fault("norm_epsilon_10_percent", "forward", FIRST_NORM, "epsilon"),
    Fault("norm_epsilon_in_last_norm", "forward", LAST_NORM, "epsilon"),
    Fault("padding_shifted", "forward", STRIDED, "padding"),
    Fault("relu_capped", "forward", FIRST_RELU, "cap"),
    Fault("one_layer_in_bf16", "forward", ONE_PRODUCT, "bf16"),
    Fault("features_channels_last", "forward", {"cnn": "fc1", "alexnet": "flatten 1"}, "permut"),
    Fault("max_pool_averages", "forward", FIRST_POOL),
    Fault("relu_leaks", "forward", FIRST_RELU),
    Fault("attention_not_scaled", "forward", {"transformer": "attention 1"}),
    Fault("causal_mask_one_late", "forward", {"transformer": "attention 4"}),
    Fault("bias_left_out", "forward", {model: layer for model, layer in ONE_DENSE.items() if model != "transformer"}),
    Fault("dropout_rate_higher", "forward", DROPPING, "dropout"),
]
BACKWARD = [
    Fault("weight_gradient_1_percent", "backward", ONE_CONVOLUTION),
    Fault("bias_gradient_is_mean", "backward", ONE_DENSE),
    Fault("bias_gradient_missing", "backward", {"cnn": "fc1", "alexnet": "classifier.4", "imported": "head"}),
    Fault("relu_gradient_leaks", "backward", {**FIRST_RELU, **AFTER_MAXIMA}),
    Fault("bias_left_out_of_zeros", "backward", {"transformer": ONE_DENSE["transformer"]}),  # it is 0, but has a gradient
    Fault("norm_statistics_without_gradient", "backward", FIRST_NORM),
    Fault("product_gradient_in_bf16", "backward", ONE_PRODUCT, "bf16"),
    Fault("max_pool_gradient_averaged", "backward", FIRST_POOL),
    Fault("keys_without_gradient", "backward", {"transformer": "attention 1"}),
    Fault("embedding_gradient_not_scaled", "backward", {"transformer": "embedding"}),
    Fault("average_pool_gradient_doubled", "backward", {"alexnet": "average_pool 1", "resnet18": "average_pool 1"}),
    Fault("dropout_gradient_not_scaled", "backward", DROPPING),
]
OPTIMISER = [
    Fault("lr_1e-5", "optimiser", EVERYWHERE, "learning rate"),
    Fault("lr_one_late", "optimiser", EVERYWHERE, "learning rate", update=1, settings={**SGD, "schedule": "cosine", "steps": 100}),
    Fault("warmup_one_late", "optimiser", EVERYWHERE, "learning rate", update=1, settings={**SGD, "warmup_steps": 20}),
    Fault("momentum_complement", "optimiser", EVERYWHERE, "momentum", update=1),
    Fault("nesterov", "optimiser", EVERYWHERE, "momentum"),
    Fault("decay_decoupled", "optimiser", EVERYWHERE, "decay"),
    Fault("decay_coupled", "optimiser", EVERYWHERE, "decay", settings=ADAMW),
    Fault("epsilon_inside_root", "optimiser", EVERYWHERE, "epsilon", settings=ADAM),
    Fault("adam_epsilon_1e-7", "optimiser", EVERYWHERE, "epsilon", settings=ADAM),
    Fault("no_bias_correction", "optimiser", EVERYWHERE, "bias correction", settings=ADAM),
    Fault("beta2_0.99", "optimiser", EVERYWHERE, "beta2", settings=ADAM),
    Fault("clipped_by_tensor", "clipping", EVERYWHERE, "clip", settings={**SGD, "clip_norm": 0.01}),
    Fault(
        "exempt_decay",
        "optimiser",
        EVERYWHERE,
        "decay",
        updates={"transformer": 1},
        settings={**SGD, "weight_decay": 0.01, "weight_decay_except": "*.bias"},
    ),
]
IMAGES = dict.fromkeys(("cnn", "alexnet", "resnet18", "imported"), "")
REST = [
    Fault("mean_and_std_of_others", "data", IMAGES, "normalis"),
    Fault("pixels_by_256", "data", IMAGES, "normalis"),
    Fault("channels_reversed", "data", IMAGES, "permut"),
    Fault("other_order", "data", EVERYWHERE, "order"),
    Fault("labels_smoothed", "loss", EVERYWHERE, "smoothing"),
    Fault("loss_scaled", "loss", EVERYWHERE, "scale"),
    Fault("padding_counted", "loss", {"transformer": ""}, "padding"),
    Fault("running_momentum_complement", "buffers", {"resnet18": "bn1", "imported": "stem.1"}, "momentum"),
    Fault("running_variance_biased", "buffers", {"resnet18": "bn1", "imported": "stem.1"}, "variance"),
    Fault("other_initial_weights", "weights", EVERYWHERE, "initial"),
    Fault("moving_average_without_ramp", "optimiser", EVERYWHERE, "average", settings={**SGD, "ema_decay": 0.99}),
]
FAULTS = {fault.name: fault for fault in (*FORWARD, *BACKWARD, *OPTIMISER, *REST)}
