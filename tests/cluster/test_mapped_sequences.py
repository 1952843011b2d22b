"""TensorFlow's memory-mapped columns of sequences: equal to columns in its memory."""

import subprocess

import pytest

from crosstrain.core.process import python

pytestmark = pytest.mark.cluster

CHECK = """
import numpy as np
import tensorflow as tf

from crosstrain.backends.tf import data as tf_data
from crosstrain.backends.tf.asynchronous import worker
from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store
from pathlib import Path
import sys


class Source:
    name, description, version = "text", "made for a test", 1

    def load(self, data_dir):
        def blocks():
            draw = np.random.default_rng(1)
            lengths = draw.integers(1, 9, 50)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            one, other = (Column(draw.integers(0, 60_000, offsets[-1]).astype(np.uint16), offsets) for _ in range(2))
            yield {"source": one, "target": other}

        columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
        return PreparedColumns(columns, TextFeatures({"source": 60_000, "target": 60_000}), {"train": blocks, "test": blocks})


root = Path(sys.argv[1])
build_store(root, "made", "text", Source(), None, again=True)
dataset = stored_dataset._open(root / "made", "text", None, always=True)
layout = tf_data.Layout(dataset.info, ("source",), "target", False, False, False)
held = tf_data.resident(dataset, "train", layout)
tf_data.MAPPED_BYTES = 0
mapped = tf_data.resident(dataset, "train", layout)
assert held.tensors["source.values"].dtype == tf.int32
assert mapped.tensors["source.values"].dtype == tf.uint16
batch = tf.function(lambda split, indices: split.batch(indices))
for indices in ([3], [0, 49, 7, 7], []):
    for held_part, mapped_part in zip(held.batch(tf.constant(indices, tf.int32)), mapped.batch(tf.constant(indices, tf.int32))):
        assert held_part.keys() == mapped_part.keys()
        for name in held_part:
            assert held_part[name].dtype == mapped_part[name].dtype
            assert np.array_equal(held_part[name], mapped_part[name]), name

files = {path: path.read_bytes() for path in (root / "made").rglob("*") if path.is_file()}
layout = tf_data.with_mapped_files(layout, dataset)
assert len(layout.mapped) == 4
worker.publish(dataset, layout)
loaded = tf.function(lambda: worker.read(layout))()  # as async workers do it
for split in ("train", "test"):
    handed, expected = tf_data.Resident(layout, loaded[split]), tf_data.resident(dataset, split, layout)
    assert [tensor.dtype for tensor in handed.tensors.values()] == [spec.dtype for spec in layout.tensor_specs(split)]
    for ours, theirs in zip(handed.batch(tf.constant([0, 49, 7])), expected.batch(tf.constant([0, 49, 7]))):
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
assert files == {path: path.read_bytes() for path in files}  # what is in the store is not emptied
print("equal")
"""


@pytest.mark.thorough
def test_mapped_columns_give_the_same_batches(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "check.py").write_text(CHECK)
    command = [python("crosstrain")[0], str(tmp_path / "check.py"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
