"""Runs with busy programs are starved; those that share only their nodes' cores are not."""

import contextlib
import json
import os
import subprocess
import sys

import psutil
import pytest

from crosstrain.conformance.runs import run_job, trainer

MAX_OTHERS = 0.1
"""Fraction of all cores: with more in use, a run is not alone."""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="waits for cores are counted by Linux"),
]

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"
LOGREG = {"backend": "torch", "data": "glyphs28", "eval_every": "end", "tensorboard": False}
TOY = {**LOGREG, "backend": "toy"}
"""Equal work a step, without the import of a framework by busy machines or on part of a core."""


@contextlib.contextmanager
def busy_loops(count):
    """Start busy programs in another session."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def verdict(run):
    explained = json.loads(trainer("explain", str(run.path), "--json").stdout)
    return explained["verdict"], explained["advice"]


@pytest.mark.slow
def test_run_with_busy_programs_is_starved_and_not_compared(tmp_path):
    with busy_loops(2 * (os.cpu_count() or 1)):
        starved = run_job(tmp_path, name="starved", steps=12000, **TOY)
    (node,) = starved.summary["per_node"]
    assert node["starved_fraction"] > 0.4
    assert node["foreign_cpu_cores_used"] > 0.4 * node["cores_available"]
    assert node["cpu_wait_seconds"] > 0.4 * starved.summary["run_seconds"]
    assert verdict(starved) == ("starved", [])
    short = run_job(tmp_path, name="short", steps=100, **TOY)
    compared = json.loads(trainer("compare", str(starved.path), str(short.path), "--json").stdout)
    faults = {fault["setting"]: fault["values"] for fault in compared["comparability"]["differences"]}
    assert faults["starved"] == [f"{node['starved_fraction']:.0%}", None]
    assert [entry["run"] for entry in compared["conclusion"]["left_out"]] == ["starved"]
    assert compared["conclusion"]["best"] == []
    assert all(axis["best"] is None for axis in compared["conclusion"]["axes"])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"steps": 40000, **LOGREG}, marks=pytest.mark.slow),
        pytest.param({"nodes": 3, "steps": 800, **LOGREG}, marks=pytest.mark.slow),
        pytest.param({"nodes": 2, "cores_per_node": 0.4, "steps": 400, **LOGREG}, marks=pytest.mark.slow),
        pytest.param({"nodes": 2, "cores_per_node": 0.4, "steps": 2500, **TOY}, marks=pytest.mark.slow),
    ],
)
def test_run_waiting_for_tasks_or_cpu_limit_is_not_starved(tmp_path, shape):
    load = psutil.cpu_percent(interval=1.0) / 100
    if load > MAX_OTHERS:
        pytest.skip(f"other programs use {load:.0%} of the processor")
    run = run_job(tmp_path, **shape)
    known = [node["starved_fraction"] for node in run.summary["per_node"]]
    assert all(fraction is None or fraction < 0.15 for fraction in known), known
    assert verdict(run)[0] != "starved"
