"""Which figures can be compared: each kind of difference once, and several together."""

from __future__ import annotations

import pytest
from comparison_samples import NODE, made, starved_node

from crosstrain.core.job import Job
from crosstrain.core.setting import GROUPS
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.compare.caveats import CAVEATS
from crosstrain.report.compare.comparability import compare_settings
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import difference_lines
from crosstrain.report.compare.factors import RULES

SPEED, STEPS, TIME, LOSS, METRICS, TRANSLATIONS, AT_THE_END, TARGET, RESOURCES = GROUPS
WORK = {SPEED, STEPS, TIME, TARGET, RESOURCES}
LEARNT = {LOSS, METRICS, TRANSLATIONS, AT_THE_END}
LEARNING = LEARNT | {TARGET}

PACKAGES = NODE["packages"]
STEP = {"schedule": "step", "epochs": 10}
NOAM = {"schedule": "noam", "warmup_steps": 10}

WEIGHTS = "/w.pt?sha256=" + 64 * "{0}"
OF_TEN = {"summary": {"batch_size": 10, "global_batch_size": 10}}


def translating(training="greedy", end="beam4"):
    """Return job.json's fields of a run whose evaluations translate."""
    infos = [{"name": name, "label": name, "better": "higher"} for name in ("bleu", "chrf", "exact", "perplexity")]
    signatures = {"training": training, "end": end}
    return {"described": {"metrics": infos, "translation_metrics": ["bleu", "chrf", "exact"], "translation_signatures": signatures}}


MISSED = {"summary": {"target_reached": False}}
EXHAUSTED = {"patience": {"evaluations": 3, "exhausted": True}}

