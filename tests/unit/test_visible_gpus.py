"""GPUs that a node's processes may use: CUDA_VISIBLE_DEVICES, read as CUDA reads it."""

import json
import os
import random
import subprocess
import sys

import pytest
from fake_gpus import WITHOUT_MIG, FakeGpu, build_library, environment
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.monitor.gpu import Gpu, VisibleGpu, visible_gpus

UUIDS = ["GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-1c0ffee1-beef", "GPU-77777777-7777"]
FOUR = [Gpu(uuid) for uuid in UUIDS]
CUT = [Gpu(UUIDS[0]), Gpu(UUIDS[1], ("MIG-aa01", "MIG-aa02", "MIG-bb03"))]


def seen(variable, gpus=FOUR, **more):
    return [gpu.visible_as for gpu in visible_gpus(gpus, variable, **more)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,1", ["2", "1"]),
        (" 3 , 0", ["3", "0"]),
        ("+1,007", ["1"]),
        ("1gpu2,2ampere", ["1", "2"]),
        ("0,2,-1,1", ["0", "2"]),
        ("0,9,1", ["0"]),
        ("0,,1", ["0"]),
        ("0,one,1", ["0"]),
        ("1,1", []),
        ("2,01,1", []),
        ("9,9,0", []),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("0," + "9" * 5000, ["0"]),
        ("GPU-8932f,GPU-1c0", [UUIDS[0], UUIDS[2]]),
        ("GPU-8932,GPU-1c0", []),
        ("GPU-1c0,GPU-nowhere,GPU-777", [UUIDS[2]]),
        ("GPU-1c0,GPU-1c0ff", []),
        ("GPU-1c0,0", [UUIDS[2]]),
        ("0,GPU-1c0", ["0"]),
        ("MIG-aa01", []),
    ],
)
def test_variable_limits_and_orders_gpus(variable, expected):
    assert seen(variable) == expected


def test_gpus_have_a_number_and_uuid():
    assert visible_gpus(FOUR, "2,0") == [VisibleGpu("2", UUIDS[2], 2), VisibleGpu("0", UUIDS[0], 0)]
    assert visible_gpus(FOUR, "GPU-777") == [VisibleGpu(UUIDS[3], UUIDS[3], 3)]


def test_other_order_than_pci_hides_the_device():
    assert visible_gpus(FOUR, "2", in_pci_order=False) == [VisibleGpu("2", None, None)]
    assert visible_gpus(FOUR, "GPU-777", in_pci_order=False) == [VisibleGpu(UUIDS[3], UUIDS[3], 3)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["0", "MIG-aa01", "MIG-aa02", "MIG-bb03"]),
        ("MIG-bb,MIG-aa01", ["MIG-bb03", "MIG-aa01"]),
        ("MIG-aa", []),
        ("MIG-aa02,GPU-1c0", ["MIG-aa02"]),
        (f"MIG-{UUIDS[1]}/1/0", [f"MIG-{UUIDS[1]}/1/0"]),
        ("MIG-GPU-nowhere/1/0", []),
        ("1", ["1"]),
    ],
)
def test_partitions_are_separate_devices(variable, expected):
    assert seen(variable, CUT) == expected


def test_number_of_gpus_suffices_without_a_driver():
    assert seen("1,0", [Gpu()] * 2) == ["1", "0"]
    assert seen("2,0", [Gpu()] * 2) == []
    assert seen("GPU-anything", [Gpu()] * 2) == ["GPU-anything"]
    assert seen("GPU-anything", []) == seen("MIG-anything", []) == seen(None, []) == []


ENTRIES = st.sampled_from(
    ["0", "1", "3", "4", "17", "-1", "", " 2", "x", "0x1", "GPU-", "GPU-8932", "GPU-8932f", *UUIDS, "MIG-aa01", "MIG-"]
)
VARIABLES = st.none() | st.lists(ENTRIES, max_size=6).map(",".join) | st.text(max_size=20)


@given(VARIABLES, st.integers(0, 4), st.booleans())
def test_visible_gpus_exist_and_are_unique(variable, count, in_pci_order):
    gpus = [*FOUR[: max(0, count - 1)], Gpu("GPU-c0ffee", CUT[1].partitions)][:count]
    visible = visible_gpus(gpus, variable, in_pci_order=in_pci_order)
    devices = [gpu.uuid or gpu.visible_as for gpu in visible]
    assert len(set(devices)) == len(devices)
    for gpu in visible:
        assert visible_gpus(gpus, gpu.visible_as, in_pci_order=in_pci_order) == [gpu]  # so a task restricted to it sees it
        assert gpu.gpu is None or gpu.uuid in (gpus[gpu.gpu].uuid, *gpus[gpu.gpu].partitions)
    if variable is not None and visible:
        assert len(visible) <= variable.count(",") + 1


TORCH = """
import json, os, sys
import torch
counts = []
for variable in json.load(sys.stdin):
    os.environ["CUDA_VISIBLE_DEVICES"] = variable
    counts.append(torch.cuda._device_count_nvml())
print(json.dumps(counts))
"""


@pytest.mark.thorough
def test_torch_counts_the_same_gpus(tmp_path):
    """torch reads the variable without CUDA too, in the way observed in CUDA."""
    library = build_library(tmp_path)
    chance = random.Random(20261125)
    entries = [
        "0",
        "1",
        "2",
        "3",
        "4",
        "17",
        "-1",
        "",
        " 2",
        "1 ",
        "+3",
        "01",
        "2b",
        "x",
        "GPU-",
        "GPU-8932",
        "GPU-8932f",
        "GPU-1c",
        *UUIDS,
    ]
    variables = [",".join(chance.choices(entries, k=chance.randint(1, 4))) for _ in range(1500)]
    variables += [",".join(chance.choices([*UUIDS, "GPU-1c", "GPU-777", "GPU-89", "0"], k=chance.randint(1, 4))) for _ in range(500)]
    feigned = environment(library, tmp_path / "gpus", [FakeGpu(uuid, WITHOUT_MIG) for uuid in UUIDS])
    done = subprocess.run(
        [sys.executable, "-c", TORCH],
        input=json.dumps(variables),
        env={**os.environ, **feigned},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [len(visible_gpus(FOUR, variable)) for variable in variables]
    assert dict(zip(variables, ours, strict=True)) == dict(zip(variables, json.loads(done.stdout), strict=True))
    assert set(ours) == {0, 1, 2, 3, 4}
