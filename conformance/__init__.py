"""Does a backend train as all the others do? A suite for pytest that third parties subclass for theirs; needs the package pytest."""

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # so that a case that fails shows the figures it compared, as in tests of one's own
    pytest.register_assert_rewrite("crosstrain.conformance.suite", "crosstrain.conformance.model_suite")
