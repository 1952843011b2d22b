"""Updates by formulas, causes, and the sentence of a comparison."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.job import Job
from crosstrain.lockstep import causes
from crosstrain.lockstep.compare import _bad_update, probes
from crosstrain.lockstep.graph_layers import known_layer
from crosstrain.lockstep.losses import _standard
from crosstrain.lockstep.rounding import UNIT, error, unexplained
from crosstrain.lockstep.text import sentence, text
from crosstrain.lockstep.updates import Rule, gradients_of, measured_gradients, updated, without_slots
from crosstrain.models.imported.graph import Graph, Node, NodeOnTape
from crosstrain.models.imported.tape import sizes_of
from crosstrain.models.losses import _LOSSES
from crosstrain.models.objectives import StandardLoss
from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.lockstep_results import Comparison, Finding, LayerRow, ProbeRow, Side
from crosstrain.records.store.run_directory import RunReader, write_diverged
from crosstrain.report.pages.lockstep_charts import diverged

LOSSES = [
    StandardLoss("cross_entropy", 4),
    StandardLoss("weighted_cross_entropy", 4, smoothing=0.1),
    StandardLoss("weighted_cross_entropy", 4, class_weights=(1.0, 2.0, 0.5, 3.0), smoothing=0.2),
    StandardLoss("binary_cross_entropy", 2),
    StandardLoss("multi_label", 4),
    StandardLoss("mse", 0, 4),
    StandardLoss("mae", 0, 4),
    StandardLoss("huber", 0, 4, delta=0.5),
]
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
ADAM = {"optimizer": "adam", "weight_decay": 1e-4}
ADAMW = {"optimizer": "adamw", "weight_decay": 0.01}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name} {loss.smoothing:g}")
def test_slopes_of_losses_are_their_differences(loss):
    draw = np.random.default_rng(3)
    outputs = draw.normal(size=(6, 1 if loss.classes == 2 else 4))
    labels = draw.integers(0, loss.classes, 6) if loss.classes else draw.normal(size=(6, 4))
    (total, size), (slope, _) = _standard(loss, outputs, labels)
    assert size >= abs(total) / 2
    for place in np.ndindex(outputs.shape):
        moved = [outputs.copy() for _ in range(2)]
        moved[0][place] += 1e-6
        moved[1][place] -= 1e-6
        above, below = (_standard(loss, array, labels)[0][0] for array in moved)
        assert (above - below) / 2e-6 == pytest.approx(slope[place], abs=1e-6)


def test_all_losses_are_known_in_float64():
    assert {loss.name for loss in LOSSES} - {"weighted_cross_entropy"} == set(_LOSSES)
    with pytest.raises(ValueError, match="not known in float64"):
        _standard(StandardLoss("new", 4), np.ones((2, 4)), np.zeros(2, int))


def job(**options):
    return Job(backend="torch", model="cnn", data="glyphs", **options)


def state_of(draw):
    names = ("parameters/a.weight", "parameters/a.bias")
    shapes = ((40, 30), (40,))
    return {name: (0.1 * draw.standard_normal(shape)).astype(np.float32) for name, shape in zip(names, shapes, strict=True)}


def taken(rule, before, gradients):
    """Return an update of a rule, rounded to float32."""
    return {**before, **{name: value.astype(np.float32) for name, (value, _) in updated(rule, before, gradients).items()}}


def as_measured(rule, before, gradients):
    """Return what `measured_gradients` shows of a rule's gradients."""
    share = 1.0 - float(np.float32(rule.beta1)) if rule.adam else 1.0
    decay = 0.0 if rule.decoupled else 1.0
    return {name: share * (gradient + decay * rule.decay(name) * before[f"parameters/{name}"]) for name, gradient in gradients.items()}


@pytest.mark.parametrize("options", [SGD, {**SGD, "nesterov": True}, {"optimizer": "sgd"}, ADAM, ADAMW, {**SGD, "ema_decay": 0.99}])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), update=st.integers(1, 30))
def test_sound_update_is_explained_by_rounding(options, seed, update):
    draw = np.random.default_rng(seed)
    before = state_of(draw)
    gradients = {name: 0.01 * draw.standard_normal(before[f"parameters/{name}"].shape) for name in ("a.weight", "a.bias")}
    rule = Rule.of_job(job(**options), 0.01, 1, list(gradients))
    for number in range(1, update + 1):
        rule = Rule.of_job(job(**options), 0.01, number, list(gradients))
        after = taken(rule, before, gradients)
        assert _bad_update(rule, before, as_measured(rule, before, gradients), after) is None
        before = after


