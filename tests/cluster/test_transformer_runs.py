"""Runs of the Transformer: the suite for every model, and losses that do not depend on which worker has the long sentences."""

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from own_models import importable

from crosstrain.conformance.model_suite import ModelConformance
from crosstrain.conformance.runs import relative_difference, run_job, trainer

pytestmark = pytest.mark.cluster

PAIRS = Path(__file__).parent.parent / "pairs"


@pytest.fixture(scope="module", autouse=True)
def pairs():
    """The datasets of pairs, for this process and those that it starts."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = importable(PAIRS)["PYTHONPATH"]
    sys.path.insert(0, str(PAIRS))
    yield
    sys.path.remove(str(PAIRS))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class TestTransformer(ModelConformance):
    """Warm-up and rate are such that fifty steps take a third off the loss, and rounding does not grow beyond 1e-3 (see the test's figures)."""

    model = "transformer:tiny"
    data = "reversed"
    options: ClassVar = {"deterministic": True, "optimizer": "adam", "lr": 1e-3, "warmup_steps": 100, "calibrate": False}
    quick_workers = 1
