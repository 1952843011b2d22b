"""Checkpoints with right digests but wrong contents are refused, and the mistake is named."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import time

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_tools import BUFFERS, PARAMETERS, arrays, meta, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from crosstrain.checkpoint import DamagedCheckpointError, newest_sound, read_checkpoint
from crosstrain.checkpoint.files import digest_of, map_arrays, read_manifest, write_manifest
from crosstrain.checkpoint.reader import model_problem
from crosstrain.models.base import ModelSpec, ParameterSpec


def other_arrays(draw, values):
    """Remove, add or change one array; return the arrays and its name."""
    key = draw.choice(sorted(values))
    change = draw.choice(["missing", "shape", "transposed", "type", "stranger"])
    changed = dict(values)
    if change == "missing":
        del changed[key]
    elif change == "shape":
        changed[key] = np.zeros((*values[key].shape, 2), np.float32)
    elif change == "transposed":
        key = "parameters/dense.weight"
        changed[key] = np.ascontiguousarray(values[key].T)
    elif change == "type":
        changed[key] = values[key].astype(draw.choice(["<f8", "<f2", "<i4"]))
    else:
        key = f"{key}.more"
        changed[key] = np.zeros(3, np.float32)
    return changed, key.removeprefix("slots/") if key.startswith("slots/") else key.partition("/")[2]


def test_changed_array_is_named(tmp_path, seed):
    draw = random.Random(seed)
    for number in range(60):
        values, name = other_arrays(draw, arrays(number))
        path = save(tmp_path / str(number), values=values, model=meta().model)
        with pytest.raises(DamagedCheckpointError, match=re.escape(repr(name))) as caught:
            read_checkpoint(path)
        assert caught.value.file.endswith(".safetensors")


def test_previous_checkpoint_is_used(tmp_path):
    save(tmp_path, 100)
    values = arrays(200)
    del values["parameters/dense.bias"]
    save(tmp_path, 200, values, model=meta().model)
    checkpoint, (error,) = newest_sound(tmp_path)
    assert checkpoint.meta.step == 100
    assert "is missing 'dense.bias', which checkpoint.json has with the shape (10,)" in str(error)


def test_many_slot_kinds_take_no_time(tmp_path):
    values = {f"parameters/p{n}": np.zeros(1, np.float32) for n in range(2000)}
    values |= {f"slots/s{n}/p0": np.zeros(1, np.float32) for n in range(2000)}
    path = save(tmp_path, values=values)
    began = time.monotonic()
    with pytest.raises(DamagedCheckpointError, match=r"optimizer.safetensors is missing 's0/p1'"):
        read_checkpoint(path)
    assert time.monotonic() - began < 5


def test_array_that_is_described_twice(tmp_path):
    model = {**meta().model, "buffers": [["dense.bias", [10]]]}
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json model: names an array twice"):
        read_checkpoint(save(tmp_path, model=model))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("beam", 10**9, "is 1000000000; allowed: a whole number of at least 1 and at most 64"),
        ("beam", 0, "is 0; allowed"),
        ("beam", "x", "is 'x'; allowed"),
        ("beam", True, "is True; allowed"),
        ("length_penalty", -1e300, "is -1e+300; allowed: a number of at least 0 and at most 10"),
        ("length_penalty", [], "is []; allowed"),
        ("precision", "fp8", "is 'fp8'; allowed: fp32, bf16, fp16"),
        ("seed", -1, "is -1; allowed"),
    ],
)
def test_impossible_job_is_refused(tmp_path, field, value, words):
    path = save(tmp_path, job={**meta().job, field: value})
    with pytest.raises(DamagedCheckpointError, match=re.escape(f"checkpoint.json job.{field}: {words}")):
        read_checkpoint(path)


def test_valid_job_is_read(tmp_path):
    job = {**meta().job, "beam": 64, "length_penalty": 1, "precision": "bf16", "device": "cpu"}
    assert read_checkpoint(save(tmp_path, job=job)).meta.job == job


@pytest.mark.parametrize(
    ("parameters", "buffers", "words"),
    [
        ({**PARAMETERS}, {**BUFFERS}, None),
        ({**PARAMETERS, "dense.bias": (11,)}, {**BUFFERS}, "parameter dense.bias has shape (11,) in the model and (10,) in the checkpoint"),
        ({**PARAMETERS, "more": (2,)}, {**BUFFERS}, "parameter more has shape (2,) in the model and none in the checkpoint"),
        ({**PARAMETERS}, {}, "buffer norm.running_mean has shape none in the model and (10,) in the checkpoint"),
        ({**PARAMETERS}, {"norm.running_mean": (3,)}, "buffer norm.running_mean has shape (3,) in the model"),
    ],
)
def test_resume_requires_model_with_same_arrays(parameters, buffers, words):
    specs = [tuple(ParameterSpec(name, shape) for name, shape in shapes.items()) for shapes in (parameters, buffers)]
    problems = model_problem(ModelSpec("logreg", specs[0], buffers=specs[1]), meta())
    assert problems == [] if words is None else words in problems[0]


# Files of arrays that differ from their header -----------------------------------------------------------------

ITEM_BYTES = {"F32": 4, "F64": 8, "U8": 1, "BOOL": 1, "I16": 2}

NUMBERS = st.integers(-2, 40) | st.sampled_from([2**31, 2**53, 2**63, 2**64 - 1]) | st.just("1") | st.just(1.0) | st.none() | st.booleans()


@st.composite
def array_files(draw):
    """Draw a file of arrays, valid or wrong in up to two places: (header text, values)."""
    known = st.tuples(st.sampled_from("abcd"), st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 3), max_size=3))
    pairs, position = [], 0
    for name, dtype, shape in draw(st.lists(known, min_size=1, max_size=4, unique_by=lambda item: item[0])):
        size = ITEM_BYTES[dtype] * math.prod(shape)
        pairs.append([name, {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}])
        position += size
    for _ in range(draw(st.integers(0, 2))):
        change, pair = draw(st.sampled_from(["name", "dtype", "shape", "offset", "order", "size", "number"])), draw(st.sampled_from(pairs))
        entry = pair[1]
        if change == "name":
            pair[0] = draw(st.sampled_from([*"abcd", "__metadata__"]))
        elif change == "dtype":
            entry["dtype"] = draw(st.sampled_from([*ITEM_BYTES, "BF16", "f4", None]))
        elif change == "shape":
            entry["shape"] = draw(st.lists(NUMBERS, max_size=3) | NUMBERS)
        elif change == "offset":
            entry["data_offsets"] = [*entry["data_offsets"], 0, 0][:2]  # an earlier change may have removed one
            entry["data_offsets"][draw(st.integers(0, 1))] = draw(NUMBERS)
        elif change == "number":
            entry["data_offsets"] = draw(st.lists(NUMBERS, max_size=3))
        elif change == "order":
            pairs = draw(st.permutations(pairs))
        else:
            position = max(0, position + draw(st.integers(-4, 4)))
    text = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in pairs)
    return f"{{{text}}}", bytes(number % 251 for number in range(position))


def refuse_repeated(pairs):
    """Return an object. Raises ValueError for a repeated key."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("repeated")
    return dict(pairs)


