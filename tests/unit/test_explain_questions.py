"""Questions of `trainer explain`: duration, learning and processors, on hand-written runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from explained_runs import explained_run, using
from hypothesis import given, settings
from hypothesis import strategies as st
from questioned_runs import asked, trained
from run_samples import EVALUATION, sample, summary_of

from crosstrain.cli.commands.explain import explain as command
from crosstrain.records.store.jsonl import write_document
from crosstrain.records.store.schema import EvalRecord
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.analysis.diagnosis_text import answers
from crosstrain.report.analysis.duration import NOTABLE_REST
from crosstrain.report.analysis.utilisation import hardware_use
from crosstrain.report.runs.run import Run, as_recorded

MS = 1e-3


# How long -------------------------------------------------------------------------------------------------------------


def test_interrupted_run_predicts_planned_duration(tmp_path):
    answer = asked(trained(tmp_path, save_final=False, eval_every="end"))["duration"]
    assert answer["predicted"]
    assert (answer["measured_steps"], answer["planned_steps"]) == (200, 400)
    assert answer["run_seconds"] == pytest.approx(4.0)  # the rest takes as long as measured; its evaluation was never measured
    assert answer["total_seconds"] == pytest.approx(6.5)
    assert answer["left"]["seconds"] == pytest.approx(2.0)
    assert answer["total_seconds_low"] < 5.5 < 7.5 < answer["total_seconds_high"]
    assert answer["evaluations"] == 1
    assert answer["eval_seconds"] is None
    assert "not counted, as none was measured" in answer["text"]


TRANSLATING = {"translation_metrics": [], "translation_signatures": {"training": "greedy|sentences:10", "end": "beam4|sentences:20"}}


def test_unmeasured_final_translation_is_noted_as_not_counted(tmp_path):
    answer = asked(trained(tmp_path, save_final=False, eval_every="end", described=TRANSLATING))["duration"]
    assert (answer["run_seconds"], answer["translate_seconds"], answer["left"]["translate_seconds"]) == (pytest.approx(4.0), None, None)
    assert "final translation not counted, as none was measured; estimated from" in answer["text"]
    greedy = asked(trained(tmp_path / "other", save_final=False, eval_every="end"))["duration"]
    assert (greedy["translate_seconds"], "translation" in greedy["text"]) == (0.0, False)


def test_measured_final_translation_is_counted(tmp_path):
    """A finished run predicts a longer one; one of three seconds was that translation."""
    path = trained(tmp_path, state="succeeded", total=200, save_final=False, eval_every="end", described=TRANSLATING)
    assert asked(path)["duration"]["text"].endswith(", without final translation, which was not finished")
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"schema": 1, "event": "translated", "time_seconds": 3.0, "detail": {"seconds": 1.0}}) + "\n")
    write_document(path / "summary.json", {**summary_of(path), "run_seconds": 3.0, "total_seconds": 5.5, "translate_seconds": 1.0})
    assert asked(path)["duration"]["text"].endswith(", final translation 1 s")
    assert asked(path)["duration"]["translate_seconds"] == 1.0
    answer = asked(path, "--planned-steps", "400")["duration"]
    assert answer["run_seconds"] == pytest.approx(5.0)
    assert (answer["translate_seconds"], answer["left"]["translate_seconds"]) == (1.0, 1.0)
    assert answer["left"]["seconds"] == pytest.approx(3.0)
    assert "final translation 1 s; estimated from" in answer["text"]


def test_interrupted_translation_is_no_evaluation(tmp_path):
    path = trained(tmp_path, state="succeeded", total=200, save_final=False, eval_every="end", described=TRANSLATING)
    write_document(path / "summary.json", {**summary_of(path), "run_seconds": 3.0, "total_seconds": 5.5, "translate_seconds": 1.0})
    assert asked(path)["duration"]["text"].endswith(", final translation 1 s, which was not finished")
    answer = asked(path, "--planned-steps", "400")["duration"]
    assert answer["run_seconds"] == pytest.approx(4.0)  # an interrupted translation is not repeated
    assert answer["translate_seconds"] is None


def without_summary(path, state):
    """Restore the run's state before its end: running (in this process), or killed."""
    (path / "summary.json").unlink()
    status = json.loads((path / "status.json").read_text())
    pid = status["driver"]["pid"] if state == "running" else 2**22 + 1  # beyond what Linux gives to processes
    (path / "status.json").write_text(json.dumps({**status, "state": "running", "driver": {**status["driver"], "pid": pid}}))
    return path