def norm_of_a_graph(tmp_path, draw, epsilon):
    """Return a norm's node of a graph as a layer, its input, weight and bias."""
    node = {"input": {"node": "x"}, "weight": {"node": "w"}, "bias": {"node": "b"}, "eps": epsilon, "momentum": 0.2}
    Graph(
        [
            Node("w", "state", {"name": "norm.weight"}),
            Node("b", "state", {"name": "norm.bias"}),
            Node("x", "input"),
            Node("norm", "aten._native_batch_norm_legit_functional.default", node, layer="blocks.norm"),
            Node("mean", "item", {"of": {"node": "norm"}, "position": 3}),
        ],
        "norm",
        {"blocks.norm.running_mean": "mean"},
    ).write(tmp_path / "training.json")
    settings = SimpleNamespace(has_graph=True, folder=tmp_path, inputs=("image",))
    x = (draw.standard_normal((8, 4, 6, 6)) * draw.uniform(0.01, 0.1, (4, 1, 1))).astype(np.float32)
    state = {"norm.weight": draw.uniform(0.5, 2, 4), "norm.bias": draw.standard_normal(4), "blocks.norm.running_mean": np.ones(4)}
    known = known_layer(SimpleNamespace(settings=settings), "norm", state, {"image": x}, {"norm/slope 0": x})
    return known, x.astype(np.float64), state["norm.weight"][:, None, None], state["norm.bias"][:, None, None]


def normal(x, weight, bias, epsilon):
    variance = x.var((0, 2, 3), keepdims=True)
    return (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(variance + epsilon) * weight + bias


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), factor=st.sampled_from([1.1, 0.5, 100.0]))
def test_epsilon_of_a_node_is_fitted_and_noise_is_not(tmp_path_factory, seed, factor):
    draw = np.random.default_rng(seed)
    known, x, weight, bias = norm_of_a_graph(tmp_path_factory.mktemp("graph"), draw, 2e-5)
    assert known.tensors["output 3"] == "buffer blocks.norm.running_mean"
    assert known.tensors["slope of w"] == "gradient of blocks.norm.weight"
    exact = normal(x, weight, bias, 2e-5)
    known.call.results["output"] = exact, np.sqrt(np.mean(exact**2))
    faulty = normal(x, weight, bias, 2e-5 * factor).astype(np.float32).astype(np.float64)
    words = f"its epsilon is {2e-5 * factor:.2g}"
    assert causes.of_layer(known.call, "output", faulty, known.parameters, known.buffers).startswith(words)
    assert causes.hidden_epsilon(known.call, "output", faulty, known.parameters).startswith(words)
    noisy = exact * (1 + 30 * UNIT * draw.standard_normal(exact.shape))
    assert causes.hidden_epsilon(known.call, "output", noisy, known.parameters) == ""


@pytest.mark.parametrize("options", [SGD, ADAM, ADAMW])
def test_every_fault_of_an_update_is_found_and_explained(options):
    draw = np.random.default_rng(1)
    before = state_of(draw)
    gradients = {name: 0.01 * draw.standard_normal(before[f"parameters/{name}"].shape) for name in ("a.weight", "a.bias")}
    rule = Rule.of_job(job(**options), 0.01, 1, list(gradients))
    before = taken(rule, before, gradients)
    rule = Rule.of_job(job(**options), 0.01, 2, list(gradients))
    sound = taken(rule, before, gradients)
    for words, faulty in list(causes.of_rule(rule, before, as_measured(rule, before, gradients), sound)):
        after = taken(faulty, before, gradients)
        if faulty == rule or all(np.array_equal(after[name], value) for name, value in taken(rule, before, gradients).items()):
            continue
        assert _bad_update(rule, before, as_measured(rule, before, gradients), after) is not None, words
        assert _bad_update(faulty, before, as_measured(faulty, before, gradients), after) is None, words


@pytest.mark.parametrize("options", [SGD, ADAM, ADAMW, {"optimizer": "sgd", "weight_decay": 5e-4}])
def test_gradients_are_measured_from_an_update_without_slots(options):
    draw = np.random.default_rng(2)
    before = without_slots(state_of(draw))
    gradients = {name: 0.01 * draw.standard_normal(before[f"parameters/{name}"].shape) for name in ("a.weight", "a.bias")}
    rate = 0.01 if options.get("momentum") or options["optimizer"] != "sgd" else 2.0**20
    after = taken(Rule.of_job(job(**options), rate, 1, list(gradients)), before, gradients)
    rule = Rule.of_job(job(**options), rate, 1, list(gradients))
    for name, gradient in gradients_of(rule, before, measured_gradients(job(**options), before, after)).items():
        assert np.linalg.norm(gradient - gradients[name]) <= 1e-6 * np.linalg.norm(gradients[name])


def test_rounding_of_sums_is_explained_and_bad_elements_are_not():
    draw = np.random.default_rng(3)
    x, weight = draw.standard_normal((64, 500)).astype(np.float32), draw.standard_normal((500, 40)).astype(np.float32)
    exact, magnitude = x.astype(float) @ weight.astype(float), np.abs(x).astype(float) @ np.abs(weight).astype(float)
    product = x @ weight
    assert not unexplained(*error(product, exact, magnitude))
    changed = product.copy()
    changed[3, 4] += 0.1
    assert unexplained(*error(changed, exact, magnitude))
    low = causes.to_bf16(x) @ causes.to_bf16(weight)
    assert unexplained(*error(low, exact, magnitude))
    assert not unexplained(*error(low, exact, magnitude), "bf16")
    assert unexplained(*error(product[:, :-1], exact, magnitude))
    assert unexplained(*error(np.full_like(product, np.nan), exact, magnitude))


