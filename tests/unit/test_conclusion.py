"""Conclusions from runs: the best configuration, the effect of each axis, and significance."""

import pytest
from comparison_samples import made, starved_node
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.records.store.schema import EvalRecord
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.configurations import SPEED_FIGURE, speedup
from crosstrain.report.analysis.sentences import as_text, render_conclusion


def repeated(name, speeds, *, times=None, until=None, reached=None, **job):
    """Return repeats of a job with these examples/s and times to the target.

    Seeds differ; `reached` has whether each reached the target.
    """
    runs = []
    for seed, speed in enumerate(speeds):
        summary = {"examples_per_second": speed}
        if times is not None:
            target_reached = reached is None or reached[seed]
            summary |= {"time_to_target_seconds": times[seed] if target_reached else None, "target_reached": target_reached}
        runs.append(made(f"{name}-{seed}", seed=seed, until=until, summary=summary, **job))
    return runs


FAST, SLOW = (1000.0, 1010.0, 990.0), (500.0, 505.0, 495.0)


def verdicts(runs):
    return {(verdict.axis, verdict.figure): verdict for verdict in conclude(runs).rankings}


def test_one_axis():
    conclusion = conclude([*repeated("t", FAST, backend="torch"), *repeated("f", SLOW, backend="tf")])
    (verdict,) = conclusion.rankings
    assert (verdict.axis, verdict.winner, verdict.second) == ("backend", "torch", "tf")
    assert verdict.ratio.ratio == pytest.approx(2.0, rel=1e-3)
    assert verdict.ratio.sure
    (best,) = conclusion.best
    assert (best.configuration.label, best.worst.label) == ("torch", "tf")
    words = render_conclusion(conclusion)
    assert words.head == "6 runs: logreg on digits, 1 node, sync, global batch 32, 3 repeats each"
    assert words.best == (
        "torch has the highest throughput, 1,000 examples/s (geometric mean; 95 % CI 975–1,025, n = 3): 2.00 × as fast as tf "
        "(95 % CI 1.96–2.05); significant.",
    )
    assert words.axes == ()  # already in `best`


def test_axis_is_judged_among_otherwise_equal_configurations():
    """torch doubles the speed with either batch, and a batch of 64 triples it on either backend."""
    runs = [
        run
        for backend, factor in (("torch", 2), ("tf", 1))
        for batch, more in ((64, 3), (32, 1))
        for run in repeated(f"{backend}{batch}", [speed * factor * more for speed in SLOW], backend=backend, global_batch_size=batch)
    ]
    verdict_by_axis = verdicts(runs)
    assert set(verdict_by_axis) == {("backend", "examples_per_second"), ("global_batch_size", "examples_per_second")}
    assert verdict_by_axis["backend", "examples_per_second"].ratio.pairs == pytest.approx((2, 2))
    assert verdict_by_axis["global_batch_size", "examples_per_second"].ratio.ratio == pytest.approx(3)
    assert set(verdict_by_axis["global_batch_size", "examples_per_second"].where) == {"torch", "tf"}


def test_settings_that_vary_together_are_one_axis():
    """All runs of one backend are async, so the effect of neither is known."""
    conclusion = conclude([*repeated("t", FAST, backend="torch", mode="async"), *repeated("f", SLOW, backend="tf")])
    (verdict,) = conclusion.rankings
    assert (verdict.label, verdict.winner, verdict.second) == ("backend and mode", "torch, async", "tf, sync")
    assert [best.configuration.label for best in conclusion.best] == ["torch, async"]
    more = [
        *repeated("t", FAST, backend="torch", mode="async"),
        *repeated("f", SLOW, backend="tf"),
        *repeated("g", SLOW, backend="tf", mode="async"),
    ]
    assert {verdict.axis for verdict in conclude(more).rankings} == {"backend", "mode"}