@pytest.mark.parametrize(("state", "why"), [("running", "is still running"), ("died", "was killed before it could write one")])
def test_run_without_summary_is_explained_from_records(tmp_path, state, why):
    evaluations = [replace(EVALUATION, step=100, time_seconds=1.1, seconds=0.1), replace(EVALUATION, step=200, time_seconds=2.0)]
    path = trained(tmp_path, save_final=False, eval_every="100steps", evaluations=evaluations)
    whole = asked(path)
    document = json.loads(CliRunner().invoke(command, [str(without_summary(path, state)), "--json"]).stdout)
    assert (document["state"], document["recorded_until_seconds"]) == (state, 2.0)
    assert f"has no summary.json, as it {why}: all figures are from its records up to 2.0 s" in document["notes"][0]
    assert "Missing: the calibration" in document["notes"][0]
    questions = document["questions"]
    assert set(questions) == set(whole)
    assert [key for key in questions if questions[key] != whole[key] and key != "duration"] == []
    assert questions["duration"]["left"] == whole["duration"]["left"]
    assert questions["duration"]["run_seconds"] == pytest.approx(whole["duration"]["run_seconds"])
    assert CliRunner().invoke(command, [str(path)]).exit_code == 0


def test_recorded_clock_includes_final_translation(tmp_path):
    path = trained(tmp_path, state="succeeded", total=200, eval_every="end", described=TRANSLATING)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"schema": 1, "event": "translated", "time_seconds": 3.0, "detail": {"seconds": 1.0}}) + "\n")
    summary = as_recorded(Run(without_summary(path, "died"))).summary
    assert (summary["train_seconds"], summary["translate_seconds"]) == (pytest.approx(2.0), 1.0)


@pytest.mark.parametrize("option", [["--planned-steps", "2000"], ["--planned-epochs", "20"]])
def test_other_plan_predicts_duration(tmp_path, option):
    described = {"dataset": {"name": "x", "sizes": {"train": 1000, "test": 10}}}
    path = trained(tmp_path, state="succeeded", total=200, save_final=False, eval_every="end", described=described)
    answer = asked(path, *option)["duration"]
    assert answer["planned_steps"] == 2000  # an epoch has 100 updates
    assert answer["run_seconds"] == pytest.approx(20.0)


def test_dataset_preparation_counts_once(tmp_path):
    """Its time is not part of a longer run's start-up; the recorded time may be anything."""
    path = trained(tmp_path, state="succeeded", total=200, save_final=False, eval_every="end")
    before = asked(path, "--planned-steps", "2000")["duration"]
    event = {"schema": 1, "event": "dataset_made", "time_seconds": -1.0}
    for seconds, excluded_seconds in ((1.5, 1.5), (1e9, 2.5), (-3.0, 0.0), ("x", 0.0), ("NaN", 0.0), (None, 0.0)):
        (path / "events.jsonl").write_text(json.dumps({**event, "detail": {"seconds": seconds}}) + "\n")
        answer = asked(path, "--planned-steps", "2000")["duration"]
        assert answer["dataset_made_seconds"] == excluded_seconds
        assert answer["total_seconds"] == pytest.approx(before["total_seconds"] - excluded_seconds)
        assert ("of dataset preparation" in answer["text"]) is (excluded_seconds > 0)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=6, max_size=6))
