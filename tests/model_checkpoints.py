"""Checkpoints of real models with values drawn at random, as training might have left them."""

from __future__ import annotations

import numpy as np
from checkpoint_tools import entries

from crosstrain.checkpoint import CheckpointWriter, Meta, described_data, described_model
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.models.build import build_model


def save_model(run, model, shape=(3, 32, 32), classes=10, step=123, seed=0, info=None, digest="0", job=None):
    """Save a checkpoint of `run` and return its folder; `job` has more of its job.

    The data are only described and need not exist.
    """
    channels = shape[0]
    if info is None:
        info = DataInfo.of_images(
            "glyphs", {"train": 60, "test": 10}, ImageFeatures(shape, classes, tuple([0.5] * channels), tuple([0.25] * channels))
        )
    spec = build_model(model, info)
    draw = np.random.default_rng(seed)
    values = {f"parameters/{name}": value for name, value in spec.initial(seed).items()}
    values |= {
        f"buffers/{buffer.name}": (0.1 * draw.standard_normal(buffer.shape) + buffer.constant).astype(np.float32) for buffer in spec.buffers
    }
    values |= {f"slots/momentum/{name}": value for name, value in spec.initial(seed + 1).items()}
    meta = Meta(
        step=step,
        epoch=1,
        examples=0,
        run_seconds=1.0,
        seed=seed,
        job={"model": model, "data": info.name, "backend": "torch", "precision": "fp32", "device": "auto", **(job or {})},
        model=described_model(spec),
        data=described_data(info, digest, None),
        metrics={"loss": 0.5, "accuracy": 0.75},
        created_at="2026-01-01T00:00:00+00:00",
        backend="torch",
        mode="sync",
        workers=1,
    )
    writer = CheckpointWriter(run / "checkpoints", meta, entries(values))
    for value in values.values():
        writer.write(value.data)
    writer.seal()
    return writer.publish()
