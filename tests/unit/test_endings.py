"""Interpretation of a remote command's end: problems of the host, and remedies."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from crosstrain.launch.launchers.host_list import remote_python
from crosstrain.launch.launchers.ssh import end_elsewhere


def run_to_end(command):
    """Return the exit code of a real process and the last lines of its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()[-4:]


def module_command(monkeypatch, interpreter, folder):
    """Return the command of a product module with a host's interpreter.

    It sets PYTHONPATH if it is set here.
    """
    monkeypatch.setenv("PYTHONPATH", folder)
    return remote_python(Path(interpreter), "crosstrain.launch.preflight.probe")


@pytest.mark.parametrize("folder", ["", "/models"])
def test_python_without_crosstrain_gets_install_command(monkeypatch, tmp_path, folder):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)
    command = module_command(monkeypatch, bare, folder)
    assert (command[0] == "env") == bool(folder)
    code, errors = run_to_end(command)
    text = end_elsewhere(command, code, errors, " of srun")
    assert text.startswith(f"ended with exit code 1 of srun, as crosstrain is not installed for {bare}: ")
    assert f"type `{bare} -m pip install crosstrain==" in text
    assert text.endswith("or name another interpreter by --python PATH")


@pytest.mark.parametrize("folder", ["", "/models"])
def test_missing_interpreter_is_named(monkeypatch, folder):
    command = module_command(monkeypatch, "/no/such/python", folder)
    code, errors = run_to_end(["sh", "-c", f"exec {' '.join(command)}"])
    text = end_elsewhere(command, code, errors)
    assert text.startswith("could not be started: there is no /no/such/python: ")
    assert text.endswith("; --python PATH names the interpreter on the nodes")


def test_other_ends_are_reported_unchanged():
    assert end_elsewhere(["python"], -9, ["out of memory"]) == "was killed by signal 9: out of memory"
    assert end_elsewhere(["python"], 3, [], " of srun") == "ended with exit code 3 of srun"


def test_missing_ray_cluster_is_reported_with_remedy(tmp_path):
    """In a new process namespace, where Ray finds no other users' cluster."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed here")
    isolated = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no process namespace to be had here")
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    command = [*isolated, sys.executable, "-m", "crosstrain.cli.main", "run", "--backend", "torch", "--launcher", "ray", "--steps", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error: Ray: this machine is a node of no Ray cluster; make it one (`ray start --address=HEAD:6379` here" in done.stderr
    assert "RAY_ADDRESS" not in done.stderr
