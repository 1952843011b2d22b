"""GPU data from nvidia-ml-py with a fake library, and from device files without it."""

import json
import os
import subprocess
import sys

import pytest
from fake_gpus import H100_MIB, WITHOUT_MIG, FakeGpu, build_library, environment

from crosstrain.monitor.gpu import describe_gpus

ASKED = """
import json, os, sys
from crosstrain.monitor.gpu import GpuProbe, describe_gpus
probe = GpuProbe({"worker-3": 1})
print(json.dumps([describe_gpus(os.environ), probe.read(), probe.problem]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("nvidia"))


def describe_in_process(variables):
    done = subprocess.run([sys.executable, "-c", ASKED], env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_devices_are_described_with_partitions(library, tmp_path):
    gpus = [
        FakeGpu("GPU-a", WITHOUT_MIG, 24_564),
        FakeGpu("GPU-b", used_mib=512, utilization_percent=40),
        FakeGpu("GPU-c", partitions=["MIG-1", "MIG-2"]),
    ]
    described, read, problem = describe_in_process(environment(library, tmp_path / "gpus", gpus, CUDA_VISIBLE_DEVICES="MIG-2"))
    assert described["gpus"][0] == {"name": WITHOUT_MIG, "memory_total_bytes": 24_564 << 20, "uuid": "GPU-a"}
    assert described["visible_gpus"] == [{"visible_as": "MIG-2", "uuid": "MIG-2", "gpu": 2}]
    assert (described["gpu_driver"], described["gpu_problem"]) == ("580.65.06", None)
    figures = {
        "utilization": 0.4,
        "memory_bytes": 512 << 20,
        "memory_total_bytes": H100_MIB << 20,
        "power_watts": 70.0,
        "tasks": ["worker-3"],
    }
    assert read[1] == {"name": gpus[1].name, **figures}
    assert (read[2]["utilization"], read[2]["tasks"]) == (None, [])
    assert problem == "nvmlDeviceGetUtilizationRates: Not Supported"


def test_library_without_driver_is_no_problem(library, tmp_path):
    variables = environment(library, tmp_path / "gpus", [], FAKE_NVIDIA_ML=str(tmp_path / "nowhere"))
    assert describe_in_process(variables) == [{"gpus": None, "gpu_driver": None, "gpu_problem": None, "visible_gpus": []}, None, None]


def test_device_files_are_counted_without_library(tmp_path):
    (tmp_path / "dev/dri").mkdir(parents=True)
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU of its own")
    assert describe_gpus({}, tmp_path)["visible_gpus"] == []
    (tmp_path / "dev/dri/renderD128").touch()
    assert describe_gpus({}, tmp_path)["visible_gpus"] is None  # another vendor's: only its framework knows
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    device_files = [{"visible_as": number, "uuid": None, "gpu": int(number)} for number in ("0", "1")]
    assert describe_gpus({}, tmp_path)["visible_gpus"] == device_files
    assert describe_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path)["visible_gpus"] == device_files[1:]
    other_order = describe_gpus({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, tmp_path)
    assert other_order["visible_gpus"] == [{"visible_as": "1", "uuid": None, "gpu": None}]