def test_parts_of_measured_duration_sum_to_run_time(tmp_path_factory, seconds):
    path = trained(tmp_path_factory.mktemp("run"), state="succeeded", total=200)
    names = ("train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds", "restart_seconds_lost")
    parts = dict(zip(names, seconds, strict=False))
    run_seconds = sum(seconds)
    write_document(path / "summary.json", {**summary_of(path), **parts, "run_seconds": run_seconds, "total_seconds": run_seconds + 2.5})
    answer = asked(path)["duration"]
    assert sum(answer[name] for name in (*names, "other_seconds")) == pytest.approx(answer["run_seconds"])
    assert (answer["restart_seconds_lost"], answer["other_seconds"]) == (pytest.approx(seconds[4]), pytest.approx(seconds[5], abs=1e-9))
    assert ("lost by restarts" in answer["text"], "idle and coordination" in answer["text"]) == (
        answer["restart_seconds_lost"] > 0,
        answer["other_seconds"] >= NOTABLE_REST * run_seconds > 0,
    )


def test_completed_run_shows_measured_duration(tmp_path):
    answer = asked(trained(tmp_path, state="succeeded", total=200))["duration"]
    assert not answer["predicted"]
    assert answer["text"].startswith("4.5 s for 200 updates: start-up and shutdown 2.5 s, training 2 s")
    assert "idle" not in answer["text"]


def test_duration_includes_idle_time(tmp_path):
    path = trained(tmp_path, state="succeeded", total=200)
    write_document(path / "summary.json", {**summary_of(path), "run_seconds": 3.0, "total_seconds": 5.5})
    assert asked(path)["duration"]["text"].endswith(", idle and coordination 1 s")


RESUMED = {"segments": [{"run_seconds": 0.0, "step": 0}, {"run_seconds": 1.5, "step": 150, "changed": {}}]}
"""After 150 of 200 updates, and three of four evaluations."""


def resumed(out, **options):
    evaluations = [replace(EVALUATION, step=step, time_seconds=step / 100, seconds=0.01) for step in (50, 100, 150, 200)]
    return trained(out, evaluations=evaluations, eval_every="50steps", described=RESUMED, **options)


def test_duration_counts_evaluations_of_all_segments(tmp_path):
    answer = asked(resumed(tmp_path, state="succeeded", total=200))["duration"]
    assert "200 updates: start-up and shutdown 2.5 s, training 2 s, 4 evaluations " in answer["text"]


def test_prediction_names_its_segment(tmp_path):
    answer = asked(resumed(tmp_path, save_final=False))["duration"]
    assert (answer["measured_steps"], answer["measured_seconds"], answer["earlier_seconds"]) == (50, pytest.approx(0.5), 1.5)
    assert answer["run_seconds"] == pytest.approx(answer["earlier_seconds"] + answer["train_seconds"] + answer["eval_seconds"], abs=0.02)
    assert "until it was resumed 1.5 s, then training " in answer["text"]
    assert "; estimated from 50 updates in 0.5 s since the run was resumed; " in answer["text"]


def test_run_ended_by_target_has_no_plan_left(tmp_path):
    record = replace(EVALUATION, step=200, time_seconds=2.0)
    path = trained(tmp_path, state="succeeded", until="accuracy>=0.8", evaluations=[record])
    assert asked(path)["duration"]["text"].startswith("4.5 s until accuracy>=0.8 was reached, 200 updates")
    assert asked(path, "--planned-steps", "400")["duration"]["predicted"]


def test_run_ended_by_patience_is_reported(tmp_path):
    falling = {50: 0.9, 100: 0.8, 150: 0.8, 200: 0.7}
    records = [replace(EVALUATION, step=step, time_seconds=step / 100, metrics={"accuracy": value}) for step, value in falling.items()]
    path = trained(tmp_path, state="succeeded", patience=3, evaluations=records)
    text = asked(path)["duration"]["text"]
    assert text.startswith("4.5 s until --patience 3 was exhausted (200 of 400 planned updates): start-up and shutdown 2.5 s, training 2 s")
    assert asked(path, "--planned-steps", "400")["duration"]["predicted"]


