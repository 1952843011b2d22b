"""Verdicts do not come from contention, divergence or missing opponents; quality is first."""

from __future__ import annotations

import math
import random
import re
from typing import NamedTuple

import numpy as np
import pytest
from comparison_samples import made, used
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.records.store.schema import EvalRecord
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.configurations import FIGURES, SPEED_FIGURE, speedup
from crosstrain.report.analysis.sentences import render_conclusion
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import difference_lines
from crosstrain.report.compare.formats import as_csv, as_text
from crosstrain.report.compare.ratios import Sample, better_by
from crosstrain.report.pages.figure import make_lines
from crosstrain.report.pages.paper_table import as_latex
from crosstrain.report.runs.cpu_starvation import STARVED, cpu_starvation
from crosstrain.report.runs.run import labelled

CHANCE = 0.1


class Losses(NamedTuple):
    """The step series of a run."""

    loss: np.ndarray


def run(name, speed=1000.0, accuracy=0.95, *, first=None, contention=0.0, **more):
    """Make a finished run; `contention` is the fraction of CPU time lost to others, or None."""
    node = {**used(), "starved_fraction": contention, "cpu_cores_lost": None if contention is None else 2.0 * contention}
    summary = {
        "examples_per_second": speed,
        "eval": {"split": "test", "examples": 2000, "loss": 1.0, "accuracy": accuracy},
        "per_node": [node],
        **more.pop("summary", {}),
    }
    finished_run = made(name, summary=summary, dataset={"commonest_class_fraction": CHANCE}, **more)
    values = [accuracy / 2 if first is None else first, accuracy]
    finished_run.evals = [
        EvalRecord(100 * place, float(place), float(place), 0.1, "test", 2000, 1.0, {"accuracy": value}, None)
        for place, value in enumerate(values, start=1)
    ]
    return finished_run


def repeated(name, speeds, accuracies, contention=(0.0, 0.0, 0.0), **job):
    figures = zip(speeds, accuracies, contention, strict=True)
    return [
        run(f"{name}-{seed}", speed, accuracy, contention=lost, seed=seed, **job) for seed, (speed, accuracy, lost) in enumerate(figures)
    ]


FAST, SLOW, GOOD, FAIR, GUESSED = (
    (1140.0, 1150.0, 1130.0),
    (1000.0, 1010.0, 990.0),
    (0.95, 0.952, 0.948),
    (0.9, 0.903, 0.897),
    (CHANCE,) * 3,
)


def best_of(runs):
    return render_conclusion(conclude(runs)).best


# Contention ------------------------------------------------------------------------------------------------------------


def test_contention_voids_speed_and_not_accuracy():
    """Two of three repeats were contended: accuracy has n = 3, speed n = 1, and both say so."""
    runs = [
        *repeated("base", SLOW, (0.9350, 0.9472, 0.9678), contention=(0.5, 0.0, 0.6)),
        *repeated("low", FAST, (0.93, 0.94, 0.95), precision="bf16"),
    ]
    base, _ = compare_runs(runs).entries
    assert len(base.runs) == 3
    assert base.figures["eval_accuracy"] == pytest.approx(0.95)
    assert base.sigmas["eval_accuracy"] == pytest.approx(0.0166, abs=1e-3)
    assert (base.figures["examples_per_second"], base.counts["examples_per_second"]) == (1010.0, 1)
    assert "eval_accuracy" not in base.counts
    text = as_text(compare_runs(runs), layout="rows")
    assert "1,010 (n=1)" in text
    assert "CPU contention from other programs invalidates the speed and times of base-0, base-2." in " ".join(text.split())
    assert re.search(r"examples_per_second_n.*\n.*,1,", as_csv(compare_runs(runs)))
    latex = as_latex(runs)
    assert "0.9500" in latex
    assert "($n=1$)" in latex
    lines = make_lines(labelled(runs))
    assert {(line.named(len(line.runs)), len(line.runs), len(line.timed)) for line in lines.all} == {
        ("precision fp32 (n=3)", 3, 1),
        ("precision bf16 (n=3)", 3, 3),
    }
    assert "base-0, base-2" in lines.note


