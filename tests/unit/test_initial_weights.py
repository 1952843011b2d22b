"""Initial weights from safetensors: what fits a model, what is refused, hostile files."""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from crosstrain.checkpoint.initial_weights import max_file_bytes, read_initial_weights
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job, split_digest, with_digest
from crosstrain.models.base import ModelSpec, ParameterSpec

SPEC = ModelSpec(
    "own",
    (ParameterSpec("body.weight", (3, 2), bound=1.0), ParameterSpec("head.weight", (4, 3), bound=1.0), ParameterSpec("head.bias", (4,))),
    buffers=(ParameterSpec("norm.running_mean", (3,)), ParameterSpec("places", (2,), constant=0.5)),
    aliases={"tail.weight": "body.weight"},
    unsaved=("places",),
    source="ab",
)
SEED = 3


def fitting(dtype=np.float32):
    draw = np.random.default_rng(0)
    shapes = {part.name: part.shape for part in (*SPEC.parameters, *SPEC.buffers)}
    return {name: draw.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def read(path, patterns=None):
    weights = read_initial_weights(path, patterns, SPEC, SEED)
    return {**weights.parameters, **weights.buffers}


def header(described, data=b""):
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.safetensors"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_types_become_float32(path, dtype):
    save_file(fitting(dtype), path)
    for name, value in read(path).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, fitting(dtype)[name].astype(np.float32))


@given(numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_bfloat16_is_the_upper_half_of_float32(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("bf16") / "w"
    words = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    arrays, described, position = {**fitting(), "places": words}, {}, 0
    for name, array in arrays.items():
        span = [position, position := position + array.nbytes]
        described[name] = {"dtype": "BF16" if name == "places" else "F32", "shape": list(array.shape), "data_offsets": span}
    path.write_bytes(header(described, b"".join(array.tobytes() for array in arrays.values())))
    np.testing.assert_array_equal(read(path)["places"], (words.astype(np.uint32) << 16).view(np.float32))


def test_file_is_recorded_with_the_digest_of_its_content(path):
    save_file(fitting(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    recorded = read_initial_weights(path, None, SPEC, SEED).file
    assert recorded == with_digest(path, digest)
    assert split_digest(recorded) == (path, digest)
    assert read(recorded).keys() == fitting().keys()
    path.write_bytes(save({**fitting(), "head.bias": np.zeros(4, np.float32)}))
    with pytest.raises(UsageError, match="has changed: its sha256 is"):
        read(recorded)


def test_path_is_absolute_in_a_job(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Job(initial_weights="w.pt").initial_weights == tmp_path / "w.pt"
    assert split_digest(Job(initial_weights=f"a/w.pt?sha256={'0' * 64}").initial_weights) == (tmp_path / "a/w.pt", "0" * 64)


def test_tied_weights_come_under_any_of_their_names(path):
    arrays = fitting()
    arrays["tail.weight"] = arrays.pop("body.weight")
    save_file(arrays, path)
    np.testing.assert_array_equal(read(path)["body.weight"], arrays["tail.weight"])
    save_file({**arrays, "body.weight": arrays["tail.weight"]}, path)
    np.testing.assert_array_equal(read(path)["body.weight"], arrays["tail.weight"])
    save_file({**arrays, "body.weight": arrays["tail.weight"] + 1}, path)
    with pytest.raises(UsageError, match=r"other values for .* than for 'body.weight', which are tied"):
        read(path)


def test_unsaved_buffers_and_counts_may_be_absent_or_present(path):
    arrays = {**fitting(), "norm.num_batches_tracked": np.array(7), "mask": np.array([True])}
    del arrays["places"]
    save_file(arrays, path)
    assert read(path)["places"].tolist() == [0.5, 0.5]


def test_excepted_names_begin_as_the_seed_has_them(path):
    arrays = {**fitting(), "head.weight": np.zeros((9, 9), np.float32), "old.weight": np.zeros(1, np.float32)}
    save_file(arrays, path)
    values = read(path, "head.*, old.*")
    np.testing.assert_array_equal(values["head.weight"], SPEC.initial(SEED)["head.weight"])
    np.testing.assert_array_equal(values["head.bias"], SPEC.initial(SEED)["head.bias"])
    np.testing.assert_array_equal(values["body.weight"], arrays["body.weight"])
    with pytest.raises(UsageError, match=r"initial_weights_except: 'heat\.\*' matches none of the names, such as"):
        read(path, "heat.*")


MISFITS = {
    "missing": (["head.bias", "body.weight"], {}, "2 missing (body.weight, head.bias)"),
    "unexpected": ([], {f"x{number}": np.zeros(1, np.float32) for number in range(5)}, "5 unexpected (x0, x1, x2, …)"),
    "shape": ([], {"head.bias": np.zeros(5, np.float32)}, "1 of another shape or type (head.bias: [5] instead of [4])"),
    "whole numbers": ([], {"head.bias": np.zeros(4, np.int8)}, "1 of another shape or type (head.bias: int8 instead of float32)"),
    "tied shape": ([], {"tail.weight": np.zeros(4, np.float32)}, "1 of another shape or type (tail.weight: [4] instead of [3, 2])"),
    "NaN": ([], {"head.bias": np.array([0, np.nan, 0, 0], np.float32)}, "'head.bias' in"),
    "too large": ([], {"head.bias": np.full(4, 1e300)}, "has values that are not finite as float32"),
    "escape": ([], {"\x1b[2J": np.zeros(1, np.float32)}, r"1 unexpected (\x1b[2J)"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_are_named(path, name):
    absent, more, expected = MISFITS[name]
    save_file({key: value for key, value in {**fitting(), **more}.items() if key not in absent}, path)
    with pytest.raises(UsageError) as refused:
        read(path)
    assert expected in str(refused.value)
    assert str(refused.value).startswith("initial_weights: ")
    assert "\n" not in str(refused.value)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HOSTILE = {
    "truncated": save(fitting())[:-1],
    "long header": struct.pack("<Q", 1 << 62) + b"{}",
    "nested": struct.pack("<Q", 100_001) + b"{" + b"[" * 100_000,
    "overlap": header({"a": ENTRY, "b": ENTRY}, bytes(4)),
    "huge shape": header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, bytes(4)),
    "many values": struct.pack("<Q", 1_200_000) + b"{" + b"[]," * 400_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_safetensors_file_is_refused(path, name):
    path.write_bytes(HOSTILE[name])
    with pytest.raises(UsageError, match=r"is no safetensors file \(.*\)\. Save it again"):
        read(path)


def test_special_and_missing_files_are_refused_without_waiting(path, tmp_path):
    for problem in ("cannot be read (No such file or directory)", "is a pipe, not a file"):
        with pytest.raises(UsageError) as refused:
            read(path)
        assert problem in str(refused.value)
        if not path.exists():
            os.mkfifo(path)
    with pytest.raises(UsageError, match="is a folder, not a file"):
        read(tmp_path)


def test_file_larger_than_the_model_explains_is_not_read(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=f"at most {max_file_bytes(SPEC):,} are read for own"):
        read(path)
