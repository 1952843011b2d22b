"""The cache of framework probes, and what invalidates it. Real plugins in real files."""

import json
import os
import sys

import pytest

from crosstrain.backends.base import Availability
from crosstrain.launch.preflight.interview import cache_file, probe_with_cache

PLUGIN = """
import os
from crosstrain.backends.base import Availability
from crosstrain.backends.capabilities import Capabilities

class Counting:
    name, capabilities = "counting", Capabilities()
    placement = preload = open = None

    def probe(self):
        with open(os.path.join(os.path.dirname(__file__), "asked"), "a") as file:
            file.write(".")
        problem = os.environ.get("COUNTING_PROBLEM")
        return Availability("counting", None if problem else "1.0", ("cpu",), problem=problem)

counting = Counting()
"""


@pytest.fixture
def count_probes(tmp_path, monkeypatch):
    """Install a backend and an empty cache; return a function that counts its probes."""
    place = tmp_path / "plugin"
    place.mkdir()
    (place / "counting_plugin.py").write_text(PLUGIN)
    info = place / "counting_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[crosstrain.backends]\ncounting = counting_plugin:counting\n")
    (place / "asked").touch()  # so that a probe does not change the folder
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return lambda: len((place / "asked").read_text())


AVAILABLE = [Availability("counting", "1.0", ("cpu",))]


@pytest.mark.thorough
def test_framework_is_probed_once(count_probes):
    assert [probe_with_cache(["counting"]) for _ in range(3)] == [AVAILABLE] * 3
    assert count_probes() == 1
    assert probe_with_cache(["counting"], fresh=True) == AVAILABLE
    assert count_probes() == 2


def changes(tmp_path, monkeypatch):
    """Return changes that invalidate a cached answer, by name."""
    return {
        "another package": lambda: (tmp_path / "plugin" / "other-1.0.dist-info").mkdir(),
        "the backend's file": lambda: (tmp_path / "plugin" / "counting_plugin.py").write_text(PLUGIN + "\n"),
        "a variable": lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3"),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["another package", "the backend's file", "a variable"])
def test_changed_dependency_probes_again(count_probes, tmp_path, monkeypatch, change):
    probe_with_cache(["counting"])
    changes(tmp_path, monkeypatch)[change]()
    assert probe_with_cache(["counting"]) == AVAILABLE
    assert count_probes() == 2


def test_problem_is_not_cached(count_probes, monkeypatch):
    monkeypatch.setenv("COUNTING_PROBLEM", "it is broken")
    assert [probe_with_cache(["counting"])[0].problem for _ in range(2)] == ["it is broken"] * 2
    assert count_probes() == 2
    monkeypatch.delenv("COUNTING_PROBLEM")
    assert probe_with_cache(["counting"]) == AVAILABLE


@pytest.mark.quick_cases("content5")
@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"counting": 3}', '{"counting": {"holds_for": 1, "version": "1.0", "devices": []}}', "[" * 10**5]
)
def test_invalid_cache_file_is_replaced(count_probes, content):
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(content)
    assert [probe_with_cache(["counting"]) for _ in range(2)] == [AVAILABLE] * 2
    assert count_probes() == 1
    assert set(json.loads(cache_file().read_text())) == {"counting"}


@pytest.mark.thorough
def test_cache_file_writable_by_others_is_ignored(count_probes):
    probe_with_cache(["counting"])
    cache_file().chmod(0o666)
    probe_with_cache(["counting"])
    assert count_probes() == 2


def test_unwritable_cache_folder_caches_nothing(count_probes, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert [probe_with_cache(["counting"]) for _ in range(2)] == [AVAILABLE] * 2
    assert count_probes() == 2