def test_probed_updates():
    assert probes(0) == [0]
    assert probes(1) == [0, 1]
    assert probes(9) == [0, 1, 2, 4, 8, 9]
    assert probes(64) == [0, 1, 2, 4, 8, 16, 32, 64]


def comparison(*findings, growth=None):
    first, second = Side("a", "torch", "fp32", 1), Side("b", "tf", "bf16", 3)
    rows = [ProbeRow(0, 1e-7, 2e-7, 0.0, 3e-7)]
    return Comparison(first, second, "cnn", "glyphs", 64, list(findings), [], rows, 100, growth=growth)


def test_sentence_of_the_first_finding():
    late = Finding(3, "forward", "bn1", "output", "b", 1e-3, 6e-8, "its epsilon is 0.001 instead of 1e-05", 4)
    early = Finding(3, "data", "", "image", "b", 0.5, 0.0, "the channels are permuted: reversed")
    assert sentence(comparison(late)) == (
        "a (torch) and b (tf, 3 workers, bf16) part at update 4, in the forward pass of bn1: given the same input, its output on b is off"
        " by 0.001 of the size of its terms, and rounding explains 6e-08. Its epsilon is 0.001 instead of 1e-05."
        " 4 further layers have a fault in this part."
    )
    assert "in the data: the column image on b" in sentence(comparison(late, early))
    assert "in the forward pass of bn1" in text(comparison(late, early))


def test_sentence_without_findings():
    words = sentence(comparison(growth=1.31))
    assert "do not part beyond rounding up to update 65" in words
    assert "it is 1 % after about 45 updates" in words
    assert "does not grow" in sentence(comparison(growth=1.0))


def test_stored_comparison_is_read_back(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    stored = comparison(Finding(3, "forward", "bn1", "output", "b", float("inf"), 6e-8), growth=1.5)
    write_diverged(tmp_path, stored)
    assert RunReader(tmp_path).diverged() == stored
    for damaged in ("{}", '{"schema": 2}', '{"schema": 1}', "[", (tmp_path / "diverge.json").read_text().replace('"cnn"', "7")):
        (tmp_path / "diverge.json").write_text(damaged)
        with pytest.raises(DamagedRunError):
            RunReader(tmp_path).diverged()


def test_picture_of_a_comparison_has_depth_and_updates():
    rows = [LayerRow(0, name, "conv", "output", 1e-7, 2e-7, True) for name in ("conv1", "conv2", "fc")]
    probes_shown = [ProbeRow(update, 1e-7, 2e-7, 0.0, 3e-7) for update in (0, 1, 2)]
    first, second = Side("a", "torch", "fp32", 1), Side("b", "tf", "fp32", 1)
    stored = Comparison(first, second, "cnn", "glyphs", 2, [], rows, probes_shown, 100, sentence="They do not part.")
    (picture,) = diverged([SimpleNamespace(diverged=None), SimpleNamespace(diverged=stored, number=1)])
    assert [panel.title for panel in picture.panels] == ["over depth", "over updates"]
    assert np.allclose(picture.panels[0].curves[1].y, np.log10(2e-7))
    assert picture.words == "They do not part."
    for alone in (
        Comparison(first, second, "m", "d", 0, [], [], probes_shown[:1], 1),
        Comparison(first, second, "m", "d", 0, [], rows[:1], [], 1),
    ):
        assert next(iter(diverged([SimpleNamespace(diverged=alone, number=0)]))).panels == ()


def test_infinities_at_equal_places_are_no_error():
    exact = np.array([1.0, -np.inf, 2.0, np.nan])
    assert error(exact.astype(np.float32), exact, np.ones(4)) == (0.0, 0.0)
    assert error(np.array([1.0, 5.0, 2.0, np.nan]), exact, np.ones(4))[0] == np.inf
    assert error(np.array([np.inf, -np.inf, 2.0, np.nan]), exact, np.ones(4))[0] == np.inf
    assert error(np.float32(3.0), np.asarray(3.0), np.asarray(3.0)) == (0.0, 0.0)


@given(st.integers(0, 2**32 - 1), st.integers(16, 32), st.integers(10, 1000))
def test_size_of_a_sum_is_that_of_its_terms(seed, rows, count):
    """A sum of terms that cancel is judged by these, and one of equal signs by itself."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, count))
    node = [NodeOnTape("sum", "", "sum", x.size + rows)]
    exact = {"sum/output 0": x.sum(1)}
    moved = [{"sum/output 0": (x * (1 + UNIT * draw.choice([-1.0, 1.0], x.shape))).sum(1)} for _ in range(3)]
    size = float(sizes_of(exact, moved, node)["sum/size of output 0"])
    assert 0.5 * np.abs(x).sum() / rows < size < 3 * np.abs(x).sum() / rows
    rounded = np.cumsum(x.astype(np.float32), 1)[:, -1]
    assert error(rounded, exact["sum/output 0"], np.asarray(size))[0] < 16
