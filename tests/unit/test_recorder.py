"""Sketches and recordings, with numpy alone."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.lockstep.recorded import Recording, difference
from crosstrain.lockstep.recordings import compare_recordings
from crosstrain.recorder.recording import Recording as Writer
from crosstrain.recorder.recording import initial_weights, sketch, wanted_steps


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), size=st.integers(2_000, 400_000), apart=st.sampled_from([1e-7, 1e-5, 1e-3]))
def test_sketches_estimate_differences(seed, size, apart):
    draw = np.random.default_rng(seed)
    first = draw.standard_normal(size)
    second = first + apart * draw.standard_normal(size)
    estimate = np.linalg.norm(sketch(first) - sketch(second)) / np.linalg.norm(sketch(first))
    assert 0.85 * apart < estimate < 1.2 * apart
    assert np.allclose(sketch(2 * first - second), 2 * sketch(first) - sketch(second))


def test_steps_are_read():
    assert wanted_steps("0-2,4, 8") == {0, 1, 2, 4, 8}
    for wrong in ("", "a", "3-1", "1,,2", "0-99999999"):
        with pytest.raises(ValueError, match="steps"):
            wanted_steps(wrong)


def recorded(folder, weights, image, *, full=False):
    writer = Writer(str(folder), "0", full=full)
    for name, values in weights.items():
        writer.add("before", name, values)
    writer.add("batch", "image", image)
    writer.add("forward", "hidden", image * 2)
    writer.add("loss", "loss", np.float32(1.5))
    writer.close()
    return folder


@pytest.mark.parametrize("full", [False, True])
def test_layouts_are_aligned_by_content(tmp_path, full):
    draw = np.random.default_rng(2)
    kernel, dense = draw.standard_normal((16, 8, 3, 3)).astype("f4"), draw.standard_normal((60, 40)).astype("f4")
    image = draw.standard_normal((8, 3, 32, 32)).astype("f4")
    first = recorded(tmp_path / "a", {"conv.weight": kernel, "fc.weight": dense}, image, full=full)
    second = recorded(tmp_path / "b", {"dense/kernel": dense.T, "conv/kernel": kernel.transpose(2, 3, 1, 0)}, image.transpose(0, 2, 3, 1))
    assert compare_recordings((first, second), ("a", "b")).findings == []
    moved = recorded(tmp_path / "c", {"dense/kernel": dense.T, "conv/kernel": 0.5 * kernel}, image[:, ::-1])
    parts = {finding.part: finding.cause for finding in compare_recordings((first, moved), ("a", "c")).findings}
    assert parts["weights"].startswith("its initial values differ")
    assert parts["data"] == "each example has the same values in another order, of its axes or channels"
    shuffled = recorded(tmp_path / "d", {"conv.weight": kernel, "fc.weight": dense}, image[::-1])
    assert "order of the examples" in compare_recordings((first, shuffled), ("a", "d")).findings[0].cause


def test_arrays_of_a_recording_are_read_back(tmp_path):
    weights = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(2000)}
    recorded(tmp_path / "a", weights, np.zeros((2, 2)), full=True)
    assert [(name, values.tolist()) for name, values in initial_weights(str(tmp_path / "a"))] == [
        (name, values.tolist()) for name, values in weights.items()
    ]
    tensors = Recording(tmp_path / "a", "a").updates[0]["before"]
    assert difference(tensors[0], tensors[0]) == 0.0
    with pytest.raises(FileExistsError, match="has a recording already"):
        Writer(str(tmp_path / "a"), "0", full=True)


def test_recorder_imports_numpy_alone():
    frameworks = "{'torch', 'tensorflow', 'keras', 'msgspec', 'pydantic'}"
    code = f"import sys; from crosstrain import recorder; print(sorted({frameworks} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