def test_contended_async_runs_have_marked_metrics():
    runs = repeated("a", SLOW, GOOD, contention=(0.9, 0.0, 0.0), mode="async") + repeated("s", SLOW, GOOD)
    marked = compare_runs(runs).marks
    assert "metrics" in marked[0]
    sync = repeated("a", SLOW, GOOD, contention=(0.9, 0.0, 0.0)) + repeated("s", SLOW, GOOD, backend="tf")
    assert all("metrics" not in marks and "speed" not in marks for marks in compare_runs(sync).marks)


def test_unmeasured_contention_makes_verdicts_unsure():
    runs = repeated("t", FAST, GOOD, contention=(None,) * 3) + repeated("f", SLOW, GOOD, backend="tf")
    words = render_conclusion(conclude(runs))
    assert conclude(runs).rankings[0].ratio.to_json()["sure"] is None
    assert "significance unknown (CPU contention was not measured in every run)" in words.best[0]
    assert any(line.startswith("CPU contention was not measured") and "t-0, t-1, t-2" in line for line in words.caveats)
    assert "CPU contention was not measured (run under 2 s, or no samples): t-0, t-1, t-2." in as_text(compare_runs(runs))
    assert "CPU contention was not measured (run under 2 s, or no samples): t-0, t-1, t-2." in make_lines(labelled(runs)).note


def test_winner_needs_an_opponent_and_repeats_are_suggested():
    runs = [run(f"nodes-{nodes}", contention=lost, nodes=1, batch_size=nodes * 10) for nodes, lost in ((1, 0.9), (2, 0.0), (4, 0.9))]
    conclusion = conclude(runs)
    assert conclusion.best == ()
    text = (
        "Throughput is not compared: CPU contention from other programs leaves no two configurations to compare; repeat nodes-1, nodes-4."
    )
    assert text in render_conclusion(conclusion).best
    assert all(verdict.winner is None for verdict in conclusion.rankings)
    assert any(
        "CPU contention from other programs voids speeds; repeat" in line.significance for line in render_conclusion(conclusion).axes
    )


SPEEDS = st.lists(st.floats(900.0, 1100.0), min_size=2, max_size=5)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(SPEEDS, SPEEDS, st.floats(0.8, 1.25), st.floats(0.0, 0.99), st.floats(0.0, 1.0), st.integers(0, 4))
def test_one_contended_run_never_reverses_a_verdict(ours, theirs, factor, fraction, slowed, place):
    """A run is slower by at most the fraction lost: a significant ratio keeps its side."""
    ours = [value * factor for value in ours]
    place %= len(ours)
    true = better_by([(Sample(tuple(ours)), Sample(tuple(theirs)))])
    disturbed = [value * (1 - fraction * slowed) if index == place else value for index, value in enumerate(ours)]
    jobs = [("torch", disturbed, place), ("tf", theirs, None)]
    runs = [
        run(f"{backend}-{seed}", speed, backend=backend, seed=seed, contention=fraction if seed == hit else 0.0)
        for backend, speeds, hit in jobs
        for seed, speed in enumerate(speeds)
    ]
    configurations = conclude(runs).configurations
    by_backend = {configuration.values["backend"]: configuration for configuration in configurations.all}
    if not by_backend["torch"].figures(SPEED_FIGURE):
        return
    seen = speedup(by_backend["torch"], by_backend["tf"], SPEED_FIGURE)
    if true.sure and seen.sure:
        assert (true.ratio > 1) == (seen.ratio > 1)
    if fraction < STARVED and seen.sure:  # contention can only make its side look worse
        assert seen.ratio > 1 or true.ratio < 1


def test_contention_drops_no_repeat_from_accuracy():
    """The fastest and slowest of five are dropped, a contended run is not."""
    runs = [run(f"r-{seed}", 1000.0 + seed, 0.9 + 0.01 * seed, seed=seed, summary={"run_seconds": 10.0 - seed}) for seed in range(5)]
    slow = run("slow", 100.0, 0.5, seed=5, contention=0.9, summary={"run_seconds": 99.0})
    (row,) = compare_runs([*runs, slow]).entries
    assert set(row.left_out) == {"r-0", "r-4"}
    assert row.figures["eval_accuracy"] == pytest.approx((0.91 + 0.92 + 0.93 + 0.5) / 4)
    assert (row.figures["examples_per_second"], row.counts["examples_per_second"]) == (1002.0, 3)


