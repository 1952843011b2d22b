"""Image models: torchvision's architectures, equal on both frameworks at any size and batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_cases import CASES, EMPTY, SINGLE, Case

from crosstrain.conformance.runs import norm_wise_difference
from crosstrain.core.errors import UsageError
from crosstrain.models.layers import convolved

pytestmark = pytest.mark.thorough

LOGITS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that returns a script's results, computed in a process on first use."""
    results_by_name = {}

    def results_of(name):
        if name not in results_by_name:
            path = tmp_path_factory.mktemp("models") / f"{name}.npz"
            done = subprocess.run([sys.executable, str(FOLDER / f"model_{name}.py"), str(path)], capture_output=True, text=True)
            results_by_name[name] = dict(np.load(path)) if done.returncode == 0 else done.stderr
        assert isinstance(results_by_name[name], dict), results_by_name[name]
        return results_by_name[name]

    return results_of


def part(results, case, prefix):
    start = f"{case}/{prefix}"
    return {name.removeprefix(start): value for name, value in results.items() if name.startswith(start)}


def difference(ours, theirs, case, prefix):
    return norm_wise_difference(part(ours, case, prefix), part(theirs, case, prefix))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same(results, case):
    tf, torch = results("passes_tf"), results("passes_torch")
    assert difference(tf, torch, case, "evaluated") <= LOGITS_TOLERANCE
    assert difference(tf, torch, case, "trained") <= LOGITS_TOLERANCE
    assert difference(tf, torch, case, "gradient/") <= GRADIENT_TOLERANCE
    assert set(part(torch, case, "gradient/")) == set(case.parameters)
    assert set(part(torch, case, "buffer/")) == set(part(tf, case, "buffer/")) == set(case.buffers)
    if case.buffers:
        assert difference(tf, torch, case, "buffer/") <= LOGITS_TOLERANCE
    assert torch[f"{case}/trained"].dtype == tf[f"{case}/trained"].dtype == np.float32


@pytest.mark.parametrize("case", [case for case in CASES if case.plain], ids=str)
def test_logits_equal_plain_modules(results, case):
    for framework in ("passes_tf", "passes_torch"):
        assert difference(results(framework), results("torchvision"), case, "evaluated") <= LOGITS_TOLERANCE
        if case.buffers:
            assert difference(results(framework), results("torchvision"), case, "trained") <= LOGITS_TOLERANCE
            assert difference(results(framework), results("torchvision"), case, "buffer/") <= LOGITS_TOLERANCE


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("framework", ["passes_tf", "passes_torch"])
def test_empty_batch_gives_zeros_and_keeps_buffers(results, case, framework):
    arrays = results(framework)
    assert arrays[f"{case}/trained"].shape == arrays[f"{case}/evaluated"].shape == (0, case.classes)
    gradients = part(arrays, case, "gradient/")
    assert set(gradients) == set(case.parameters)
    assert all(not value.any() for value in gradients.values())
    assert all(np.array_equal(case.buffers[name], value) for name, value in part(arrays, case, "buffer/").items())


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_single_example_is_normalised(results, case):
    tf, torch = results("passes_tf"), results("passes_torch")
    assert difference(tf, torch, case, "trained") <= LOGITS_TOLERANCE
    assert difference(tf, torch, case, "buffer/") <= LOGITS_TOLERANCE
    assert difference(tf, torch, case, "gradient/") <= GRADIENT_TOLERANCE
    name = "layer4.1.bn2.running_var"
    assert torch[f"{case}/buffer/{name}"] == pytest.approx(0.9 * case.buffers[name], rel=1e-6)


def test_forward_function_does_not_change_buffers(results):
    assert all(results("passes_torch")[f"{case}/unchanged"] for case in CASES + EMPTY + SINGLE)


def test_low_precision_is_low_and_logits_are_float32(results):
    """bf16 has eight bits: errors of about 2⁻⁸ also show that it was used."""
    for framework in ("passes_tf", "passes_torch"):
        low, full = results(framework)["bf16/trained"], results(framework)[f"{CASES[0]}/trained"]
        assert low.dtype == np.float32
        assert 1e-4 < np.linalg.norm(low - full) / np.linalg.norm(full) < 0.05


@pytest.mark.parametrize("model", ["alexnet", "resnet18"])
def test_initial_values_have_spread_of_torchvision(results, model):
    ours = Case(model, (3, 224, 224), 1, 1000).parameters
    theirs = {name.split("/")[2]: value for name, value in results("torchvision").items() if name.startswith(f"spread/{model}/")}
    assert len(theirs) > 10
    for name, spread in theirs.items():
        assert ours[name].std() == pytest.approx(spread, rel=0.15, abs=1e-6), name


@pytest.mark.parametrize(
    ("case", "parameters", "millions"),
    [
        (Case("alexnet", (3, 224, 224), 1, 1000), 61_100_840, 714.2),
        (Case("resnet18", (3, 224, 224), 1, 1000), 11_689_512, 1814.1),
        (Case("cnn", (3, 32, 32), 1), 3 * 6 * 25 + 6 + 6 * 16 * 25 + 16 + 784 * 64 + 64 + 640 + 10, 0.8734),
    ],
    ids=str,
)
def test_size_and_cost_equal_published_ones(case, parameters, millions):
    """The cost is that documented by torchvision with its weights (0.71 and 1.81 billion)."""
    assert case.spec.size == parameters
    assert case.spec.multiply_adds / 1e6 == pytest.approx(millions, rel=1e-3)


def test_too_small_image_is_refused_with_minimum():
    with pytest.raises(UsageError, match="at least 8×8 pixels, but those of 'made' have 7×9"):
        _ = Case("cnn", (3, 7, 9), 1).spec


def test_positions_of_a_window():
    assert [convolved(224, 11, 4, 2), convolved(55, 3, 2), convolved(63, 11, 4, 2), convolved(5, 5)] == [55, 27, 15, 1]
