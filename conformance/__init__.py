"""Does a backend, model or launcher keep its promises? Suites for pytest that third parties subclass; they need the package pytest."""

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # so that a case that fails shows the figures it compared, as in tests of one's own
    suites = ("suite", "model_suite", "launcher_suite")
    pytest.register_assert_rewrite(*(f"crosstrain.conformance.{name}" for name in suites))