# Quality ---------------------------------------------------------------------------------------------------------------


def test_diverged_configuration_is_never_the_fastest():
    runs = repeated("high", FAST, GUESSED, lr=0.1) + repeated("low", SLOW, GOOD, lr=0.02)
    conclusion = conclude(runs)
    assert conclusion.best == ()
    words = render_conclusion(conclusion)
    assert words.best[0].startswith("learning rate 0.02 has the best test accuracy, 0.9500 (95 % CI ")
    assert words.best[1] == (
        "Diverged, so not ranked: learning rate 0.1 "
        "(3 of 3 runs: test accuracy 0.1000 at the end, no better than guessing the most common class)."
    )
    assert not any("0.1'" in line for line in words.final_metrics)
    assert all(limit.configuration.label == "learning rate 0.02" for limit in conclusion.diagnoses)
    assert words.axes == ()  # nothing beyond this


def test_non_finite_repeat_excludes_its_configuration():
    runs = repeated("high", FAST, GOOD, lr=0.1) + repeated("low", SLOW, GOOD, lr=0.02)
    runs.append(run("high-3", 1140.0, 0.1, seed=3, lr=0.1, summary={"non_finite_from_step": 5, "final_train_loss": "NaN"}))
    conclusion = conclude(runs)
    assert {conclusion.configurations.all[place].values["lr"] for place in conclusion.configurations.quality.diverged} == {0.1}
    assert all(best.configuration.values["lr"] != 0.1 for best in conclusion.best)


def test_run_without_improvement_has_diverged():
    worse = [run(f"w-{seed}", 2000.0, 0.40, first=0.42, seed=seed, lr=0.5) for seed in range(3)]
    conclusion = conclude([*worse, *repeated("low", SLOW, GOOD, lr=0.02)])
    assert list(conclusion.configurations.quality.diverged.values()) == [
        "3 of 3 runs: test accuracy 0.4000 at the end, no better than 0.4200 at the first evaluation"
    ]
    assert not conclude(worse).configurations.quality.diverged  # no run shows that more can be learnt


def test_converged_run_without_progress_has_not_diverged():
    """It may nevertheless be significantly worse."""
    still = [run(f"w-{seed}", 2000.0, 0.8487 + seed / 1e4, first=0.8523, seed=seed, lr=0.5) for seed in range(3)]
    conclusion = conclude([*still, *repeated("low", SLOW, GOOD, lr=0.02)])
    assert not conclusion.configurations.quality.diverged
    assert {conclusion.configurations.all[place].values["lr"] for place in conclusion.configurations.quality.worse} == {0.5}
    assert not conclude(
        [*rmse("s", (0.121, 0.1, 0.11), first=0.12, lr=0.5), *rmse("l", (0.05, 0.051, 0.052))]
    ).configurations.quality.diverged


def test_throughput_is_ranked_among_the_best_in_quality():
    runs = [
        *repeated("a", FAST, FAIR, lr=0.1),
        *repeated("b", (1050.0, 1055.0, 1045.0), GOOD, lr=0.02),
        *repeated("c", SLOW, (0.951, 0.949, 0.950), lr=0.01),
    ]
    conclusion = conclude(runs)
    (best,) = conclusion.best
    assert (best.configuration.label, best.worst.label) == ("learning rate 0.02", "learning rate 0.01")
    first, second = render_conclusion(conclusion).best
    assert "significantly worse: learning rate 0.1, 0.9000 (n = 3)" in first
    assert first.startswith("learning rate 0.02, learning rate 0.01 have the best test accuracy")
    assert second.startswith("learning rate 0.02 has the highest throughput")


def test_throughput_leads_if_only_the_framework_differs():
    runs = repeated("t", FAST, FAIR, backend="torch") + repeated("f", SLOW, GOOD, backend="tf")
    assert not conclude(runs).configurations.quality.leads
    assert best_of(runs)[0].startswith("torch has the highest throughput")


