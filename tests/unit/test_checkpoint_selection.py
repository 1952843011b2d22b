"""Which checkpoints `evaluate` and `export` take, and the mean of several."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from checkpoint_tools import arrays, save

from crosstrain.checkpoint.selection import Selection, choose, locked_weights
from crosstrain.core.errors import UsageError

ACCURACIES = {100: 0.6, 200: 0.9, 300: 0.7, 400: 0.8, 500: 0.5}


def state_with_average(step):
    """Return a state with a moving average of the weights in addition to the momentum."""
    values = arrays(step)
    averaged = {f"slots/ema/{key.removeprefix('parameters/')}": value + 1 for key, value in values.items() if key.startswith("parameters/")}
    return {**values, **averaged}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step, accuracy in ACCURACIES.items():
        save(folder, step, state_with_average(step), metrics={"accuracy": accuracy, "loss": accuracy / 10})
    return describe(folder)


def describe(folder, **job):
    fields = {"schema": 1, "backend": "torch", "metrics": [{"name": "accuracy", "label": "accuracy", "better": "higher"}], **job}
    (folder / "job.json").write_text(json.dumps(fields))
    return folder


def steps(chosen):
    return [checkpoint.meta.step for checkpoint in chosen.checkpoints]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [500]),
        (Selection(average=3), [500, 400, 300]),
        (Selection(best=True), [200]),
        (Selection(best=True, average=3), [200, 400, 300]),
        (Selection(checkpoint="300"), [300]),
        (Selection(checkpoint="step-000000300"), [300]),
    ],
)
def test_selection_chooses_checkpoints(run, selection, expected):
    assert steps(choose(run, selection)) == expected


def test_best_follows_keep_best_of_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    assert steps(choose(describe(tmp_path / "run", keep_best="loss"), Selection(best=True, average=2))) == [500, 100]


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("weights", ["ema", "trained", None])
def test_mean_is_computed_in_float64(run, weights, best):
    """By parameter, of the requested weights; buffers too."""
    chosen = choose(run, Selection(best=best, average=4, weights=weights))
    assert chosen.weights == (weights or "ema")
    states = [state_with_average(step) for step in steps(chosen)]
    prefix = "parameters/" if weights == "trained" else "slots/ema/"
    for name, mean in chosen.parameters().items():
        expected = np.mean([state[prefix + name].astype(np.float64) for state in states], axis=0)
        np.testing.assert_array_equal(mean, expected.astype(np.float32))
    for name, mean in chosen.buffers().items():
        np.testing.assert_array_equal(mean, np.mean([state[f"buffers/{name}"].astype(np.float64) for state in states], axis=0).astype("f4"))
    assert chosen.metrics is None
    assert chosen.label == f"{chosen.path.name}-mean-of-4{'-trained' if weights == 'trained' else ''}"


def test_single_checkpoint_retains_weights_and_metrics(run):
    chosen = choose(run, Selection(best=True))
    assert chosen.metrics == {"accuracy": 0.9, "loss": 0.09}
    np.testing.assert_array_equal(chosen.parameters()["dense.bias"], state_with_average(200)["slots/ema/dense.bias"])
    assert choose(run, Selection(best=True, weights="trained")).metrics is None  # the run evaluated the average


def test_without_a_moving_average(tmp_path):
    save(tmp_path, 1)
    assert choose(tmp_path, Selection()).weights == "trained"
    with pytest.raises(UsageError, match=r"--weights: got 'ema', but step-000000001 has no moving average"):
        choose(tmp_path, Selection(weights="ema"))
    with pytest.raises(UsageError, match=r"--average-checkpoints: got 2, but the run .* has 1 checkpoint that is sound; "):
        choose(tmp_path, Selection(average=2))
    with pytest.raises(UsageError, match=r"--best: none of the checkpoints .* was evaluated"):
        choose(describe(tmp_path), Selection(best=True))


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(average=6), r"--average-checkpoints: got 6, but the run .* has 5 checkpoints that are sound"),
        (Selection(checkpoint="7"), r"--checkpoint: got '7'; allowed: step-000000500, step-000000400"),
        (Selection(checkpoint="../x"), r"--checkpoint: got '../x'; allowed: "),
        (Selection(checkpoint="300", best=True), r"--checkpoint: got '300', which names the one to take, and --best, which"),
        (Selection(checkpoint="300", average=2), r"--checkpoint: got '300', .* and --average-checkpoints, .* give one of the two"),
    ],
)
def test_invalid_selection_is_refused(run, selection, message):
    with pytest.raises(UsageError, match=message):
        choose(run, selection)


def test_checkpoint_path_selects_only_it(run):
    path = run / "checkpoints" / "step-000000100"
    assert steps(choose(path, Selection())) == [100]
    with pytest.raises(UsageError, match=r"--average-checkpoints: chooses among the checkpoints of a run"):
        choose(path, Selection(average=2))


def test_damaged_checkpoints_are_skipped_and_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000000400" / "parameters.safetensors").unlink()
    with locked_weights(tmp_path / "run", Selection(average=3)) as chosen:
        assert steps(chosen) == [500, 300, 200]
    assert [error.path.name for error in chosen.damaged] == ["step-000000400"]
    with pytest.raises(UsageError, match=r"(?s)has 4 checkpoints that are sound.*step-000000400' is damaged"):
        choose(tmp_path / "run", Selection(average=5))


def test_checkpoints_of_different_models_have_no_mean(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, {key: np.zeros(3, np.float32) if key.endswith("dense.bias") else value for key, value in arrays().items()})
    with pytest.raises(UsageError, match="are of different models"):
        choose(tmp_path, Selection(average=2))
