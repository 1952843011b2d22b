"""Description of the machine that was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from crosstrain.monitor.host import describe_host

PACKAGES = ("crosstrain", "tensorflow", "keras", "torch", "torchvision", "lightning", "accelerate", "transformers", "ctranslate2", "numpy")
BUSY_LOAD = 0.5
"""With more runnable processes before the first run, other programs use the machine."""


def describe(network: str, threads: int | None) -> dict[str, Any]:
    """Return the machine, the versions and the network of the runs of three nodes."""
    host = describe_host({})
    facts = {key: host[key] for key in ("cpu_model", "cores_available", "memory_total_bytes", "kernel", "python")}
    return {
        **facts,
        "versions": {name: _version(name) for name in PACKAGES},
        "network": network,
        "threads": threads,
        "gpu": _gpu(),
        "load_before": os.getloadavg()[0],
    }


def _gpu() -> str | None:
    """Return the name of the first GPU that torch finds. Asked in a process of its own."""
    question = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def sentence(machine: dict[str, Any]) -> str:
    """Return the first lines of the report."""
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine["versions"].items())
    network = {"isolated": "virtual nodes (namespaces joined by a bridge), both sides", "host": "loopback, both sides"}[machine["network"]]
    threads = "as many a task as trainer chooses, the same for its peers" if machine["threads"] is None else f"{machine['threads']} a task"
    device = f"CPU, and in the rows of group gpu {machine['gpu']}" if machine["gpu"] else "CPU only"
    memory = machine["memory_total_bytes"] / 2**30
    lines = [
        f"machine: {machine['cores_available']:g} cores, {machine['cpu_model']}, {memory:.0f} GiB, Linux {machine['kernel']}",
        f"versions: Python {machine['python']}, {versions}",
        f"network of three nodes: {network}; {device}; threads: {threads}",
    ]
    if machine["load_before"] > BUSY_LOAD:
        lines.append(f"WARNING: load {machine['load_before']:.1f} before the first run: others use this machine, so figures are unreliable")
    return "\n".join(lines)