def test_runs_that_learnt_nothing_are_ranked_by_throughput():
    runs = repeated("a", FAST, GUESSED, lr=0.1) + repeated("b", SLOW, GUESSED, lr=0.2)
    first, second = best_of(runs)
    assert first.startswith("No run improved on its first evaluation")
    assert second.startswith("learning rate 0.1 has the highest throughput")


def test_short_runs_far_above_guessing_have_learnt():
    """Their first evaluation came late, so that the last one is no better."""
    runs = [run("a", 1500.0, 0.9472, first=0.9528, lr=0.3), run("b", 1000.0, 0.9417, first=0.9417, lr=0.2)]
    assert conclude(runs).configurations.quality.learnt
    assert best_of(runs)[0].startswith("learning rate 0.3 has the best test accuracy")


@pytest.mark.parametrize(
    ("loss", "leads"), [(1.0, "1 node has the highest throughput"), (1.1, "1 node, 2 nodes have the best test accuracy")]
)
def test_parts_of_a_global_batch_train_alike_if_losses_agree(loss, leads):
    parts = {"global_batch_size": 32, "seed": 0, "batch_size": None}
    runs = [run("one", 1500.0, 0.9, **parts), run("two", 1000.0, 0.9, nodes=2, **parts)]
    for finished, losses in zip(runs, ([1.0] * 6, [1.0] * 5 + [loss]), strict=True):
        finished.step_series = lambda losses=losses: Losses(np.array(losses, np.float32))
    assert best_of(runs)[0].startswith(leads)


def test_single_runs_are_reported_without_recommendation():
    conclusion = conclude([run("a", 1500.0, 0.82, mode="async"), run("b", 1000.0, 0.85)])
    quality, neither, speed = render_conclusion(conclusion).best
    assert quality == "sync has the best test accuracy, 0.8500 (n = 1); significance unknown against async, 0.8200 (n = 1)."
    assert "with one run each the significance is unknown: no recommendation" in neither
    assert speed.startswith("async has the highest throughput")
    assert conclusion.advice == ()


def test_single_run_at_chance_has_diverged():
    conclusion = conclude([run("a", 1500.0, CHANCE, lr=0.1), run("b", 1000.0, 0.95, lr=0.02)])
    assert [conclusion.configurations.all[place].label for place in conclusion.configurations.quality.diverged] == ["learning rate 0.1"]
    assert conclusion.best == ()


def test_sync_runs_of_one_seed_are_one_quality_value():
    """They train equally, so their repeats show no variance."""
    runs = [run(f"{lr}-{copy}", 1000.0 + copy, accuracy, lr=lr) for lr, accuracy in ((0.1, 0.95), (0.2, 0.94)) for copy in range(3)]
    assert conclude(runs).configurations.quality.unknown


def rmse(name, values, *, first=2.3, **job):
    """Make runs with another metric, of which less is better."""
    metrics = [{"name": "rmse", "label": "rmse", "better": "lower"}]
    runs = []
    for seed, value in enumerate(values):
        evaluated = {"split": "test", "examples": 2000, "loss": 1.0, "rmse": value}
        rmse_run = made(f"{name}-{seed}", seed=seed, summary={"eval": evaluated}, described={"metrics": metrics}, **job)
        rmse_run.evals = [
            EvalRecord(place, float(place), float(place), 0.1, "test", 2000, 1.0, {"rmse": float(metric_value)}, None)
            for place, metric_value in enumerate((first, value), start=1)
        ]
        runs.append(rmse_run)
    return runs


def test_unjudged_run_does_not_disable_verdicts():
    """The significantly worse one stays unranked, whatever else is there."""
    pair = repeated("hi", FAST, FAIR, lr=0.1) + repeated("lo", SLOW, GOOD, lr=0.02)
    for further in (
        run("i", 900.0, 0.6, lr=0.01, summary={"state": "interrupted"}),
        run("old", 900.0, 0.6, lr=0.01, node={"packages": {"crosstrain": "0.0.1"}}),
        run("data", 900.0, 0.6, lr=0.01, data="mnist"),
        run("random", 900.0, 0.6, lr=0.01, summary={"synthetic": True}),
        run("until", 900.0, 0.6, lr=0.01, until="accuracy>=0.99", summary={"target_reached": False, "time_to_target_seconds": None}),
        *rmse("other", (1.0,), lr=0.01),
    ):
        conclusion = conclude([*pair, further])
        first = next(place for place, configuration in enumerate(conclusion.configurations.all) if configuration.runs[0].name == "hi-0")
        assert first in conclusion.configurations.quality.worse, further.name
        assert all(best.configuration.runs[0].name != "hi-0" for best in conclusion.best), further.name


