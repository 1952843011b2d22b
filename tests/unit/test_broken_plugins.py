"""A broken third-party plug-in is one named error and hides no other.

The exit code is 2, or 1 once a run has started.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

import pytest
from pydantic import ValidationError

from crosstrain.conformance.runs import trainer
from crosstrain.core import plugins
from crosstrain.core.job import Job

BROKEN = """
from crosstrain.backends.base import Availability
from crosstrain.backends.capabilities import Capabilities
from crosstrain.launch.launchers.registry import LauncherPlugin

class Source:
    name, description, version = "source", "", 1
    def load(self, data_dir): ...

class Raises(Source):
    @property
    def version(self):
        raise KeyError("no version")

class Backend:
    name, capabilities = "backend", Capabilities()
    def probe(self): return Availability("backend", "1", ("cpu",))
    def placement(self, job): raise LookupError("no place")
    def preload(self, job): ...
    def open(self, *arguments): ...

class RaisingBackend(Backend):
    @property
    def capabilities(self):
        raise KeyError("no capabilities")

def declares(**fields):
    return type("Declares", (Backend,), {"capabilities": Capabilities(**fields)})()

def launcher(run): ...
def raises(environment): raise LookupError("no allocation")

NOTHING, TEXT_VERSION, RAISING_SOURCE = None, type("Text", (Source,), {"version": "1"})(), Raises()
PLACES, RAISING_BACKEND, MODES, PACKAGES = Backend(), RaisingBackend(), declares(modes=5), declares(packages=7)
TAKES, ALLOCATION = LauncherPlugin(launcher, takes=3), LauncherPlugin(launcher, allocation=7)
ALLOCATES, ALLOCATES_TEXT = LauncherPlugin(launcher, allocation=raises), LauncherPlugin(launcher, allocation=lambda environment: "node1")
"""
NAMES = {
    "backend": ("nothing", "raising-backend", "modes", "packages", "places"),
    "dataset": ("nothing", "text-version", "raising-source"),
    "launcher": ("takes", "allocation", "allocates", "allocates-text"),
    "model": ("nothing",),
}
OPTIONS = {"backend": "--backend", "dataset": "--data", "launcher": "--launcher", "model": "--model"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Create a distribution of broken plug-ins, with one of each kind that ends the process."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "broken_plugins.py").write_text(BROKEN)
    (folder / "ends_process.py").write_text("import sys\nsys.exit(0)\n")
    info = folder / "broken_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugins\nVersion: 1.0\n")
    rows = []
    for kind, names in NAMES.items():
        rows += [f"[crosstrain.{kind}s]", "exits = ends_process:PLUGIN"]
        rows += [f"{name} = broken_plugins:{name.upper().replace('-', '_')}" for name in names]
    forwards = [f"logreg/{name} = broken_plugins" for name in ("exits", *NAMES["backend"])]
    forwards += [f"{name}/torch = broken_plugins" for name in ("exits", *NAMES["model"])]
    (info / "entry_points.txt").write_text("\n".join([*rows, "[crosstrain.forwards]", *forwards, ""]))
    return folder


@pytest.fixture(autouse=True)
def _installed(site, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in ("exits", *names)])
def test_broken_plugin_is_named(kind, name, tmp_path):
    chosen = {"--backend": "torch", OPTIONS[kind]: name}
    done = trainer("run", *(text for pair in chosen.items() for text in pair), "--nodes", "2", "--steps", "1", "--out", str(tmp_path))
    assert done.returncode == (1 if name == "places" else 2), done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    assert repr(name) in done.stderr
    assert "broken_plugins" in done.stderr or "ends_process" in done.stderr


def test_broken_plugin_hides_no_other():
    listed = {row["name"]: row["problem"] for row in json.loads(trainer("data", "list", "--json").stdout)["datasets"]}
    assert listed["digits"] is None
    assert {name for name, problem in listed.items() if problem} == {"exits", *NAMES["dataset"]}
    models = {row["name"]: row["problem"] for row in json.loads(trainer("models", "--json").stdout)}
    assert {name for name, problem in models.items() if problem and "not for" not in problem} >= {"exits", "nothing"}
    assert models["logreg"] is None
    backends = trainer("backends", "--fresh", "--json")
    assert backends.returncode == 0, backends.stderr
    problems = {row["name"]: row["problem"] for row in json.loads(backends.stdout)}
    assert {name for name, problem in problems.items() if problem} >= {"exits", "nothing", "raising-backend", "modes", "packages"}
    assert problems["torch"] is None


def test_own_error_is_not_blamed_on_model_named_by_path():
    model = plugins.find("model", "crosstrain.models.logreg")
    build = plugins.load(model, "model")
    with pytest.raises(AttributeError) as caught:
        build(None)
    assert plugins.plugin_problem(caught.value) is None


CONTAINERS = ({}, {"a": {"b": [1]}}, [], [[]], [None], [{"a": 1}], [True], "", "x" * 100_000, True, 10**400, -1)


@pytest.mark.parametrize("field", Job.model_fields)
def test_forged_value_of_any_field_is_one_error(field):
    for value in CONTAINERS:
        with suppress(ValidationError):
            Job.model_validate({field: value})