def test_opposed_ratios_are_reported():
    runs = [
        *repeated("a", FAST, backend="torch", global_batch_size=32),
        *repeated("b", SLOW, backend="tf", global_batch_size=32),
        *repeated("c", SLOW, backend="torch", global_batch_size=64),
        *repeated("d", (600.0, 606.0, 594.0), backend="tf", global_batch_size=64),
    ]
    verdict = verdicts(runs)["backend", "examples_per_second"]
    assert verdict.ratio.opposed
    assert verdict.depends
    line = next(line for line in render_conclusion(conclude(runs)).axes if line.axis == "backend")
    assert line.significance == "depends on other settings; reversed at global batch 64 (0.83 ×)"
    assert not any(line.significance.startswith("significant") for line in render_conclusion(conclude(runs)).axes if line.axis == "backend")


def test_insignificant_pair_is_not_opposed():
    runs = [
        *repeated("a", FAST, backend="torch", global_batch_size=32),
        *repeated("b", SLOW, backend="tf", global_batch_size=32),
        *repeated("c", (600.0, 630.0, 570.0), backend="torch", global_batch_size=64),
        *repeated("d", (610.0, 640.0, 580.0), backend="tf", global_batch_size=64),
    ]
    verdict = verdicts(runs)["backend", "examples_per_second"]
    assert (verdict.ratio.opposed, verdict.depends) == (True, False)
    line = next(line for line in render_conclusion(conclude(runs)).axes if line.axis == "backend")
    assert line.significance == "significant; not significant at global batch 64 (0.98 ×)"


def test_rivals_of_the_best_are_named():
    runs = [
        *repeated("a", FAST, lr=0.1),
        *repeated("b", (980.0, 1030.0, 930.0), lr=0.2),
        *repeated("c", (800.0, 808.0, 792.0), lr=0.3),
        *repeated("d", SLOW, lr=0.4),
    ]
    (best,) = conclude(runs).best
    assert [rival.label for rival in best.rivals] == ["learning rate 0.2"]
    sentence = render_conclusion(conclude(runs)).best[-1]
    assert (
        "95 % CI 975–1,025, n = 3), not significantly more than learning rate 0.2 (979 examples/s, n = 3): 2.00 × as fast as " in sentence
    )


def evaluated(run, *seconds):
    """Add evaluations at these seconds of the run clock."""
    run.evals = [
        EvalRecord(10 * number, 1.0, second, 0.1, "test", 360, 1.0, {"loss": 1.0}, None) for number, second in enumerate(seconds, start=1)
    ]
    return run


def test_limits_of_time_to_target_are_noted():
    runs = [
        *repeated("t", FAST, times=(8.0, 8.1, 7.9), until="accuracy>=0.9"),
        *repeated("f", SLOW, times=(4.0, 4.1, 3.9), until="accuracy>=0.9", backend="tf"),
    ]
    assert not any("Time to target has the resolution" in text for text in render_conclusion(conclude(runs)).caveats)  # no evaluations
    for run in runs:
        evaluated(run, run.summary["time_to_target_seconds"] / 2, run.summary["time_to_target_seconds"])
    mind = render_conclusion(conclude(runs)).caveats
    assert "Time to target excludes start-up: 3.00 s with tf, 3.00 s with torch." in mind
    (sentence,) = (text for text in mind if "Time to target has the resolution" in text)
    assert "of evaluations (--eval-every 1epoch), 1.95 s to 4.05 s here" in sentence
    for run in runs:
        evaluated(run, *(run.summary["time_to_target_seconds"] * part / 20 for part in range(1, 21)))
    assert not any("Time to target has the resolution" in text for text in render_conclusion(conclude(runs)).caveats)


def learnt(*accuracies, **more):
    runs = [
        made(f"r{lr}", lr=lr, summary={"eval": {"examples": 360, "accuracy": accuracy, "loss": 1.0}}, **more)
        for lr, accuracy in zip((0.1, 0.2, 0.3), accuracies, strict=False)
    ]
    return render_conclusion(conclude(runs)).final_metrics


