"""Each backend works where the other framework is not installed."""

from __future__ import annotations

import json
import subprocess

import pytest

ABSENT = {
    "tf": ["torch", "functorch", "lightning", "pytorch_lightning", "accelerate"],
    "torch": ["tensorflow", "keras", "tf_keras"],
}
"""For each backend: prefixes of the packages missing in its environment."""

OTHER = {"tf": "torch", "torch": "tf"}


@pytest.fixture(scope="module", params=["tf", "torch"])
def single_backend(request, tmp_path_factory, make_environment):
    """Return a backend's name, and the command line in an environment with only its framework."""
    folder = tmp_path_factory.mktemp(f"{request.param}-alone")
    python = make_environment(folder / "env", ABSENT[request.param])

    def trainer(*arguments, timeout=200):
        command = [str(python), "-m", "crosstrain.cli.main", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)

    return request.param, trainer


@pytest.mark.thorough
def test_backends_lists_one_and_installation_of_other(single_backend):
    backend, trainer = single_backend
    done = trainer("backends", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    missing = OTHER[backend]
    assert rows[backend]["problem"] is None, rows
    assert rows[backend]["version"]
    assert "cpu" in rows[backend]["devices"]
    assert rows[missing]["version"] is None
    assert "is not installed" in rows[missing]["problem"]
    assert rows[missing]["hint"] == f"pip install 'crosstrain[{missing}]'"


@pytest.mark.quick_cases("torch")
def test_auto_takes_installed_backend(single_backend):
    backend, trainer = single_backend
    done = trainer("run", "--print-config", "--json")
    assert json.loads(done.stdout)["backend"]["value"] == backend


@pytest.mark.quick_cases("torch")
def test_missing_backend_names_installation(single_backend):
    backend, trainer = single_backend
    done = trainer("run", "--backend", OTHER[backend])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: backend '{OTHER[backend]}' needs the package ")
    assert f"pip install 'crosstrain[{OTHER[backend]}]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_run_succeeds(single_backend):
    _, trainer = single_backend
    done = trainer("run", "--steps", "20", "--eval-every", "end", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["backend"], summary["updates_applied"]) == ("succeeded", single_backend[0], 20)