def test_incomparable_quality_is_not_recommended():
    runs = repeated("hi", FAST, FAIR, lr=0.1, epochs=5) + repeated("lo", SLOW, GOOD, lr=0.02, epochs=10)
    conclusion = conclude(runs)
    assert conclusion.configurations.quality.undecided
    assert (
        "The configurations train differently, and their quality is not comparable: no recommendation."
        in render_conclusion(conclusion).best
    )
    assert conclusion.advice == ()


def test_other_budgets_are_named_if_not_comparable():
    job = {"steps": 300, "epochs": None}
    sync = repeated("s", FAST, GOOD, **job) + repeated("t", SLOW, GOOD, backend="tf", **job)
    runs = sync + repeated("a", SLOW, FAIR, mode="async", **{**job, "steps": 150})
    words = render_conclusion(conclude(runs))
    unranked = next(line for line in words.best if line.startswith("Not ranked"))
    assert unranked.startswith("Not ranked, as the quality is not comparable (budget ")
    assert unranked.endswith("): torch, async.")
    assert [line.axis for line in words.axes if line.axis == "mode"] == []  # not repeated
    assert any(line.startswith("  budget (sync: ") and "; async: " in line for line in difference_lines(compare_runs(runs)))


def test_widened_interval_is_marked():
    runs = repeated("t", FAST, GOOD, contention=(0.1, 0.1, 0.1)) + repeated("f", SLOW, GOOD, backend="tf")
    words = render_conclusion(conclude(runs))
    assert words.best[0].count("95 % CI* ") == 2
    assert "* Widened for CPU contention; without it: torch up to 1.11 × as fast." in words.caveats
    scattered = repeated("t", (1000.0, 1160.0, 1300.0), GOOD, contention=(0.1,) * 3) + repeated("f", SLOW, GOOD, backend="tf")
    assert render_conclusion(conclude(scattered)).best[0].endswith(" repeats each without CPU contention.")
    assert "CI*" not in render_conclusion(conclude(repeated("t", FAST, GOOD) + repeated("f", SLOW, GOOD, backend="tf"))).best[0]


def test_contended_async_repeat_keeps_quality_verdict():
    slow = repeated("as", (900.0, 905.0, 910.0), GOOD, contention=(0.9, 0.0, 0.0), lr=0.02, mode="async")
    conclusion = conclude(repeated("hi", FAST, FAIR, lr=0.1) + repeated("lo", SLOW, GOOD, lr=0.02) + slow)
    assert {conclusion.configurations.all[place].runs[0].name for place in conclusion.configurations.quality.worse} == {"hi-0"}


def test_exploded_metric_has_diverged():
    for worse in ((3.0, 50.0, 9.0), (3.0, 1e9, 1e3), ("NaN",) * 3, ("Infinity", 3.0, 4.0)):
        conclusion = conclude(rmse("h", worse, lr=0.1) + rmse("l", (0.1, 0.11, 0.12), lr=0.02))
        assert [conclusion.configurations.all[place].values["lr"] for place in conclusion.configurations.quality.diverged] == [0.1], worse
        assert conclusion.best == ()


def test_run_without_evaluation_is_not_ranked():
    unevaluated = repeated("x", (2000.0, 2010.0, 2020.0), GUESSED, lr=0.5)
    unevaluated[0].summary["eval"], unevaluated[0].evals = None, []
    conclusion = conclude(unevaluated + repeated("lo", SLOW, GOOD, lr=0.02))
    assert conclusion.advice == ()
    assert all(best.configuration.values["lr"] == 0.02 for best in conclusion.best)


