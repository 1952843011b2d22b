"""The formats that TensorFlow exports to. Imports no TensorFlow: the command line asks for their names."""

from __future__ import annotations

from collections.abc import Mapping

from ..export import ExportFormat

__all__ = ["EXPORT_FORMATS"]

EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    "savedmodel": ExportFormat(
        "a SavedModel with a signature for normalised images and one for raw pixels",
        "import tensorflow as tf\n\n"
        'model = tf.saved_model.load(".")\n'
        'logits = model.signatures["serving_default"](images=tf.zeros(IMAGES))["logits"]  # normalised, float32\n'
        'logits = model.signatures["pixels"](images=tf.zeros(IMAGES, tf.uint8))["logits"]  # pixels 0 … 255',
    ),
    "tf-checkpoint": ExportFormat(
        "the weights as a checkpoint of tf.train.Checkpoint",
        "import json\n\n"
        "import tensorflow as tf\n\n"
        'described = json.load(open("model.json"))\n'
        'weights = {name: tf.Variable(tf.zeros(shape)) for name, shape in described["parameters"] + described["buffers"]}\n'
        'tf.train.Checkpoint(**weights).read("weights").assert_consumed()',
    ),
}
