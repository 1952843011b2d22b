"""torch passes the suite that every backend has to pass."""

import pytest

from crosstrain.conformance.layer_suite import LayerConformance
from crosstrain.conformance.suite import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"


@pytest.mark.thorough
class TestLayers(LayerConformance):
    backend = "torch"
