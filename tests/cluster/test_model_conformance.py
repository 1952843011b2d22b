"""The image models pass the suite for models with two forward functions.

Few and small images suffice.
"""

from pathlib import Path
from typing import ClassVar

import pytest

from crosstrain.conformance.model_suite import ModelConformance


@pytest.mark.thorough
class TestCnn(ModelConformance):
    model = "cnn"
    data = "synthetic-images:size=32,classes=10,test=64"
    quick_workers = 1

    # Logits and gradients are compared in tests/unit/test_image_models.py, and by this suite of logistic regression in test_toy_backend.py.

    @pytest.mark.slow
    @pytest.mark.cluster
    def test_gradients_agree(self, tmp_path: Path) -> None:
        super().test_gradients_agree(tmp_path)

    @pytest.mark.slow
    @pytest.mark.cluster
    def test_logits_agree(self, train, tmp_path: Path) -> None:
        super().test_logits_agree(train, tmp_path)


@pytest.mark.slow
class TestAlexNet(ModelConformance):
    """57 million parameters: a step of two or three workers moves 228 MB per worker."""

    model = "alexnet"
    data = "synthetic-images:size=64,classes=10,test=64"
    options: ClassVar = {"deterministic": True}
    quick_steps = 2
    quick_workers = 1


@pytest.mark.slow  # its logits and gradients are compared in tests/unit/test_image_models.py
class TestResNet18(ModelConformance):
    """Training from scratch multiplies rounding errors: a low learning rate is needed.

    At usual rates torch in float32 and in float64 are 1% apart after 20 steps. Where rounding moves one activation across a ReLU's kink, a
    gradient differs by up to 1e-2. At this rate such a step has no effect, and fifty still take some percent off the loss.
    """

    model = "resnet18"
    data = "digits"
    options: ClassVar = {"lr": 3e-6}
    quick_steps = 5
    quick_workers = 1
    equal_over_workers = False
    gradient_seeds = (0, 1, 2)
