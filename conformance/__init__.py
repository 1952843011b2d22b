"""Test suites for backends, models and launchers, also of third parties."""

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # failing cases show compared figures
    suites = ("suite", "model_suite", "launcher_suite")
    pytest.register_assert_rewrite(*(f"crosstrain.conformance.{name}" for name in suites))
