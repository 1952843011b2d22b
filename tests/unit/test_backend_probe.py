"""Probing absent, broken or noisy backends reports them and continues.

The backends here are real plugins in real files.
"""

from __future__ import annotations

import os
import sys

import pytest

from crosstrain.backends.base import Availability
from crosstrain.core.errors import UsageError
from crosstrain.engine.backend_probe import probe, probe_all

PLUGIN = """
import os, signal, sys
from crosstrain.backends.base import Availability
from crosstrain.backends.capabilities import Capabilities

class Described:
    name, capabilities = "described", Capabilities()
    placement = preload = open = None

class Loud(Described):
    def probe(self):
        print("a framework greets")
        os.write(1, b"and so does its C library")
        return Availability("loud", "1.0", ("cpu", "gpu:0 Y"))

class Crashing(Described):
    def probe(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Raising(Described):
    def probe(self):
        raise OSError("libcudart.so: cannot open shared object file")

class Bare:
    def probe(self):
        return Availability("bare", "1.0", ("cpu",))

loud, crashing, raising, bare = Loud(), Crashing(), Raising(), Bare()
"""

ENTRIES = """[crosstrain.backends]
loud = some_plugin:loud
crashing = some_plugin:crashing
raising = some_plugin:raising
gone = some_plugin:gone
bare = some_plugin:bare
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Install a distribution with four backends for this process and its children."""
    (tmp_path / "some_plugin.py").write_text(PLUGIN)
    info = tmp_path / "some_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("plugins")
def test_each_plugin_is_reported():
    loud, crashing, raising, gone, bare = probe_all(["loud", "crashing", "raising", "gone", "bare"])
    assert loud == Availability("loud", "1.0", ("cpu", "gpu:0 Y"))
    assert (crashing.version, crashing.problem) == (None, "probing it ended with SIGSEGV")
    assert raising.problem == "probing it ended with exit code 1: OSError: libcudart.so: cannot open shared object file"
    assert "backend 'gone' could not be loaded from 'some_plugin:gone'" in gone.problem
    assert "backend 'bare' (some_plugin:bare) is incomplete; missing: name, capabilities, placement, preload, open." in bare.problem
    assert all(backend.hint == "see the plugin's own documentation" for backend in (crashing, raising, gone))


def test_unknown_backend_is_usage_error():
    with pytest.raises(UsageError, match="got 'jax'"):
        probe("jax")