@pytest.fixture(scope="module")
def array_file(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays") / "a.safetensors"


@pytest.mark.thorough
@settings(max_examples=500, deadline=None)
@given(array_files())
def test_array_file_is_read_as_by_library_or_refused(array_file, made):
    """The library takes the last of two arrays of one name, which its format does not allow."""
    text, values = made
    content = struct.pack("<Q", len(text)) + text.encode() + values
    array_file.write_bytes(content)
    try:
        json.loads(text, object_pairs_hook=refuse_repeated)
        expected = safetensors.numpy.load(content)
    except (SafetensorError, ValueError, KeyError, TypeError):  # of a shape or a type that numpy does not have
        with pytest.raises(ValueError, match=r"^is no safetensors file \("):
            map_arrays(array_file)
        return
    loaded = map_arrays(array_file)
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert (loaded[name].dtype, loaded[name].shape, loaded[name].tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            "the array before it",
        ),
        (
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "the key 'a' twice",
        ),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}', "a.shape.0: input should be greater than or equal to 0"),
        (f'{{"a":{{"dtype":"F32","shape":[{",".join(["9"] * 400_000)}],"data_offsets":[0,8]}}}}', "a.shape: list should have at most 64"),
    ],
)
def test_checkpoint_with_invalid_file_is_refused_immediately(tmp_path, header, words):
    path = save(tmp_path)
    file = path / "parameters.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    write_manifest(path, {**read_manifest(path), file.name: digest_of(file)})
    began = time.monotonic()
    with pytest.raises(DamagedCheckpointError, match=re.escape(words)) as caught:
        read_checkpoint(path)
    assert "parameters.safetensors is no safetensors file" in str(caught.value)
    assert time.monotonic() - began < 5
