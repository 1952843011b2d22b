"""The doctor reports problems and remedies, on a machine of real files and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from crosstrain.backends.base import Availability
from crosstrain.cli.group import invoke
from crosstrain.launch.launchers.machine_checks import backend_check, disk_check, gpu_checks, processor_check, virtual_node_checks
from crosstrain.launch.virtual.namespaces import MissingCapabilityError
from crosstrain.launch.virtual.network import Possibility
from crosstrain.monitor.gpu import GpuHardware, nvidia_hardware

TF = Availability("tf", "2.21.0", ("cpu",))
TORCH = Availability("torch", "2.15.0", ("cpu", "gpu:0 NVIDIA H200"))


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes a root folder with PCI devices (vendor, class) and a driver."""

    def make(devices, nodes=0, driver=False):
        for index, (vendor, kind) in enumerate(devices):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        (tmp_path / "dev").mkdir()
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{node}" for node in range(nodes))]:
            (tmp_path / "dev" / name).touch()
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").touch()
        return nvidia_hardware(tmp_path)

    return make


def test_hardware_counts_nvidia_gpus_and_device_files(machine):
    hardware = machine(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x1002", "0x030000")], nodes=1, driver=True
    )
    assert hardware == GpuHardware(on_bus=2, device_nodes=1, driver_loaded=True)


def test_gpu_without_driver_or_device_files_has_remedy():
    (check,) = gpu_checks(GpuHardware(1, 0, driver_loaded=False), [TF], None)
    assert (check.state, check.remedy) == ("lack", "install the NVIDIA driver")
    (check,) = gpu_checks(GpuHardware(1, 0, driver_loaded=True), [TF], None)
    assert (check.state, check.remedy) == ("lack", "give the container its devices (docker run --gpus all)")


def test_framework_that_sees_no_gpu_is_named_with_remedy(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    absent = Availability("jax", None, problem="the package jax is not installed")
    present, lacking = gpu_checks(GpuHardware(1, 1, driver_loaded=True), [TF, TORCH, absent], None)
    assert present.state == "ok"
    assert (lacking.name, lacking.found, lacking.remedy) == ("gpu for tf", "sees 0 of 1", "pip install 'tensorflow[and-cuda]'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, lacking = gpu_checks(GpuHardware(1, 1, driver_loaded=True), [TF, TORCH], None)
    assert lacking.remedy.startswith("CUDA_VISIBLE_DEVICES is '': unset it")


def test_backend_without_gpu_support_needs_none(monkeypatch, repository):
    monkeypatch.syspath_prepend(str(repository / "tests/toy"))
    (check,) = gpu_checks(GpuHardware(1, 1, driver_loaded=True), [Availability("toy", "2.0", ("cpu",))], None)
    assert check.state == "ok"


def test_machine_without_gpu_is_ok():
    (check,) = gpu_checks(GpuHardware(0, 0, driver_loaded=False), [TF, TORCH], None)
    assert check.state == "ok"


def test_missing_backend_names_installation():
    check = backend_check(Availability("tf", None, problem="the package tensorflow is not installed", hint="pip install 'crosstrain[tf]'"))
    assert (check.state, check.remedy) == ("lack", "pip install 'crosstrain[tf]'")


def test_limited_cores_are_named_with_their_cause():
    host = {"cores_available": 0.5, "cores_logical": 8, "cores_affinity": 4, "cores_quota": 0.5, "cpu_model": "X"}
    check = processor_check(host)
    assert (check.state, check.found) == ("lack", "0.5 of 8 cores usable (affinity 4, cgroup quota 0.5), X")
    free = {"cores_available": 8.0, "cores_logical": 8, "cores_affinity": 8, "cores_quota": None, "cpu_model": None}
    assert processor_check(free).state == "ok"


def test_virtual_nodes_with_and_without_their_limits():
    whole = Possibility(True, {})
    assert [check.state for check in virtual_node_checks(whole)] == ["ok", "ok", "ok"]
    partly = Possibility(False, {"cpu_quota": MissingCapabilityError("cpu_quota", "No writable CPU group", "Get one.")})
    assert [(check.state, check.remedy) for check in virtual_node_checks(partly)][1:] == [
        ("ok", None),
        ("lack", "No writable CPU group. Get one."),
    ]
    none = Possibility(False, {"namespaces": MissingCapabilityError("namespaces", "not allowed", "Use --network host.")})
    assert [(check.state, check.remedy) for check in virtual_node_checks(none)] == [("lack", "Use --network host.")]


def test_free_space_is_measured_at_nearest_existing_folder(tmp_path):
    assert disk_check("runs", tmp_path / "not" / "yet").state == "ok"
    blocked = tmp_path / "file"
    blocked.touch()
    check = disk_check("runs", blocked / "runs")
    assert (check.state, check.found) == ("lack", f"{blocked} cannot be written")


@pytest.mark.thorough
def test_doctor_reports_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("TRAINER_")},
    )
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    can_train = any(check["state"] == "ok" for name, check in checks.items() if name.startswith("backend "))
    assert (report["can_train"], done.returncode) == (can_train, 0 if can_train else 1)
    assert {"backend tf", "backend torch", "processor", "memory", "virtual nodes", "run directories", "prepared data"} <= set(checks)
    assert all(check["remedy"] for check in checks.values() if check["state"] == "lack")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shh", "--launcher: got 'shh'; allowed: auto, rendezvous, local, ssh, slurm, ray. Did you mean 'ssh'?"),
        ("local", "--launcher: got 'local', which starts nothing on other hosts; leave it out to have this machine checked"),
    ],
)
def test_unknown_launcher_or_one_without_hosts_is_refused(capsys, name, message):
    assert invoke(["doctor", "--launcher", name]) == 2
    assert message in capsys.readouterr().err