DIFFERENCES = [
    ("model", {}, {"model": "cnn"}, set(GROUPS)),
    ("data", {}, {"data": "mnist"}, LEARNING),
    ("digest", {}, {"dataset": {"digest": "cd34"}}, LEARNING),
    ("shape", {}, {"dataset": {"input_shape": [3, 8, 8]}}, WORK),
    ("train_size", {}, {"dataset": {"sizes": {"train": 100, "test": 360}}}, {RESOURCES}),
    ("test_size", {}, {"summary": {"eval": {"examples": 100, "loss": 0.5, "accuracy": 0.9}}}, LEARNING),
    ("seed", {}, {"seed": 1}, LEARNING),
    ("loss", {}, {"loss": "cross_entropy?smoothing=0.1"}, LEARNING),
    ("optimizer", {}, {"optimizer": "adam"}, set(GROUPS)),
    ("lr", {}, {"lr": 0.1}, LEARNING),
    ("momentum", {}, {"momentum": 0.9}, LEARNING),
    ("nesterov", {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, LEARNING),
    ("weight_decay", {}, {"weight_decay": 0.1}, LEARNING),
    ("weight_decay_except", {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_except": "*.bias"}, LEARNING),
    ("initial_weights", {}, {"initial_weights": "/w.pt"}, LEARNING),
    ("initial_weights", {"initial_weights": WEIGHTS.format("a")}, {"initial_weights": WEIGHTS.format("b")}, LEARNING),
    ("initial_weights_except", {"initial_weights": "/w"}, {"initial_weights": "/w", "initial_weights_except": "head.*"}, LEARNING),
    ("beta1", {"optimizer": "adam"}, {"optimizer": "adam", "beta1": 0.8}, LEARNING),
    ("beta2", {"optimizer": "adamw"}, {"optimizer": "adamw", "beta2": 0.8}, LEARNING),
    ("epsilon", {"optimizer": "adam"}, {"optimizer": "adam", "epsilon": 1e-6}, LEARNING),
    ("schedule", {}, {"schedule": "cosine"}, LEARNING),
    ("schedule_step_epochs", STEP, {**STEP, "schedule_step_epochs": 2.0}, LEARNING),
    ("schedule_gamma", STEP, {**STEP, "schedule_gamma": 0.5}, LEARNING),
    ("batch_tokens", {"batch_tokens": 500, **OF_TEN}, {"batch_tokens": 900, **OF_TEN}, LEARNING),
    ("schedule_coefficient", NOAM, {**NOAM, "schedule_coefficient": 2.0}, LEARNING),
    ("warmup_steps", {}, {"warmup_steps": 10}, LEARNING),
    ("scale_lr", {}, {"scale_lr": "linear"}, LEARNING),
    ("base_batch_size", {"scale_lr": "sqrt"}, {"scale_lr": "sqrt", "base_batch_size": 16}, LEARNING),
    ("clip_norm", {}, {"clip_norm": 1.0}, LEARNING),
    ("ema_decay", {}, {"ema_decay": 0.99}, set(GROUPS)),
    ("augment", {}, {"augment": "flip"}, set(GROUPS)),
    ("precision", {}, {"summary": {"precision_used": "bf16 (emulated)"}}, set(GROUPS)),
    ("budget", {}, {"epochs": 2}, LEARNT | {TIME}),
    ("until", {"until": "accuracy>=0.9"}, {"until": "accuracy>=0.8", "summary": {"target_reached": True}}, LEARNING | {TIME}),
    ("until", {"until": "accuracy>=0.9", **MISSED}, {"until": "accuracy>=0.8", **MISSED}, {TARGET}),
    ("patience", {}, {"patience": 3, "summary": EXHAUSTED}, LEARNING | {TIME}),
    ("patience", {"patience": 9}, {"patience": 3}, set()),
    ("eval_every", {}, {"eval_every": "10steps"}, {TIME, TARGET}),
    ("checkpoints", {}, {"checkpoint_every": "1epoch"}, {TIME, TARGET, RESOURCES}),
    ("checkpoints", {}, {"save_final": False}, {TIME, TARGET, RESOURCES}),
    ("checkpoints", {"checkpoint_every": "9steps"}, {"checkpoint_every": "9steps", "save_final": False}, {TIME, TARGET, RESOURCES}),
    ("threads", {}, {"described": {"threads_per_task": [2]}}, WORK),
    ("cpu", {}, {"node": {"cpu_model": "Made Up 4000"}}, WORK),
    ("cores", {}, {"node": {"cores_available": 4.0}}, WORK),
    ("cores_per_node", {}, {"cores_per_node": "0.5", "node": {"cores_available": 0.5}}, WORK),
    ("sharing", {"nodes": 2}, {"nodes": 2, "summary": {"nodes_sharing_cores": 2}}, WORK),
    ("memory", {}, {"node": {"memory_limit_bytes": 4_000_000_000}}, {RESOURCES}),
    ("gpus", {"node": {"gpus": []}}, {"node": {"gpus": [{"name": "Fast 1"}]}}, WORK),
    ("device", {"device": "gpu"}, {"device": "cpu"}, WORK),
    ("device", {"device": "gpu"}, {"summary": {"device_used": "cpu"}}, WORK),
    ("kernel", {}, {"node": {"kernel": "6.2.0"}}, WORK),
    ("network", {"nodes": 2}, {"nodes": 2, "summary": {"network_source": "sockets"}}, WORK),
    ("bandwidth", {"nodes": 2}, {"nodes": 2, "bandwidth": "100mbit"}, WORK),
    ("link", {"node": {"interfaces": {"a": {"speed_bits_per_second": 10**9}}}},
     {"node": {"interfaces": {"a": {"speed_bits_per_second": 10**10}, "lo": {"speed_bits_per_second": None}}}}, WORK),
    ("framework", {}, {"node": {"packages": {**PACKAGES, "torch": "2.16.0"}}}, WORK),
    ("trainer", {}, {"node": {"packages": {**PACKAGES, "crosstrain": "0.2.0"}}}, set(GROUPS)),
    ("python", {}, {"node": {"python": "3.12.1"}}, WORK - {RESOURCES}),
    ("distributed", {}, {"distributed": "always"}, WORK),
    ("exchange", {"nodes": 2}, {"nodes": 2, "exchange": "direct"}, WORK),
    ("compile", {}, {"compile": "auto", "summary": {"compiled": True}}, WORK),
    ("steps_per_call", {}, {"steps_per_call": 1}, WORK),
    ("deterministic", {}, {"deterministic": True}, WORK),
    ("accumulate", {"batch_size": 8, "accumulate": 4}, {"batch_size": 16, "accumulate": 2}, WORK),
    ("profile", {}, {"profile": 5, "summary": {"profiled_updates": 0}}, set()),
    ("sample_interval", {}, {"sample_interval": 2.0}, {RESOURCES}),
    ("start_timeout", {}, {"start_timeout": 60.0}, set()),
    ("stall_timeout", {}, {"stall_timeout": 60.0}, set()),
    ("node_timeout", {}, {"node_timeout": 60.0}, set()),
    ("max_restarts", {}, {"max_restarts": 3, "checkpoint_every": "end"}, set()),
    ("restart_window", {}, {"restart_window": 60.0}, set()),
    ("min_nodes", {}, {"min_nodes": 1}, set()),
    ("spare_processes", {}, {"spare_processes": True}, {RESOURCES}),
    ("on_nan", {}, {"on_nan": "continue"}, set()),
    ("translation_signature", {"described": {"translation_signatures": {"training": "tok:13a|greedy", "end": "tok:13a|beam4"}}},
     {"described": {"translation_signatures": {"training": "tok:char|greedy", "end": "tok:13a|beam4"}}}, {TRANSLATIONS}),
    ("translation_signature", {"until": "bleu>=20", **translating("a")}, {"until": "bleu>=20", **translating("b")}, {TRANSLATIONS, TARGET}),
    ("translation_signature", {"keep_best": "chrf", **translating("a")}, {"keep_best": "chrf", **translating("b")}, {TRANSLATIONS, TARGET}),
    ("translation_signature", {"patience": 3, "summary": EXHAUSTED, **translating("a")}, {"patience": 3, **translating("b")},
     {TRANSLATIONS, TARGET}),
    ("translation_signature", {"patience": 3, **translating("a")}, {"patience": 3, **translating("b")}, {TRANSLATIONS}),
    ("translation_signature", {"until": "loss<=2", **translating("a")}, {"until": "loss<=2", **translating("b")}, {TRANSLATIONS}),
    ("translation_signature", {"keep_best": "perplexity", "patience": 3, "summary": EXHAUSTED, **translating("a")},
     {"keep_best": "perplexity", "patience": 3, **translating("b")}, {TRANSLATIONS}),
    ("translation_signature_at_the_end", translating(end="tok:13a|beam4"), translating(end="tok:13a|beam1"), {AT_THE_END}),
    ("translation_signature_at_the_end", translating(end="x"),
     {**translating(end="x"), "summary": {"translated": {"bleu": 30.0, "signature": "tok:13a|beam1"}}}, {AT_THE_END}),
    ("eval_sentences", {}, {"eval_sentences": 100}, {TIME, TARGET}),
    ("beam", {}, {"beam": 1}, {TIME}),
    ("length_penalty", {}, {"length_penalty": 1.0}, set()),
]  # fmt: skip

EQUIVALENT = [
    ({"momentum": 0.0, "optimizer": "adam"}, {"optimizer": "adam", "schedule_gamma": 0.5}),
    ({}, {"base_batch_size": 16}),
    ({"initial_weights": WEIGHTS.format("a")}, {"initial_weights": f"/another{WEIGHTS.format('a')}"}),
    ({"steps": 100, "batch_size": 20}, {"steps": 50, "batch_size": 40}),
    ({"name": "a", "mllog": True, "tensorboard": False, "keep": 2}, {}),
    ({"nodes": 1}, {"nodes": 1, "bandwidth": "100mbit"}),
    ({"checkpoint_every": "end"}, {"checkpoint_every": "end", "save_final": False}),
    ({"backend": "tf"}, {"backend": "torch", "node": {"packages": {**PACKAGES, "tensorflow": "2.20.0"}}}),
    ({"data": "mnist", "dataset": {"digest": "cd34"}}, {"data": "mnist", "dataset": {"digest": "cd34"}}),
]


@pytest.mark.parametrize(
    ("key", "first", "second", "confounded"), DIFFERENCES, ids=[f"{index}-{case[0]}" for index, case in enumerate(DIFFERENCES)]
)
def test_difference_is_named_and_confounds_figures(key, first, second, confounded):
    comparison = compare_settings([made(**first), made("two", **second)])
    assert [difference.key for difference in comparison.faults] == [key]
    assert set(comparison.faults[0].confounds) == confounded
    assert comparison.marks(1) == confounded
    assert comparison.marks(0) == set()
    assert None not in comparison.faults[0].values
    assert comparison.faults[0].values[0] != comparison.faults[0].values[1]
    assert comparison.independent == []


def test_every_rule_has_a_case():
    assert {case[0] for case in DIFFERENCES} == {rule.key for rule in RULES if rule.matters and not rule.independent}


@pytest.mark.parametrize(("first", "second"), EQUIVALENT)
def test_equivalent_settings_are_ignored(first, second):
    comparison = compare_settings([made(**first), made("two", **second)])
    assert comparison.faults == []
    assert comparison.marks(1) <= {STEPS}


IRRELEVANT = {
    "calibrate": False,
    "keep": 2,
    "keep_best": "loss",
    "keep_best_count": 3,
    "launcher": "local",
    "mllog": True,
    "monitor": False,
    "tensorboard": False,
}
"""Settings that no figure depends on."""

PLACE = {"data_dir": "originals", "mlflow": "http://127.0.0.1:5000", "mlflow_experiment": "mine", "name": "b", "out": "there"}
"""Settings that are places and names."""

ELSEWHERE = {
    "vocabulary": "data",
    "procs_per_node": "workers",
    "epochs": "budget",
    "steps": "budget",
    "examples": "budget",
    "checkpoint_every": "checkpoints",
    "save_final": "checkpoints",
}
"""Settings that show in a rule of another name."""


def test_every_job_setting_has_a_rule():
    keys = {rule.key for rule in RULES}
    assert set(ELSEWHERE.values()) <= keys
    assert set(IRRELEVANT) == {rule.key for rule in RULES if not rule.matters}
    assert set(Job.model_fields) - keys - set(PLACE) - set(ELSEWHERE) == set()


@pytest.mark.parametrize(("key", "value"), IRRELEVANT.items())
def test_irrelevant_setting_still_separates_configurations(key, value):
    runs = [made(f"{name}{seed}", seed=seed, **job) for name, job in (("a", {}), ("b", {key: value})) for seed in (0, 1)]
    comparison = compare_runs(runs)
    assert [[run.name for run in entry.runs] for entry in comparison.entries] == [["a0", "a1"], ["b0", "b1"]]
    assert (comparison.comparability.faults, comparison.marks) == ([], (frozenset(), frozenset()))
    first, then = difference_lines(comparison)
    assert first.startswith("Differences without effect on the figures: ")
    assert then.startswith("Nothing else differs: ")


def test_compared_setting_is_not_listed_as_same():
    runs = [made(f"r{seed}", seed=seed) for seed in (0, 1)]
    assert difference_lines(compare_runs(runs, by=["seed"])) == ["Compared: seed 0, 1.", "Nothing else differs."]


@pytest.mark.parametrize(("key", "value"), PLACE.items())
def test_place_and_name_do_not_separate_repeats(key, value):
    (entry,) = compare_runs([made("a", seed=0), made("b", seed=1, described={key: value})]).entries
    assert entry.seeds == (0, 1)


@pytest.mark.parametrize(
    ("changes", "keys", "marks"),
    [
        ({"backend": "tf"}, ["backend"], set()),
        ({"mode": "async"}, ["mode"], {STEPS}),
        ({"nodes": 2, "batch_size": 16}, ["nodes", "workers", "batch_size"], set()),
        ({"nodes": 2}, ["nodes", "workers", "global_batch_size", "update_examples"], {STEPS}),
        ({"procs_per_node": 2, "batch_size": 16}, ["workers", "batch_size"], set()),
        ({"batch_size": 64}, ["global_batch_size", "batch_size", "update_examples"], {STEPS}),
    ],
)
def test_compared_setting_is_no_fault(changes, keys, marks):
    comparison = compare_settings([made(), made("two", **changes)])
    assert [difference.key for difference in comparison.independent] == keys
    assert comparison.faults == []
    assert comparison.marks(1) == marks


def test_async_update_is_one_workers_batch():
    sync, two = made(batch_size=32), made("two", mode="async", nodes=2, batch_size=32)
    comparison = compare_settings([sync, two])
    assert "update_examples" not in [difference.key for difference in comparison.independent]
    assert not [line for line in difference_lines(compare_runs([sync, two])) if "examples of an update" in line]
    four = made("four", mode="async", nodes=4, batch_size=32)
    assert compare_settings([two, four]).marks(1) == set()  # each worker's update is as large, so steps/s compare
    larger = compare_runs([two, made("larger", mode="async", nodes=2, batch_size=64)])
    assert larger.marks[1] == {STEPS}
    sentence = "  examples of an update: steps/s count other amounts of work; loss and metrics after as many epochs differ by design."
    assert sentence in difference_lines(larger)


@pytest.mark.parametrize(
    ("by", "changes"), [("batch_size", {"batch_size": 64}), ("global_batch_size", {"nodes": 2}), ("mode", {"mode": "async"})]
)
def test_step_rate_is_not_compared_across_batches_and_modes(by, changes):
    comparison = compare_runs([made(), made("two", **changes)], by=[by])
    assert sorted(map(sorted, comparison.marks)) == [[], [STEPS]]
    assert conclude(comparison.runs).best


def test_parameter_servers_are_compared_in_async_mode():
    comparison = compare_settings([made(mode="async"), made("two", mode="async", ps=2), made("three")])
    assert {difference.key: difference.values for difference in comparison.independent}["ps"] == ("1", "2", None)


def test_requested_setting_is_compared():
    runs = [made(), made("two", precision="bf16")]
    assert compare_settings(runs).marks(1) == set(GROUPS)
    comparison = compare_settings(runs, independent={"precision"})
    assert (comparison.faults, comparison.marks(1)) == ([], set())
    assert [(difference.label, difference.values) for difference in comparison.independent] == [("precision", ("fp32", "bf16"))]


def test_losses_by_different_formulas_are_never_ranked():
    runs = [made(), made("two", loss="multi_label")]
    assert compare_settings(runs).marks(1) == LEARNING
    comparison = compare_settings(runs, independent={"loss"})
    assert (comparison.faults, comparison.marks(1)) == ([], {LOSS})
    assert [(difference.label, difference.values) for difference in comparison.independent] == [("loss", ("the model's", "multi_label"))]


def segments(**changed):
    return {"segments": [{}, {"changed": {key: [1, 2] for key in changed}}]}


PROFILED = {"profiled_updates": 5, "profile_seconds": 2.5}

FAULTY = [
    ("state", {"summary": {"state": "interrupted"}}, set(GROUPS)),
    ("diverged", {"summary": {"non_finite_from_step": 3}}, set(GROUPS)),
    ("synthetic", {"summary": {"synthetic": True}}, LEARNING),
    ("resumed", {"summary": {"resumed": 1}, "described": segments(epochs=1)}, {TIME, RESOURCES}),
    ("resumed", {"summary": {"resumed": 1}, "described": segments(calibrate=1, keep=1, stall_timeout=1)}, {TIME, RESOURCES}),
    ("changed", {"summary": {"resumed": 1}, "described": segments(batch_size=1, epochs=1)}, set(GROUPS)),
    ("restarted", {"summary": {"restarts": 2, "restart_seconds_lost": 7.5}}, {TIME, TARGET, RESOURCES}),
    ("lacked workers", {"summary": {"restarts": 1, "worker_restarts": 1, "worker_absent_seconds": 4.5}}, WORK),
    ("profiled", {"profile": 5, "summary": PROFILED}, {TIME, TARGET, RESOURCES}),
    ("profiled throughout", {"profile": 500, "summary": {**PROFILED, "examples_per_second": None}}, WORK),
    ("profiled throughout", {"profile": 5}, WORK),  # by a release that did not count what was profiled
    ("adapter", {"summary": {"model_method": "keras", "adapter_cost": 1.04}}, WORK),
    ("starved", {"summary": {"per_node": [starved_node(0.4)]}}, WORK),
    ("learnt under contention", {"mode": "async", "summary": {"per_node": [starved_node(0.7)]}}, WORK | LEARNING),
]


@pytest.mark.parametrize(("key", "changes", "confounded"), FAULTY, ids=[case[0] for case in FAULTY])
def test_caveat_marks_run_in_any_comparison(key, changes, confounded):
    assert {fault.key for fault in CAVEATS} == {case[0] for case in FAULTY}
    comparison = compare_settings([made("one", **changes), made("two", **changes)])
    assert [difference.key for difference in comparison.faults] == [*(["starved"] if key == "learnt under contention" else []), key]
    assert comparison.marks(0) == comparison.marks(1) == confounded
    single = compare_settings([made("one", **changes), made("two")])
    assert single.marks(1) == confounded  # not comparable with a confounded first run
    assert single.comparable(sorted(confounded)[0], [0, 1]) == [1]


@pytest.mark.parametrize(
    ("method", "cost", "shown"),
    [
        ("translated", None, "translated (cost not measured)"),
        ("keras", 1.02, "keras on {backend}"),
        ("native", None, "native"),
        (None, None, None),
    ],
)
def test_method_of_a_model_is_compared(method, cost, shown):
    carried_out = made("two", summary={"model_method": method, "adapter_cost": cost})
    comparison = compare_settings([made("one", summary={"model_method": "native"}), carried_out])
    values = {difference.key: difference.values for difference in comparison.independent}
    shown = shown and shown.format(backend=carried_out.summary["backend"])
    assert values.get("model_method") == (("native", shown) if shown not in ("native", None) else None)
    assert (comparison.faults, comparison.marks(1)) == ([], set())


def test_comparable_runs_are_grouped_with_first():
    runs = [made("a"), made("b", seed=1), made("c"), made("d", seed=1), made("e", seed=1)]
    comparison = compare_settings(runs)
    assert comparison.comparable(METRICS, range(5)) == [0, 2]
    assert comparison.comparable(METRICS, [1, 2, 3, 4]) == [1, 3, 4]
    assert comparison.comparable(SPEED, range(5)) == [0, 1, 2, 3, 4]


def test_incomparable_first_run_leaves_others_compared():
    comparison = compare_settings([made("a", seed=7), made("b", seed=1), made("c", seed=1)])
    assert comparison.comparable(METRICS, range(3)) == [1, 2]


def test_versions_of_other_framework_do_not_confound():
    old = {"packages": {**PACKAGES, "tensorflow": "2.20.0"}}
    comparison = compare_settings([made("torch"), made("new", backend="tf"), made("old", backend="tf", node=old)])
    assert [difference.key for difference in comparison.faults] == ["framework"]
    assert (comparison.marks(1), comparison.marks(2)) == (set(), set())
    assert SPEED in comparison.confounded(1, 2)
    assert comparison.comparable(SPEED, range(3)) == [0, 1]


def test_versions_of_third_party_packages_are_compared():
    def run(name, jaxlib):
        node = {"packages": {**PACKAGES, "jax": "0.9", "jaxlib": jaxlib}}
        return made(name, backend="jax", node=node, described={"framework_packages": ["jax", "jaxlib"]})

    equal = compare_settings([run("a", "0.9"), run("b", "0.9")])
    assert (equal.faults, equal.unrecorded) == ([], {})
    different = compare_settings([run("a", "0.9"), run("b", "0.8")])
    assert [difference.key for difference in different.faults] == ["framework"]
    assert compare_settings([run("a", "0.9"), run("b", None)]).unrecorded == {"framework version": ["b"]}


def test_unrecorded_facts_are_reported_and_taken_as_equal():
    comparison = compare_settings([made(), made("two", node={"kernel": None, "packages": None})])
    assert comparison.unrecorded == {"kernel": ["two"], "framework version": ["two"], "trainer version": ["two"]}
    assert (comparison.faults, comparison.marks(1)) == ([], set())
    lines = difference_lines(compare_runs([made(), made("two", node={"kernel": None})]))
    assert lines == ["No difference is known.", "Not recorded, so possibly different: kernel of two."]


def test_equal_runs_are_reported_as_equal():
    (line,) = difference_lines(compare_runs([made(), made("two", summary={"run_seconds": 16.0})], fold=False))
    assert line.startswith("Nothing differs: data, seeds, precision,")


def test_differences_are_written_as_sentences():
    assert difference_lines(
        compare_runs([made(), made("two", backend="tf", mode="async", seed=3, stall_timeout=60, node={"kernel": "7"})])
    ) == [
        "Compared: backend torch, tf; mode sync, async.",
        "  mode: an update is of the global batch in sync, of one worker's batch in async.",
        "Confounding differences:",
        "  seed (torch: 0; tf: 3): loss, accuracy and time to target are not comparable; results also differ by chance; compare means over"
        " several seeds (--repeats).",
        "  kernel (torch: 6.1.0; tf: 7): speed, steps/s, run time, time to target and resources are not comparable; another kernel"
        " schedules and sends differently.",
        "  time limit of a stall (torch: 120; tf: 60): it only decides when a run fails.",
    ]
