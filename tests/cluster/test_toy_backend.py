"""A backend that crosstrain has never heard of joins by entry points and passes the suite."""

import os
from pathlib import Path

import pytest

from crosstrain.conformance.model_suite import ModelConformance
from crosstrain.conformance.suite import BackendConformance
from crosstrain.core import plugins

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    """Install the toy distribution, with its entry points, for this process and its children."""
    monkeypatch.syspath_prepend(str(TOY))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


def test_toy_backend_is_registered_by_entry_points():
    assert "toy" in plugins.available("backend")
    assert "toy" not in {plugin.name for plugin in plugins.BUILT_IN["backend"]}


@pytest.mark.thorough
class TestToyBackend(BackendConformance):
    backend = "toy"


@pytest.mark.thorough
class TestLogisticRegression(ModelConformance):
    """A model is compared on as many backends as have it: ours and the toy."""

    model = "logreg"
    quick_workers = 1

    def test_toy_tf_and_torch_runs_are_compared(self):
        assert self.compared_backends() == ["tf", "torch", "toy"]