def test_unexhausted_patience_is_not_reported(tmp_path):
    records = [replace(EVALUATION, step=step, time_seconds=step / 100) for step in (100, 200)]
    path = trained(tmp_path, state="succeeded", total=200, patience=1, evaluations=records)
    assert asked(path)["duration"]["text"].startswith("4.5 s for 200 updates")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planned-steps", "200"], "--planned-steps 200 is 200 updates, and the run has made 200 already"),
        (["--planned-steps", "400", "--planned-epochs", "4"], "give one of the two"),
        (["--planned-epochs", "4"], "does not tell how many updates an epoch has"),
    ],
)
def test_impossible_plan_is_refused(tmp_path, options, message):
    with pytest.raises(Exception, match=message):
        asked(trained(tmp_path), *options)


# Still learning -------------------------------------------------------------------------------------------------------


def curve(losses):
    return [EvalRecord(10 * (n + 1), n + 1, 0.1 * n, 0.01, "test", 360, loss, {"accuracy": 0.9}, 0) for n, loss in enumerate(losses)]


def test_training_loss_is_since_previous_evaluation(tmp_path):
    rising = [1.0 / (n + 1) if n < 8 else 0.125 + 0.05 * (n - 8) for n in range(20)]
    answer = asked(trained(tmp_path, evaluations=curve(rising)))["learning"]
    assert answer["state"] == "overfitting"
    assert answer["best_step"] in (80, 90, 100)
    assert answer["last_train_loss"] == pytest.approx(0.05)
    assert answer["train_change"] == pytest.approx(np.median([1 / 18, 1 / 19, 1 / 20]) - 1 / (answer["best_step"] / 10))
    assert "; accuracy 0.9" in answer["text"]


def test_best_evaluation_may_be_an_outlier(tmp_path):
    """An outlier does not bend the curve, but has the lowest loss; both figures are its."""
    losses = [1.0, 0.9, 0.8, 0.7, 0.6, 0.3, 0.55, 0.5, 0.45, 0.5, 0.6, 0.65]
    answer = asked(trained(tmp_path, evaluations=curve(losses)))["learning"]
    assert (answer["best_step"], answer["best_loss"]) == (60, 0.3)
    assert answer["smoothed_best_index"] != 5
    assert (answer["first_loss"], answer["last_loss"]) == (1.0, 0.65)


def test_too_few_evaluations_are_unclear(tmp_path):
    answer = asked(trained(tmp_path, evaluations=curve([1.0, 0.5])))["learning"]
    assert answer["state"] == "unclear"
    assert answer["text"].startswith("unclear: 2 evaluations of at least 8 (--eval-every evaluates more often); ")


UNEVEN = np.array([0.12, -0.12, 0.05, 0.1, -0.1, 0.08, -0.02, 0.1, -0.12, 0.06, 0.1, -0.08, 0.05, 0.0, -0.09, 0.11, 0.02, -0.1, 0.1, 0.0])


@pytest.mark.parametrize(
    ("slope", "errors", "text"),
    [
        (-0.05, (0, 2), "flat: test loss"),
        (-0.35, (0, 2), "flat: test loss"),
        (-0.7, (2, 4), "unclear: test loss"),
        (-1.0, (2, 4), "unclear: test loss"),
        (-1.5, (4, 99), "still falling: test loss"),
    ],
)
def test_learning_state_follows_standard_errors(tmp_path, slope, errors, text):
    """A noisy loss changes by `slope` over the run; its last change in standard errors decides."""
    answer = asked(trained(tmp_path, evaluations=curve(list(2 + slope * np.linspace(0, 1, 20) + UNEVEN))))["learning"]
    low, high = errors
    assert low <= abs(answer["change"]) / answer["change_error"] < high
    assert answer["text"].startswith(text)
    assert ("which may be chance; more updates or evaluations would show" in answer["text"]) is (answer["state"] == "unclear")


