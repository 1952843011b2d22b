"""torch passes the suite that every backend has to pass."""

from crosstrain.conformance.suite import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