def test_final_accuracy_is_shown_without_target():
    assert learnt(0.815, 0.819, 0.809) == (
        "Rerun with --until 'accuracy>=0.8', which 3 configurations reached, to compare time to accuracy.",
    )
    both = "best 0.8190 (n = 1) with tf, worst 0.8090 (n = 1) with torch"
    runs = [
        made(name, backend=name, summary={"eval": {"accuracy": value, "loss": 1.0}}) for name, value in (("tf", 0.819), ("torch", 0.809))
    ]
    assert render_conclusion(conclude(runs)).final_metrics == (
        f"Final test accuracy: {both}. Rerun with --until 'accuracy>=0.8', which all runs reached, to compare time to accuracy.",
    )
    assert learnt(0.5, 0.5) == ("Final test accuracy: 0.5000 in all configurations.",)
    assert learnt(0.815, 0.819, until="accuracy>=0.9") == ()
    assert learnt(0.815, None) == ()
    assert "--until 'accuracy>=0.41'" in learnt(0.5, 0.4129)[0]
    assert learnt(0.5, 0.00129) == ()  # a model that learned nothing suggests no target


def test_difference_within_noise_is_not_significant():
    conclusion = conclude([*repeated("t", (1000.0, 1100.0, 900.0)), *repeated("f", (1010.0, 920.0, 1120.0), backend="tf")])
    (verdict,) = conclusion.rankings
    assert not verdict.ratio.sure
    assert "not significant; needs more than 30 repeats each" in render_conclusion(conclusion).best[0]


def test_single_runs_have_unknown_significance():
    words = render_conclusion(conclude([made("a"), made("b", backend="tf", summary={"examples_per_second": 2000.0})]))
    (best,) = words.best
    assert best.startswith(
        "tf has the highest throughput, 2,000 examples/s (n = 1): 2.00 × as fast as torch; significance unknown (one run each)"
    )
    assert best.endswith("; use --repeats 3.")


def test_configuration_that_missed_target_ranks_last():
    runs = [
        *repeated("t", FAST, times=(8.0, 8.1, 7.9), until="accuracy>=0.9"),
        *repeated("f", SLOW, times=(4.0, 4.1, 3.9), reached=(True, False, True), until="accuracy>=0.9", backend="tf"),
    ]
    conclusion = conclude(runs)
    assert {verdict.figure for verdict in conclusion.rankings} == {"examples_per_second"}  # by the target there is no ratio
    best = render_conclusion(conclusion).best
    assert (
        best[0]
        == "torch reaches accuracy>=0.9 first, after 8.00 s (geometric mean; 95 % CI 7.75 s–8.25 s, n = 3); no other does in every run."
    )
    assert best[-1] == "Not reached in every run (accuracy>=0.9): tf (2 of 3)."


def test_target_reached_by_none_is_noted_once():
    runs = [
        *repeated("t", FAST, times=(8.0,) * 3, reached=(False,) * 3, until="accuracy>=0.9"),
        *repeated("f", SLOW, times=(4.0,) * 3, reached=(True, False, True), until="accuracy>=0.9", backend="tf"),
    ]
    conclusion = conclude(runs)
    assert [best.figure.key for best in conclusion.best] == ["examples_per_second"]
    assert render_conclusion(conclusion).best[-1] == "No configuration reached accuracy>=0.9 in every run: torch (0 of 3), tf (2 of 3)."


def test_contended_run_is_excluded_from_speed_and_named():
    runs = [*repeated("t", FAST), *repeated("f", SLOW, backend="tf")]
    runs.append(made("busy", seed=3, backend="tf", summary={"examples_per_second": 1.0, "per_node": [starved_node(0.5)]}))
    conclusion = conclude(runs)
    assert [(len(configuration.runs), len(configuration.figures(SPEED_FIGURE))) for configuration in conclusion.configurations.all] == [
        (3, 3),
        (4, 3),
    ]
    assert conclusion.rankings[0].ratio.ratio == pytest.approx(2.0, rel=1e-3)
    assert any("other programs took 50% of the CPU time that busy needed" in text for text in render_conclusion(conclusion).caveats)


