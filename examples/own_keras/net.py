"""A residual network for small images, as people write them: Keras alone."""

import keras
from keras import layers


def block(x, width, stride=1):
    shortcut = x
    if stride != 1 or x.shape[-1] != width:
        shortcut = layers.Conv2D(width, 1, stride, use_bias=False)(x)
        shortcut = layers.BatchNormalization()(shortcut)
    y = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
    y = layers.BatchNormalization()(y)
    return layers.ReLU()(layers.Add()([y, shortcut]))


def model(input_shape=(28, 28, 1), classes=10, width=16, dropout=0.2):
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = block(x, width)
    x = block(x, 2 * width, 2)
    x = block(x, 4 * width, 2)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes)(layers.Dropout(dropout)(x)))


def table(features=8, width=64):
    """One number from each row of own_torch/table.csv."""
    inputs = keras.Input((features,))
    x = layers.Dense(width, activation="relu")(inputs)
    x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(1)(x))
