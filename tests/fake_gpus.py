"""Simulated GPUs: a stand-in for the driver's library, which answers from a file.

Everything above the library is the real thing: nvidia-ml-py, and whatever asks it. Nothing can compute on such GPUs.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nvidia/nvml.c"
H100, WITHOUT_MIG = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
H100_MIB = 81_559


@dataclass
class FakeGpu:
    """A GPU; `partitions` are the UUIDs of its MIG devices."""

    uuid: str
    name: str = H100
    total_mib: int = H100_MIB
    used_mib: int = 0
    utilization_percent: int = 0
    milliwatts: int = 70_000
    partitions: list[str] = field(default_factory=list)

    def line(self) -> str:
        figures = (self.total_mib, self.used_mib, self.utilization_percent, self.milliwatts)
        return "\t".join([self.name, self.uuid, *map(str, figures), *self.partitions])


def build_library(folder: Path) -> Path:
    """Compile the stand-in into `folder`, which is returned; skips the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: GPUs cannot be feigned")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU of its own")
    pytest.importorskip("pynvml")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-std=gnu99", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def environment(library: Path, answers: Path, gpus: list[FakeGpu], **more: str) -> dict[str, str]:
    """Return the variables that select these GPUs, with answers in the file `answers`."""
    answers.write_text("".join(f"{gpu.line()}\n" for gpu in gpus))
    folders = os.pathsep.join(filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH", "")]))
    return {"LD_LIBRARY_PATH": folders, "FAKE_NVIDIA_ML": str(answers), **more}
