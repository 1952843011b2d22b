"""Keras models as people write them, for `test_imported_keras`."""

import keras
import numpy as np
from keras import layers


def convolutional(input_shape, classes):
    """Batch normalisation, a shortcut, several convolutions, dropout of elements and channels."""
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.Activation("silu")(layers.BatchNormalization()(x))
    x = layers.SpatialDropout2D(0.2)(x)
    y = layers.DepthwiseConv2D(3, padding="same")(x)
    y = layers.Conv2DTranspose(8, 3, padding="same", activation="gelu")(y)
    x = layers.AveragePooling2D(2)(layers.LayerNormalization()(layers.Add()([x, y])))
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x))


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    """Layers without an input shape, a frozen one, given values, and a flag for training."""

    def __init__(self, num_classes, width=12, **kwargs):
        super().__init__(**kwargs)
        self.fixed = layers.Dense(width, trainable=False, kernel_initializer="orthogonal")
        self.shift = keras.Variable(np.linspace(-0.01, 0.01, width, dtype=np.float32), name="shift")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.25)
        self.head = layers.Dense(num_classes, kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.1, seed=3))

    def call(self, x, training=False):
        x = keras.ops.mean(self.fixed(x), axis=(1, 2)) + self.shift
        return self.head(self.drop(self.norm(x, training=training), training=training))


def sequences(vocabulary_size, classes, width=16):
    """Masked tokens through recurrent layers, which drop inputs and states."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(vocabulary_size, width, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(width, return_sequences=True, dropout=0.1))(x)
    x = layers.GRU(width, recurrent_dropout=0.1)(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def attentive(vocabulary_size, classes, width=16):
    """Attention with a mask of its own."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(vocabulary_size, width)(inputs)
    inside = keras.ops.not_equal(inputs, 0)[:, None, :]
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4, dropout=0.1)(x, x, attention_mask=inside))
    x = layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalMaxPooling1D()(x)))


class Doubled(layers.LSTM):
    """A layer of Keras under a name of the user's."""


class Scaled(layers.Layer):
    """A layer around another one, with a weight of its own."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return self.inner(x) * self.scale


def intricate(input_shape, classes):
    """A model within a model, a shared layer, several results, operations between layers."""
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation=layers.PReLU(shared_axes=[1, 2]))(inputs)
    inner = keras.Sequential([keras.Input(x.shape[1:]), layers.Conv2D(8, 3), layers.GroupNormalization(4), layers.Activation("gelu")])
    x = layers.AveragePooling2D(2)(keras.ops.cast(inner(x), "float32"))
    x = layers.Reshape((-1, 8))(x)
    shared = layers.Dense(8, activation="tanh")
    x = Scaled(layers.Dense(8))(shared(shared(x)))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    steps = keras.ops.floor(x * 4) / 4
    y, hidden, cell = Doubled(8, return_state=True)(x)
    parts = [y, hidden + cell, layers.Bidirectional(layers.GRU(4))(x), layers.GlobalMaxPooling1D()(x), keras.ops.mean(steps, 1)]
    return keras.Model(inputs, layers.Dense(classes)(layers.Dropout(0.2)(layers.Concatenate()(parts))) / 1.7)


def mixed(num_classes):
    """Two inputs by the names of their columns."""
    x, y = keras.Input((1,), name="x"), keras.Input((1,), name="y")
    z = layers.Concatenate()([layers.Dense(8, activation="tanh")(y), layers.Dense(8)(x)])
    return keras.Model({"y": y, "x": x}, layers.Dense(num_classes)(layers.Dropout(0.2)(z)))


def joined(num_features, classes):
    """All numbers of a table side by side."""
    return keras.Sequential([keras.Input((num_features,)), layers.Dense(8, activation="relu"), layers.Dense(classes)])


ready = keras.Sequential([keras.Input((18, 18, 3)), layers.Flatten(), layers.Dense(9, activation="relu"), layers.Dense(5)])


def regularized(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes, kernel_regularizer="l2")])


def noisy(classes):
    return keras.Sequential([layers.Flatten(), layers.GaussianNoise(0.1), layers.Dense(classes)])


def probable(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes), layers.Softmax()])


def bounded(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes, kernel_constraint="non_neg")])


def twice(classes):
    shared = layers.Dense(classes, activation="softmax")
    inputs = keras.Input((18, 18, 3))
    return keras.Model(inputs, shared(shared(layers.Dense(classes)(layers.Flatten()(inputs)))))


def rounded(classes):
    inputs = keras.Input((18, 18, 3), dtype="uint8")
    return keras.Model(inputs, layers.Dense(classes)(layers.Flatten()(inputs)))


def normed(classes):
    return keras.Sequential([layers.Flatten(), layers.SpectralNormalization(layers.Dense(classes))])


class Penal(keras.Model):
    """Adds a loss while it trains."""

    def __init__(self, classes):
        super().__init__()
        self.head = layers.Dense(classes)

    def call(self, x, training=False):
        y = self.head(keras.ops.mean(x, axis=(1, 2)))
        if training:
            self.add_loss(keras.ops.mean(y**2))
        return y


class Stepping(Penal):
    def train_step(self, *args):
        raise NotImplementedError


class Shuffling(keras.Model):
    """Whole numbers that are assigned while it is built; optionally a count of all its calls."""

    def __init__(self, classes, counts=False):
        super().__init__()
        self.head, self.counts = layers.Dense(classes), counts

    def build(self, shape):
        self.order = self.add_weight(shape=(3,), initializer="zeros", dtype="int32", trainable=False, name="order")
        self.order.assign([2, 0, 1])
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.head.build((None, 3))

    def call(self, x):
        if self.counts:
            self.count.assign_add(1.0)
        return self.head(keras.ops.take(keras.ops.mean(x, axis=(1, 2)), self.order, axis=1))


def half(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes, dtype="mixed_bfloat16")])


def frozen(classes):
    model = keras.Sequential([layers.Flatten(), layers.Dense(classes)])
    model.trainable = False
    return model


def unused(classes):
    inputs = keras.Input((18, 18, 3))
    flat = layers.Flatten()(inputs)
    return keras.Model(inputs, [layers.Dense(classes)(flat), layers.Dense(2)(flat)])


def wrong(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes + 1)])


def numbers(classes):
    return [classes]


class Counting(keras.Model):
    """Counts its steps in a whole number."""

    def __init__(self, classes):
        super().__init__()
        self.head = layers.Dense(classes)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1)
        return self.head(keras.ops.mean(x, axis=(1, 2)))


class Probabilities(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.head = layers.Dense(classes)

    def call(self, x):
        return keras.ops.softmax(self.head(keras.ops.mean(x, axis=(1, 2))))