def test_negligible_significant_change_is_flat(tmp_path):
    losses = [4.0, 3.0, 2.0, 1.5, *(1.0 - 0.001 * n for n in range(16))]
    answer = asked(trained(tmp_path, evaluations=curve(losses)))["learning"]
    assert answer["text"].startswith("flat: test loss 0.985, which fell by 0.007 ± ")
    assert "of 20 evaluations: less than 1% of its total change; training loss" in answer["text"]


def test_repeated_evaluation_counts_once(tmp_path):
    again = curve([1.0, 0.9, 0.8])
    assert asked(trained(tmp_path, evaluations=[*again, replace(again[-1], loss=0.7)]))["learning"]["evaluations"] == 3


# Processors -----------------------------------------------------------------------------------------------------------


def used(out, pairs, *, compute=9, **options):
    workers = [{"compute": compute * MS, "communicate": (10 - compute) * MS} for _ in pairs]
    return hardware_use(diagnose(Run(explained_run(out, workers, node_figures=using(*pairs), **options))))


def test_nodes_with_separate_cores(tmp_path):
    answer = used(tmp_path, [(1.9, 2.0), (1.0, 2.0)], compute=6)
    assert (answer.figures["cpus_fully_used"], answer.figures["cpu_fraction_most"]) == (False, 0.95)
    assert answer.text.startswith("not all cores fully used: node 0 1.9 of 2 cores (95%), node 1 1 of 2 cores (50%)")
    assert "communication 40%" in answer.text


def test_fully_used_cores_have_no_waiting(tmp_path):
    assert used(tmp_path, [(1.9, 2.0), (1.8, 2.0)]).text == "cores fully used: node 0 1.9 of 2 cores (95%), node 1 1.8 of 2 cores (90%)"


def test_use_of_shared_cores_is_summed(tmp_path):
    answer = used(tmp_path, [(1.0, 2.0), (0.9, 2.0)], figures={"nodes_sharing_cores": 2})
    assert answer.text == "cores fully used: 1.9 of 2 shared cores (95%) by all 2 nodes, 1 by node 0"


def test_least_and_most_busy_of_many_nodes_are_shown(tmp_path):
    answer = used(tmp_path, [(0.1 * (n + 1), 2.0) for n in range(6)])
    assert "least and most busy of 6 nodes: node 0 0.1 of 2 cores (5%), node 5 0.6 of 2 cores (30%)" in answer.text


def used_where_known(out, pairs, **options):
    """Return hardware use of nodes with (used, usable) cores each, or None for an unknown node."""
    figures = [using(pair)[0] if pair else {"cores_available": None, "cpu_cores_used": None, "cpu_fraction": None} for pair in pairs]
    workers = [{"compute": 9 * MS, "communicate": MS} for _ in pairs]
    return hardware_use(diagnose(Run(explained_run(out, workers, node_figures=figures, **options))))


@pytest.mark.parametrize(
    ("pairs", "least", "fully", "text"),
    [
        ([(1.9, 2.0), None], 0.95, None,
         "whether all cores were fully used is unknown: node 0 1.9 of 2 cores (95%); unknown for node 1"),
        ([None, (1.0, 2.0), None], 0.5, False, "not all cores fully used: node 1 1 of 2 cores (50%); unknown for 2 nodes (0, 2)"),
        ([(1.0, 2.0), *[None] * 5], 0.5, False,
         "not all cores fully used: node 0 1 of 2 cores (50%); unknown for 5 nodes (1, 2, 3 and 2 more)"),
    ],
)  # fmt: skip
def test_unknown_node_is_named_and_not_counted(tmp_path, pairs, least, fully, text):
    answer = used_where_known(tmp_path, pairs)
    assert answer.text.startswith(text)
    assert (answer.figures["cpu_fraction_least"], answer.figures["cpus_fully_used"]) == (least, fully)
    assert answer.figures["cpu_unknown_nodes"] == [node for node, pair in enumerate(pairs) if pair is None]


