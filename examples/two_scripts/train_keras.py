"""Train a small CNN on 32x32 pictures with Keras 3; the twin of train_torch.py.

python train_keras.py [--cause NAME] [--optimizer sgd|adam|adamw] [--updates 5] [--weights-of FOLDER] [--record FOLDER]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

from crosstrain import recorder

BATCH, CLASSES = 32, 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10
LR = {"sgd": 0.02, "adam": 1e-3, "adamw": 1e-3}
DECAY_AFTER, DECAY = 2, 0.1  # the learning rate is multiplied by DECAY after this many updates
MOMENTUM, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.9, 0.999, 1e-8, 0.05

HERE = ["bn_epsilon", "same_padding", "adam_epsilon", "late_schedule", "bgr", "relu6"]
ELSEWHERE = ["bn_momentum", "double_softmax", "loss_sum", "coupled_decay", "normalisation", "label_smoothing"]


class SGD(keras.optimizers.SGD):
    """SGD with PyTorch's momentum: the velocity sums gradients, not gradients times the learning
    rate of their time, so that a change of the learning rate acts on the whole velocity.
    """

    def update_step(self, gradient, variable, learning_rate):
        velocity = self.momentums[self._get_variable_index(variable)]
        new = self.momentum * velocity + keras.ops.cast(gradient, variable.dtype)
        self.assign(velocity, new)
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * new)


def make_model(cause, dropout=0.0):
    act = "relu6" if cause == "relu6" else "relu"
    # Keras counts what is kept of the old average: 0.9 here is PyTorch's 0.1
    bn = {"momentum": 0.9, "epsilon": 1e-3 if cause == "bn_epsilon" else 1e-5}
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization(**bn)(x)
    x = layers.Activation(act)(x)
    x = layers.MaxPooling2D(2)(x)  # 16 x 16 x 16
    if cause == "same_padding":
        x = layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False)(x)
    else:  # "same" would pad only below and at the right when the stride is 2
        x = layers.ZeroPadding2D(1)(x)
        x = layers.Conv2D(32, 3, strides=2, padding="valid", use_bias=False)(x)
    x = layers.BatchNormalization(**bn)(x)
    x = layers.Activation(act)(x)
    x = layers.MaxPooling2D(2)(x)  # 4 x 4 x 32
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation=act)(x)
    x = layers.Dropout(dropout)(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def initial(model):
    """The weights that training starts from: Keras's default initialisation."""
    return model


def make_optimizer(cause, name="sgd"):
    # PiecewiseConstantDecay keeps a value up to AND AT its boundary, and counts updates from 0
    boundary = DECAY_AFTER if cause == "late_schedule" else DECAY_AFTER - 1
    lr = keras.optimizers.schedules.PiecewiseConstantDecay([boundary], [LR[name], LR[name] * DECAY])
    if name == "sgd":
        return SGD(lr, momentum=MOMENTUM)
    adam = {"beta_1": BETA1, "beta_2": BETA2, "epsilon": 1e-3 if cause == "adam_epsilon" else ADAM_EPS}
    if name == "adam":
        return keras.optimizers.Adam(lr, **adam)
    return keras.optimizers.AdamW(lr, weight_decay=WEIGHT_DECAY, **adam)


def make_data(cause, count=5 * BATCH):
    """Grey noisy pictures (uint8, RGB) with a small patch whose colour and place tell the class."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, CLASSES, count)
    colours = rng.integers(0, 256, (CLASSES, 3))
    pictures = rng.normal(120, 8, (count, 32, 32, 3))
    for picture, label in zip(pictures, labels, strict=True):
        row, col = 3 + 5 * (label % 5) + rng.integers(0, 3), 8 + 12 * (label // 5) + rng.integers(0, 3)
        picture[row : row + 3, col : col + 3] = colours[label] + rng.normal(0, 8, (3, 3, 3))
    pictures = np.clip(pictures, 0, 255).astype(np.uint8)
    if cause == "bgr":  # as cv2.imread gives them
        pictures = pictures[..., ::-1]
    x = (pictures.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return x, labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cause", choices=HERE + ELSEWHERE)
    ap.add_argument("--optimizer", choices=list(LR), help="default: the one the cause needs, or sgd")
    ap.add_argument("--updates", type=int, default=5)
    ap.add_argument("--dropout", type=float, default=0.0)
    ap.add_argument("--record", help="folder of a recording for `trainer diverge`")
    ap.add_argument("--weights-of", help="recording whose initial weights are taken")
    args = ap.parse_args()
    needs = {"adam_epsilon": "adam", "coupled_decay": "adamw"}
    keras.utils.set_random_seed(0)
    model = initial(make_model(args.cause, args.dropout))
    model.compile(
        optimizer=make_optimizer(args.cause, args.optimizer or needs.get(args.cause, "sgd")),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    if args.weights_of:
        recorder.adopt(args.weights_of, model)
    if args.record:
        recorder.start(args.record, full=True)
    recorder.watch(model)
    x, y = make_data(args.cause, args.updates * BATCH)
    for i in range(args.updates):
        part = slice(i * BATCH, (i + 1) * BATCH)
        model.reset_metrics()  # otherwise the loss is the mean over all updates so far
        loss = model.train_on_batch(x[part], y[part], return_dict=True)["loss"]
        print(f"update {i + 1} loss {loss:.7f}")
    model.reset_metrics()
    print(f"eval loss {model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True)['loss']:.7f}")


if __name__ == "__main__":
    main()