def test_best_single_run_hides_no_significance():
    conclusion = conclude([run("s", 900.0, 0.96, lr=0.05), *repeated("lo", SLOW, GOOD, lr=0.02), *repeated("hi", FAST, FAIR, lr=0.1)])
    assert {conclusion.configurations.all[place].runs[0].name for place in conclusion.configurations.quality.worse} == {"hi-0"}
    assert conclusion.configurations.quality.undecided


def test_values_without_variance_prove_nothing():
    assert not conclude(rmse("a", (30.0,) * 3, first=50.0) + rmse("b", (29.9999,) * 3, first=50.0, lr=0.1)).configurations.quality.worse
    first, second = repeated("a", SLOW, (0.95,) * 3, lr=0.1), repeated("b", SLOW, (0.948,) * 3, lr=0.2)
    assert not conclude(first + second).configurations.quality.worse  # 4 of 2,000 examples


def test_few_of_many_equal_configurations_are_called_worse():
    """Twenty sets of ten equal configurations: at 5 % each, one set is expected to have one."""
    drawn, wrong = random.Random(7), 0
    for _ in range(20):
        runs = [run(f"{lr}-{s}", 1000.0, 0.95 + drawn.gauss(0, 0.002), seed=s, lr=0.01 + lr / 1000) for lr in range(10) for s in range(3)]
        wrong += bool(conclude(runs).configurations.quality.worse)
    assert wrong <= 4


@pytest.mark.parametrize(("nodes", "fraction", "lost"), [(4, 0.14, 0.0986), (1, 0.2, 0.5)])
def test_waiting_tasks_may_have_lost_all_waits_together(nodes, fraction, lost):
    """Each waited in turn: the run lost the sum of waits, which no fraction of a node shows."""
    node = {**used(), "starved_fraction": fraction, "cpu_cores_lost": lost}
    shape = {"nodes": nodes, "procs_per_node": (4,) if nodes == 1 else (1,)}
    clean = [run(f"f-{seed}", 1000.0 + seed, backend="tf", seed=seed, **shape, summary={"per_node": [used()] * nodes}) for seed in range(3)]
    slow = 1300.0 * (1 - nodes * lost)
    held = [run(f"t-{seed}", slow + seed, seed=seed, **shape, summary={"per_node": [node] * nodes}) for seed in range(3)]
    assert not conclude([*clean, *held]).rankings[0].ratio.sure


def test_measurement_setting_does_not_change_training():
    """Other measurements are not comparable; runs that differ only in them train equally."""

    def split(name, speeds, accuracies, examples):
        split_runs = repeated(name, speeds, accuracies)
        for measured_run in split_runs:
            measured_run.summary["eval"]["examples"] = examples
        return split_runs

    runs = split("a", FAST, FAIR, 1000) + split("b", SLOW, GOOD, 2000)
    quality = conclude(runs).configurations.quality
    assert (quality.leads, quality.undecided) == (False, False)
    assert all(measured_run["significantly_worse"] is None for measured_run in quality.to_json(["a", "b"])["set_ups"])
    further = split("c", SLOW, (0.99, 0.991, 0.989), 500)
    for measured_run in further:
        measured_run.job["lr"] = 0.7
    assert conclude([*repeated("hi", FAST, FAIR, lr=0.1), *repeated("lo", SLOW, GOOD), *further]).configurations.quality.best is not None


def test_copy_of_a_contended_run_is_no_second_run():
    contended = run("c", 500.0, contention=0.9)
    runs = labelled([contended, run("c", 500.0, contention=0.9), run("d", 1000.0, backend="tf")])
    lines = make_lines(runs)
    assert "All runs had CPU contention" not in lines.note
    assert [len(line.timed) for line in lines.all if line.configuration.values["backend"] == "tf"] == [1]


def test_small_figures_give_a_sentence():
    assert best_of(rmse("a", (1e-90, 2e-90, 3e-90)) + rmse("b", (4e-90, 5e-90, 6e-90), lr=0.1))
    assert best_of(rmse("a", (5e-324,) * 3) + rmse("b", (1e-323,) * 3, lr=0.1))


# Any set of runs -------------------------------------------------------------------------------------------------------

