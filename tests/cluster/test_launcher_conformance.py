"""This project's launchers that need no cluster pass the suite for launcher packages."""

import os
from typing import ClassVar

import pytest
from documents import ROOT

from crosstrain.conformance.launcher_suite import LauncherConformance

pytestmark = pytest.mark.cluster

SSH = """#!/bin/sh
# Runs the command of `ssh OPTIONS -- HOST COMMAND` on this machine, as sshd would have a shell do it.
while [ "$1" != -- ]; do shift; done
if [ "$2" = nowhere ]; then echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; fi
SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22" exec sh -c "$3"
"""


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    """Have agents load the toy backend, which imports no framework."""
    toy = str(ROOT / "tests/toy")
    monkeypatch.syspath_prepend(toy)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([toy, *filter(None, [os.environ.get("PYTHONPATH")])]))


class TestLocal(LauncherConformance):
    launcher = "local"
    settings: ClassVar = {"nodes": 2, "backend": "toy", "network": "host"}


@pytest.mark.slow
class TestVirtualNodes(LauncherConformance):
    launcher = "local"
    settings: ClassVar = {"nodes": 2, "backend": "toy"}


@pytest.mark.thorough
class TestSsh(LauncherConformance):
    """With replacements of ssh and sshd on one machine; real ones are in `test_ssh.py`."""

    launcher = "ssh"
    hosts = ("here", "there")
    settings: ClassVar = {"backend": "toy"}
    unknown_host = "nowhere"

    @pytest.fixture(autouse=True)
    def _ssh(self, tmp_path, monkeypatch):
        (tmp_path / "ssh").write_text(SSH)
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
