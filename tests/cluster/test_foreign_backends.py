"""Third-party backends with a present, missing or broken framework, and their records."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

from crosstrain.conformance.runs import run_job, trainer
from crosstrain.core.plugins import find
from crosstrain.report.compare.factor_values import framework
from crosstrain.report.runs.run import Run

TOY = Path(__file__).parent.parent / "toy"

PLUGIN = """
from crosstrain.backends.capabilities import Capabilities
from crosstrain_toy import ToyBackend


class Sound(ToyBackend):
    name = "sound"
    capabilities = Capabilities(packages={"click": ["no-such-distribution", "click"], "numpy": ["numpy"]})


class Absent(ToyBackend):
    name = "absent"
    capabilities = Capabilities(packages={"no_such_framework": ["no-such-framework"]}, install="pip install no-such-framework")


class Frail(ToyBackend):
    name = "frail"
    capabilities = Capabilities(packages={"frail_framework": ["frail"]}, install="pip install frail")

    def preload(self, job):
        import frail_framework


SOUND, ABSENT, FRAIL = Sound(), Absent(), Frail()
"""

NAMES = ("sound", "absent", "frail")


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    """Install the backends, and one with a missing framework, for this process and children."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "others.py").write_text(PLUGIN)
    (folder / "careless.py").write_text("import no_such_framework\n")
    (folder / "frail_framework.py").write_text("raise ImportError('libfrail.so.1: cannot open shared object file')\n")
    info = folder / "others_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-backends\nVersion: 1.0\n")
    backends = [f"{name} = others:{name.upper()}\n" for name in NAMES]
    forwards = [f"logreg/{name} = crosstrain_toy.logreg\n" for name in (*NAMES, "careless")]
    rows = ["[crosstrain.backends]\n", *backends, "careless = careless:BACKEND\n", "[crosstrain.forwards]\n", *forwards]
    (info / "entry_points.txt").write_text("".join(rows))
    path = [str(folder), str(TOY)]
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.quick_cases("absent-message0")
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "absent",
            "backend 'absent' needs the package 'no_such_framework', which is not installed."
            " Install it with: pip install no-such-framework",
        ),
        (
            "frail",
            "backend 'frail' cannot import what it needs: ImportError: libfrail.so.1: cannot open shared object file."
            " Install it with: pip install frail",
        ),
        (
            "careless",
            "backend 'careless' could not be loaded from 'careless:BACKEND': ModuleNotFoundError: No module named 'no_such_framework'."
            " It comes with the package 'others-backends', whose documentation says what else it needs.",
        ),
    ],
)
def test_backend_without_framework_reports_how_to_install_it(backend, message, tmp_path):
    done = trainer("run", "--backend", backend, "--out", str(tmp_path / "runs"), "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == f"error: {message}"
    assert list((tmp_path / "runs").glob("*")) == []


@pytest.mark.thorough
def test_backends_list_shows_how_to_install_each():
    done = trainer("backends", "--json")
    backends = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert (backends["absent"]["problem"], backends["absent"]["hint"]) == (
        "the package no_such_framework is not installed",
        "pip install no-such-framework",
    )
    assert backends["sound"]["problem"] is None
    assert "ModuleNotFoundError" in backends["careless"]["problem"]


@pytest.mark.thorough
@pytest.mark.cluster
def test_run_records_versions_of_packages_declared_by_backend(tmp_path):
    run = run_job(tmp_path, backend="sound", steps=1, tensorboard=False)
    (node,) = json.loads((run.path / "env.json").read_text())["nodes"]
    releases = {name: importlib.metadata.version(name) for name in ("click", "numpy")}
    assert {name: node["packages"][name] for name in releases} == releases
    assert {"crosstrain", find("backend", "tf").requires, find("backend", "torch").requires} <= set(node["packages"])
    assert json.loads((run.path / "job.json").read_text())["framework_packages"] == ["click", "numpy"]
    assert framework(Run(run.path)) == (f"click {releases['click']}, numpy {releases['numpy']}",)
