"""TensorFlow passes the suite that every backend has to pass."""

import pytest

from crosstrain.conformance.layer_suite import LayerConformance
from crosstrain.conformance.suite import BackendConformance


class TestTensorFlow(BackendConformance):
    backend = "tf"


@pytest.mark.thorough
class TestLayers(LayerConformance):
    backend = "tf"