def test_known_use_of_shared_cores_is_summed(tmp_path):
    sharing = {"figures": {"nodes_sharing_cores": 2}}
    answer = used_where_known(tmp_path / "full", [(1.9, 2.0), None], **sharing)
    assert answer.text == "cores fully used: 1.9 of 2 shared cores (95%) by 1 of 2 nodes, 1.9 by node 0; unknown for node 1"
    answer = used_where_known(tmp_path / "half", [(1.0, 2.0), None], **sharing)
    assert (answer.figures["cpu_fraction_most"], answer.figures["cpus_fully_used"]) == (0.5, None)


def test_core_use_is_unknown_if_only_gpus_were_sampled(tmp_path):
    unknown = {"cores_available": None, "cpu_cores_used": None, "cpu_fraction": None}
    figures = [{**unknown, "gpus": [{"name": "X", "utilization": {"mean": 0.9, "max": 1.0}}]}]
    answer = hardware_use(diagnose(Run(explained_run(tmp_path, [{"compute": 9 * MS}], node_figures=figures))))
    assert answer.text.startswith("GPUs fully used: node 0 90% of the time; whether all cores were fully used is unknown")
    assert (answer.figures["cpu_fraction_least"], answer.figures["cpus_fully_used"]) == (None, None)


def test_gpus_are_listed_first(tmp_path):
    figures = [{**using((1.0, 2.0))[0], "gpus": [{"name": "X", "utilization": {"mean": 0.6, "max": 1.0}}]}]
    run = explained_run(tmp_path, [{"compute": 9 * MS}], node_figures=figures)
    answer = hardware_use(diagnose(Run(run)))
    assert answer.question == "GPUs and CPUs"
    assert answer.text.startswith("GPUs not fully used: node 0 60% of the time; cores not fully used")
    assert answer.figures["gpus_fully_used"] is False


# All of them ----------------------------------------------------------------------------------------------------------


def test_unanswered_question_is_omitted(tmp_path):
    path = trained(tmp_path, groups=0, total=400)
    assert [answer.key for answer in answers(Run(path), diagnose(Run(path)))] == []


def test_page_has_one_line_per_question(tmp_path):
    samples = [sample(0, 0.1 * tick) for tick in range(20)]
    path = trained(tmp_path, evaluations=curve([1.0] * 9), samples=samples, described={"dataset": {"name": "x", "sizes": {"train": 10}}})
    done = CliRunner().invoke(command, [str(path)])
    assert done.exit_code == 0, done.output
    lines = done.output[done.output.index("Questions") :].splitlines()[1:]
    assert [line.split("  ")[1] for line in lines] == ["how long", "learning", "CPUs", "learning rate", "training set"]


def test_checkpoint_event_without_durations_is_ignored(tmp_path):
    path = trained(tmp_path)
    with (path / "events.jsonl").open("a") as file:
        for detail in ({}, {"seconds": "1", "stall_seconds": None}, {"seconds": -1, "stall_seconds": True}):
            file.write(json.dumps({"schema": 1, "event": "checkpoint_saved", "time_seconds": 1.0, "detail": detail}) + "\n")
    assert asked(path)["duration"]["checkpoint_seconds"] is None


def test_huge_counts_take_no_time_or_memory(tmp_path):
    described = {"dataset": {"name": "x", "sizes": {"train": 2**53}}, "total_steps": 2**53}
    path = trained(tmp_path, described=described, samples=[sample(0, -1e12), sample(0, 0.5), sample(0, 1e12)])
    write_document(path / "summary.json", {**summary_of(path), "run_seconds": 1e12, "total_seconds": 1e12})
    assert asked(path)["duration"]["planned_steps"] == 2**53
