"""Statistics of several runs of one job, on figures worked out by hand."""

import math

import pytest
from comparison_samples import made

from crosstrain.report.compare.ratios import aggregate, common_name
from crosstrain.report.compare.rows import make_entry


def summary(run, seconds, *, reached=True, target="accuracy>=0.9", accuracy=0.9, loss=0.5):
    return {
        "run": run,
        "target": target,
        "target_reached": reached if target else None,
        "time_to_target_seconds": seconds if target and reached else None,
        "run_seconds": seconds,
        "eval": {"accuracy": accuracy, "loss": loss},
        "examples_per_second": 100.0,
        "epochs": 2.0,
        "train_seconds": 1.0,
        "init_seconds": 3.0,
    }


def test_mean_and_standard_deviation_of_runs():
    statistics = aggregate([summary("a", 1.0, accuracy=0.8), summary("b", 3.0, accuracy=0.9)])
    assert statistics["dropped"] == []
    assert statistics["converged"] == statistics["runs"] == 2
    assert statistics["figures"]["time_to_target_seconds"] == {"mean": 2.0, "sigma": pytest.approx(2**0.5), "values": 2}
    assert statistics["figures"]["accuracy"]["mean"] == pytest.approx(0.85)


def test_five_or_more_runs_drop_fastest_and_slowest():
    statistics = aggregate([summary(name, seconds) for name, seconds in zip("abcde", (5.0, 1.0, 3.0, 4.0, 2.0), strict=True)])
    assert statistics["dropped"] == ["b", "a"]
    assert statistics["figures"]["time_to_target_seconds"] == {"mean": 3.0, "sigma": 1.0, "values": 3}


def test_single_unconverged_run_is_the_slowest():
    runs = [summary("a", 0.5, reached=False), *(summary(name, seconds) for name, seconds in zip("bcde", (1.0, 2.0, 3.0, 4.0), strict=True))]
    statistics = aggregate(runs)
    assert statistics["converged"] == 4
    assert statistics["dropped"] == ["b", "a"]
    assert statistics["figures"]["time_to_target_seconds"] == {"mean": 3.0, "sigma": 1.0, "values": 3}


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ([30.0, 40.0], {"mean": 35.0, "sigma": pytest.approx(50**0.5), "values": 2}),
        ([30.0], {"mean": 30.0, "sigma": None, "values": 1}),
        ([], None),
    ],
)
def test_several_unconverged_runs_drop_none(reached, expected):
    missed = [summary(f"missed{number}", 0.5, reached=False, accuracy=0.8) for number in range(5 - len(reached))]
    statistics = aggregate([*missed, *(summary(f"reached{number}", seconds) for number, seconds in enumerate(reached))])
    assert statistics["converged"] == len(reached)
    assert statistics["dropped"] == []
    assert statistics["figures"]["time_to_target_seconds"] == expected
    assert statistics["figures"]["accuracy"]["values"] == 5
    assert statistics["figures"]["accuracy"]["mean"] == pytest.approx((0.8 * len(missed) + 0.9 * len(reached)) / 5)


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([0.5, "NaN", 0.25], "NaN"),
        ([0.5, "Infinity"], "Infinity"),
        (["-Infinity", "-Infinity"], "-Infinity"),
        (["Infinity", "-Infinity"], "NaN"),
        (["Infinity", "NaN"], "NaN"),
    ],
)
def test_non_finite_loss_makes_the_mean_non_finite(losses, mean):
    loss_statistics = aggregate([summary(str(number), 1.0, loss=loss) for number, loss in enumerate(losses)])["figures"]["loss"]
    assert str(loss_statistics["mean"]) == str(float(mean))
    assert (loss_statistics["sigma"], loss_statistics["values"]) == (None, len(losses))
    entry = make_entry([made(f"r{seed}", seed=seed, summary={"eval": {"accuracy": 0.9, "loss": loss}}) for seed, loss in enumerate(losses)])
    assert (entry.figures["eval_loss"], entry.sigmas.get("eval_loss")) == (mean, None)
    assert math.isfinite(entry.figures["eval_accuracy"])


def test_missing_target_has_no_time_to_target():
    statistics = aggregate([summary("a", 2.0, target=None)])
    assert statistics["converged"] is None
    assert statistics["figures"]["time_to_target_seconds"] is None
    assert statistics["figures"]["run_seconds"] == {"mean": 2.0, "sigma": None, "values": 1}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["job-r1", "job-r2", "job-r10"], "job ×3"),
        (["batch_size=5,mode=sync,seed=0", "batch_size=5,mode=sync,seed=1"], "batch_size=5,mode=sync ×2"),
        (["20261120-214413-logreg-tf-a1b2", "20261120-220001-logreg-tf-c3d4"], "20261120-214413-logreg-tf-a1b2 ×2"),
        (["tiger1", "tiger2"], "tiger ×2"),
        (["1", "2"], "1 ×2"),
    ],
)
def test_repeats_have_their_common_name(names, expected):
    assert common_name(names) == expected


def test_equal_figures_have_no_deviation():
    statistics = aggregate([summary(name, 1.0, accuracy=0.8444) for name in "abc"])
    assert statistics["figures"]["accuracy"] == {"mean": 0.8444, "sigma": 0.0, "values": 3}