def test_three_repeats_are_not_suggested_again():
    """Neither if contention leaves one, nor if they scatter; then the number needed is shown."""
    busy = {"per_node": [starved_node(0.5)]}
    contended = [made(f"f{seed}", seed=seed, backend="tf", summary=busy if seed else {}) for seed in range(3)]
    words = render_conclusion(conclude([*repeated("t", FAST), *contended]))
    assert "; significance unknown (CPU contention leaves fewer than two repeats of some)" in words.best[0]
    assert "use --repeats" not in words.best[0]
    missing = render_conclusion(conclude([*repeated("t", FAST), contended[0]]))
    assert "; significance unknown (not every configuration has repeats)" in missing.best[0]
    assert "use --repeats" not in missing.best[0]
    scattered = render_conclusion(
        conclude([*repeated("t", (1000.0, 1160.0, 1300.0)), *repeated("f", (1000.0, 1001.0, 1002.0), backend="tf")])
    )
    assert scattered.best[0].endswith("; not significant; needs about 7 repeats each.")


def test_incomparable_runs_have_no_verdict():
    """Another machine for the other backend, so the cause of the difference is unknown."""
    runs = [*repeated("t", FAST), *repeated("f", SLOW, backend="tf", node={"cpu_model": "Other 1"})]
    conclusion = conclude(runs)
    assert conclusion.best == ()
    assert conclusion.rankings[0].ratio is None
    assert "confounded with processor" in render_conclusion(conclusion).axes[0].significance


def test_nodes_sharing_cores_are_compared():
    """They share its cores, which is noted."""
    runs = [
        made(f"{nodes}-{seed}", nodes=nodes, seed=seed, summary={"examples_per_second": speed, "nodes_sharing_cores": nodes})
        for nodes, speeds in ((1, FAST), (3, SLOW))
        for seed, speed in enumerate(speeds)
    ]
    conclusion = conclude(runs)
    (verdict,) = conclusion.rankings
    assert (verdict.axis, verdict.winner, verdict.second) == ("nodes", "1", "3")
    assert verdict.ratio.sure
    assert any("Nodes share cores" in text for text in render_conclusion(conclusion).caveats)


def test_superlinear_speed_up_is_no_verdict():
    runs = [
        made(f"{nodes}-{seed}", nodes=nodes, seed=seed, global_batch_size=60, summary={"examples_per_second": speed})
        for nodes, speeds in ((1, SLOW), (2, (1500.0, 1510.0, 1490.0)))
        for seed, speed in enumerate(speeds)
    ]
    conclusion = conclude(runs)
    (verdict,) = (verdict for verdict in conclusion.rankings if verdict.axis == "nodes")
    assert verdict.ratio is None
    assert "the speed-up exceeds the ideal" in verdict.why_not
    assert any(
        line.startswith("2 nodes is 3.00 × as fast as 1 node, above the ideal 2 ×") for line in render_conclusion(conclusion).caveats
    )


DRAWN_RUN = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(("torch", "tf")),
        "mode": st.sampled_from(("sync", "async")),
        "nodes": st.integers(1, 4),
        "batch_size": st.sampled_from((8, 16)),
        "seed": st.integers(0, 2),
        "data": st.sampled_from(("digits", "glyphs28")),
        "until": st.sampled_from((None, "accuracy>=0.9")),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(DRAWN_RUN, min_size=1, max_size=8), speeds=st.lists(st.floats(0.1, 1e6), min_size=8, max_size=8), reached=st.booleans()
)
def test_any_runs_have_a_conclusion(jobs, speeds, reached):
    """Any runs can be compared, also if some values exist for some of them only."""
    runs = [
        made(
            f"run-{number}",
            summary={"examples_per_second": speed, "time_to_target_seconds": 1.0 + number if reached else None, "target_reached": reached},
            node={"cpu_model": f"processor {number % 2}"},
            **job,
        )
        for number, (job, speed) in enumerate(zip(jobs, speeds, strict=False))
    ]
    conclusion = conclude(runs)
    for configuration in conclusion.rankings:
        assert (configuration.ratio is None) == (configuration.why_not is not None)
        assert len(configuration.ratios) == (0 if configuration.ratio is None else len(configuration.ratio.pairs))
    for best in conclusion.best:
        behind = [
            speedup(best.configuration, configuration, best.figure)
            for configuration in conclusion.configurations.all_comparable(best.figure)
        ]
        assert all(times.ratio >= 1.0 - 1e-9 for times in behind)
        assert {configuration.label for configuration in best.rivals} <= {
            configuration.label for configuration in conclusion.configurations.all
        }
    words = render_conclusion(conclusion)
    assert all(words.sentences)
    assert conclusion.to_json(words.sentences)["sentences"] == words.sentences