RUN = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((0.1, 0.02, 0.01)),
        "mode": st.sampled_from(("sync", "async")),
        "backend": st.sampled_from(("torch", "tf")),
        "seed": st.integers(0, 3),
        "speed": st.floats(500.0, 2000.0),
        "kind": st.sampled_from(
            ("finished", "finished", "finished", "contended", "slightly", "short", "guessed", "nan", "worsened", "missed")
        ),
    }
)


def drawn(number, lr, mode, backend, seed, speed, kind, until=None):
    contention = {"contended": 0.95, "slightly": 0.1, "short": None}.get(kind, 0.0)
    accuracy = CHANCE if kind == "guessed" else 0.9 + 0.01 * random.Random(number).random()
    summary = {"non_finite_from_step": 3, "final_train_loss": "NaN"} if kind == "nan" else {}
    if until is not None:
        reached = kind not in ("missed", "guessed", "nan")
        summary |= {"target_reached": reached, "time_to_target_seconds": 2000.0 / speed if reached else None}
    first = 0.99 if kind == "worsened" else None
    job = {"lr": lr, "mode": mode, "backend": backend, "seed": seed, "until": until}
    return run(f"run-{number}", speed, accuracy, first=first, contention=contention, summary=summary, **job)


def broken(damaged_run):
    return damaged_run.summary.get("non_finite_from_step") is not None


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.lists(RUN, min_size=1, max_size=10), st.sampled_from((None, "accuracy>=0.8")), st.integers(0, 9))
def test_conclusions_are_consistent_for_any_runs(jobs, until, copied):
    runs = [drawn(number, **job, until=until) for number, job in enumerate(jobs)]
    conclusion = conclude(runs)
    quality, every = conclusion.configurations.quality, conclusion.configurations.all
    for best in conclusion.best:
        assert best.configuration.index not in quality.diverged
        assert not any(map(broken, best.configuration.runs))
        assert len(every) > 1
        assert best.worst is not None or all(
            not competitor.row.all_converged for competitor in every if competitor is not best.configuration
        )
        assert (
            len(best.configuration.figures(best.figure))
            == sum(cpu_starvation(entry_run.summary) is None for entry_run in best.configuration.runs)
            > 0
        )
    if quality.best is not None:
        assert quality.best not in quality.diverged
        assert sum(bool(values) for values in quality.values) > 1
    if any(map(broken, runs)):
        assert quality.diverged
    words = render_conclusion(conclusion)
    for place, values in enumerate(quality.values):
        for count in re.findall(rf"(?<!\w){re.escape(every[place].label)}, [\d.]+ \(n = (\d+)\)", " ".join(words.best)):
            assert int(count) == len(values)
    for entry in compare_runs(runs).entries:
        for name, count in entry.counts.items():
            timed = [
                entry_run for entry_run in entry.runs if cpu_starvation(entry_run.summary) is None and entry_run.name not in entry.left_out
            ]
            known = [entry_run for entry_run in timed if name != "time_to_target_seconds" or entry_run.summary["target_reached"]]
            assert count == len(known), name
    _copied_under_contention(conclusion, runs, jobs, copied % len(jobs), until)


def _copied_under_contention(conclusion, runs, jobs, place, until):
    """Add a copy of a run slowed by others: no significant ratio is reversed."""
    slow = {**jobs[place], "speed": jobs[place]["speed"] * 0.93, "kind": "slightly", "seed": 9}
    more = conclude([*runs, drawn(len(runs), **slow, until=until)])
    for figure in FIGURES:
        before, after = (
            {first.label: first for first in version.configurations.all if first.figures(figure)} for version in (conclusion, more)
        )
        for first, second in [(a, b) for a in before for b in before if a < b and a in after and b in after]:
            was, now = speedup(before[first], before[second], figure), speedup(after[first], after[second], figure)
            if was.sure and now.sure:
                assert (was.ratio > 1) == (now.ratio > 1)


def test_leeway_widens_an_interval_by_the_loss():
    plain = better_by([(Sample((1.0, 1.1)), Sample((2.0, 2.1)))])
    wide = better_by([(Sample((1.0, 1.1), math.log(2)), Sample((2.0, 2.1), math.log(3)))])
    assert (wide.low, wide.high) == pytest.approx((plain.low / 3, plain.high * 2))