@pytest.mark.parametrize(
    ("first", "second", "axis"),
    [
        ({"backend": "torch"}, {"backend": "tf", "exchange": "direct"}, "backend and exchange"),
        ({"batch_size": 10}, {"batch_size": 20, "exchange": "direct"}, "global_batch_size and exchange"),
        ({"backend": "torch"}, {"backend": "tf"}, "backend"),
        ({}, {"exchange": "direct"}, "exchange"),
        ({"mode": "async"}, {"exchange": "direct"}, "mode"),
    ],
    ids=str,
)
def test_exchange_joins_axis_of_confounded_setting(first, second, axis):
    runs = [made(f"{place}-{seed}", nodes=2, seed=seed, **job) for place, job in (("a", first), ("b", second)) for seed in (0, 1)]
    assert [axis_found.key for axis_found in conclude(runs).configurations.axes] == [axis]


def test_exchange_confounding_several_settings_has_no_winner():
    jobs = [("torch", 10, "native"), ("torch", 20, "direct"), ("tf", 10, "direct"), ("tf", 20, "native")]
    runs = [made(f"{b}-{n}", nodes=2, backend=b, batch_size=n, exchange=x) for b, n, x in jobs]
    conclusion = conclude(runs)
    assert all(verdict.winner is None for verdict in conclusion.rankings), conclusion.rankings


def test_requested_threads_confound_backends():
    """Thread counts chosen by the program follow from the configuration."""

    def verdict(**threads):
        jobs = [("torch", threads.get("torch"), 1), ("tf", threads.get("tf"), 2)]
        runs = [made(b, nodes=2, backend=b, threads=n, described={"threads_per_task": [used] * 2}) for b, n, used in jobs]
        (only_verdict,) = conclude(runs).rankings
        return only_verdict

    assert verdict().winner is not None
    assert verdict(torch=1, tf=2).winner is None
    assert "threads" in verdict(torch=1, tf=2).why_not


@pytest.mark.parametrize("configurations", [2, 3, 4])
@pytest.mark.parametrize("until", [None, "accuracy>=0.9"])
@pytest.mark.parametrize("troubled", [False, True])
def test_conclusion_fits_80_by_24_terminal(configurations, until, troubled):
    """Up to four configurations with repeats.

    `troubled`: async runs saw half the examples, and other programs took a tenth of each CPU.
    """
    kinds = [("tf", "sync"), ("torch", "sync"), ("tf", "async"), ("torch", "async")][:configurations]
    runs = []
    for place, (backend, mode) in enumerate(kinds):
        for seed, speed in enumerate(FAST):
            summary = {"examples_per_second": speed / (1 + place), "eval": {"accuracy": 0.93 + seed / 100, "loss": 0.5}}
            if until:
                summary |= {"time_to_target_seconds": (8.0 + seed) * (1 + place), "target_reached": True}
            if troubled:
                summary |= {"per_node": [{**starved_node(0.1), "cpu_cores_lost": 0.2}] * 2, "nodes_sharing_cores": 2}
            budget = {"epochs": 5 if troubled and mode == "async" else 10}
            runs.append(
                made(f"{backend}-{mode}-{seed}", seed=seed, until=until, summary=summary, backend=backend, mode=mode, nodes=2, **budget)
            )
    lines = as_text(render_conclusion(conclude(runs)), 80).rstrip().split("\n")
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80
