"""Recordings of small trainings in numpy: what is named, left out, and within which bounds."""

import json
import math
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from crosstrain import recorder
from crosstrain.core.errors import UsageError
from crosstrain.lockstep import recorded
from crosstrain.lockstep.recorded_causes import SHIFTS, _is_moved
from crosstrain.lockstep.recordings import compare_recordings
from crosstrain.recorder.recording import Recording as Writer
from crosstrain.recorder.recording import initial_weights, matched

ADAM = {"rule": "adam", "weight decay": 0.0, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "amsgrad": False}
KERAS = {**ADAM, "epsilon hat": True}


def train(folder, *, count=6, steps="0-2,4", rate=lambda _: 0.1, precision="f4", changed=lambda gradients: gradients, **options):
    """Record a network of two layers that learns numbers; `options` change what is recorded."""
    draw = np.random.default_rng(3)
    writer = Writer(str(folder), steps, full=options.get("full", True))
    weights = {"in.weight": draw.standard_normal((12, 6)), "in.bias": np.zeros(12), "out.weight": draw.standard_normal((1, 12)) / 4}
    weights = {name: values.astype("f4") for name, values in weights.items()}
    if "optimizer" in options:
        writer.layer("optimizer", options["optimizer"]["rule"], options["optimizer"], "torch")
    for layer, (kind, settings) in options.get("layers", {}).items():
        writer.layer(layer, kind, settings, "torch")
    for _ in range(count):
        x, y = draw.standard_normal((16, 6)).astype("f4"), draw.standard_normal((16, 1)).astype("f4")
        held = {name: values.astype(precision) for name, values in weights.items()}
        hidden = np.tanh(x @ held["in.weight"].T + held["in.bias"])
        error = hidden @ held["out.weight"].T - y
        slope = 2 * error @ held["out.weight"] * (1 - hidden**2) / 16
        gradients = {"in.weight": slope.T @ x, "in.bias": slope.sum(0), "out.weight": 2 * error.T @ hidden / 16}
        gradients = changed(gradients)
        add_all(writer, "before", weights)
        add_all(writer, "batch", {"x": x, "y": y})
        add_all(writer, "forward", options.get("forward", lambda values: {"in": values})(hidden))
        writer.add("loss", "loss", np.float32((error**2).mean()))
        if not options.get("stops", False) or writer.update < count - 1:
            add_all(writer, "gradient", {options.get("prefix", "") + name: values.astype("f4") for name, values in gradients.items()})
            moved = options.get("moved", lambda name, gradient: gradient)
            steps = {name: np.float32(rate(writer.update)) * moved(name, gradients.get(name, 0)) for name in weights}
            weights = {name: values - steps[name] for name, values in weights.items()}
            weights = {name: values.astype("f4") for name, values in weights.items()}
            add_all(writer, "after", weights)
            writer.advance()
    writer.close()
    if options.get("stops", False):  # as of a script that died
        lines = (folder / "recording.jsonl").read_text().splitlines(keepends=True)
        (folder / "recording.jsonl").write_text("".join(lines[:-1]))
    return folder


def add_all(writer, part, tensors):
    for name, values in tensors.items():
        writer.add(part, name, values, name.rpartition(".")[0])


def compared(tmp_path, first, second):
    paths = train(tmp_path / "a", **first), train(tmp_path / "b", **second)
    return compare_recordings(paths, ("a", "b"))


@pytest.mark.parametrize("full", [True, False])
def test_rounding_over_many_updates_is_no_finding(tmp_path, full):
    options = {"count": 65, "steps": "0-2,4,8,16,64", "full": full}
    comparison = compared(tmp_path, options, {**options, "precision": "f8"})
    assert comparison.findings == []
    assert comparison.upto == 64
    assert comparison.sentence.endswith("do not part beyond rounding up to update 65.")


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("update", "span"), [(3, "2-4"), (11, "8-16")])
def test_faults_of_updates_not_recorded_are_found(tmp_path, update, span, full):
    options = {"count": 17, "steps": "0-2,4,8,16", "full": full}
    comparison = compared(tmp_path, options, {**options, "rate": lambda number: 0.2 if number == update else 0.1})
    finding, (before, now) = comparison.findings[0], map(int, span.split("-"))
    assert (finding.update, finding.part) == (now, "weights")
    assert f"the weights before update {now + 1} differ by" in finding.cause
    assert f"though they agreed after update {before + 1}; the updates between are not recorded" in finding.cause
    assert f'steps="{span}"' in finding.cause


def test_weights_changed_between_updates_are_found(tmp_path):
    options = {"count": 4, "steps": "0-3"}
    first, second = train(tmp_path / "a", **options), train(tmp_path / "b", **options)
    lines = [json.loads(line) for line in (second / "recording.jsonl").read_text().splitlines()]
    values = bytearray((second / "values.bin").read_bytes())
    (line,) = (item for item in lines if (item.get("part"), item.get("name"), item.get("update")) == ("before", "in.weight", 2))
    kind, place, size = line["array"]
    array = np.frombuffer(values, kind, size, place)
    values[place : place + array.nbytes] = (array * np.float32(1.01)).tobytes()
    (second / "values.bin").write_bytes(values)
    (finding,) = compare_recordings((first, second), ("a", "b")).findings[:1]
    assert (finding.update, finding.part) == (2, "weights")
    assert "something between the two changes them" in finding.cause


def test_large_differences_are_never_an_all_clear(tmp_path):
    """Each update explains its results, so that nothing is found: the sentence ends before."""
    noise = np.random.default_rng(1)

    def changed(gradients):
        scale = 3e-7 * 9 ** len(seen)
        seen.append(scale)
        return {name: values * (1 + scale * noise.standard_normal(values.shape)) for name, values in gradients.items()}

    seen = []
    options = {"count": 9, "steps": "0-8"}
    comparison = compared(tmp_path, options, {**options, "changed": changed})
    large = [row.update for row in comparison.probes if row.loss > 0.01 or row.gradients > 0.1]
    assert comparison.findings or (
        large and comparison.upto < large[0] and any("updates from" in line for line in comparison.not_exercised)
    )


def named_as_state_does(path):
    """Rename weights as `recorder.state("model", …)` does, and leave gradients."""
    lines = (path / "recording.jsonl").read_text().splitlines(keepends=True)
    lines = [line.replace('"name": "', '"name": "model.') if '"before"' in line or '"after"' in line else line for line in lines]
    (path / "recording.jsonl").write_text("".join(lines))
    return path


def test_gradients_match_names_without_prefix(tmp_path):
    first, second = (named_as_state_does(train(tmp_path / name)) for name in "ab")
    comparison = compare_recordings((first, second), ("a", "b"))
    assert comparison.not_exercised == []
    assert all(row.gradients == 0.0 for row in comparison.probes)
    double = train(tmp_path / "c", changed=lambda gradients: {name: 2 * values for name, values in gradients.items()})
    (finding,) = compare_recordings((first, named_as_state_does(double)), ("a", "c")).findings[:1]
    assert (finding.update, finding.part, finding.tensor) == (0, "backward", "gradient of model.out.weight")


def test_gradients_of_unknown_names_are_not_compared(tmp_path):
    comparison = compared(tmp_path, {"prefix": "x."}, {"prefix": "x."})
    assert all(math.isnan(row.gradients) for row in comparison.probes)
    assert "gradients of a whose names no weight has: x.in.weight, x.in.bias, x.out.weight" in comparison.not_exercised
    comparison = compared(tmp_path / "faulty", {"prefix": "x."}, {"prefix": "x.", "rate": lambda _: 0.11})
    assert (comparison.findings[0].update, comparison.findings[0].part) == (0, "optimiser")
    assert "its step is 1.1 times as large" in comparison.findings[0].cause


def test_recordings_that_were_cut_say_so(tmp_path):
    comparison = compared(tmp_path, {}, {"count": 2, "stops": True})
    assert comparison.upto == 0
    assert "update 2 of b, within which its recording ends" in comparison.not_exercised
    assert "updates that a alone has: 2, 3, 5" in comparison.not_exercised
    with pytest.raises(UsageError, match="it ends within update 1, and no update is whole"):
        compared(tmp_path / "early", {}, {"count": 1, "stops": True})
    lines = (tmp_path / "a/recording.jsonl").read_bytes()
    (tmp_path / "a/recording.jsonl").write_bytes(lines[:-100])
    comparison = compare_recordings((tmp_path / "a", train(tmp_path / "c")), ("a", "c"))
    assert "the last line of a, which is cut off" in comparison.not_exercised
    assert comparison.upto == 2


def clipped(way):
    def changed(gradients):
        if way == "value":
            return {name: np.clip(values, -0.1, 0.1) for name, values in gradients.items()}
        norms = {name: float(np.linalg.norm(values)) for name, values in gradients.items()}
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        return {name: values * 0.2 / (norms[name] if way == "tensor" else total) for name, values in gradients.items()}

    return changed


@pytest.mark.parametrize(("way", "words"), [("tensor", "clipped by tensor, to the norm 0.2"), ("value", "clipped by value, at 0.1")])
def test_ways_of_clipping_are_named(tmp_path, way, words):
    comparison = compared(tmp_path, {"changed": clipped("all")}, {"changed": clipped(way)})
    assert comparison.findings[0].part == "clipping"
    assert comparison.findings[0].cause == f"gradients are clipped by their global norm, to 0.2 on a, and {words} on b"


def test_gradients_of_one_side_are_named(tmp_path):
    def without_bias(gradients):
        return {name: values for name, values in gradients.items() if name != "in.bias"}

    comparison = compared(tmp_path, {"changed": without_bias}, {})
    assert comparison.findings[0].part == "backward"
    assert comparison.findings[0].cause == "in.bias has a gradient on b alone"


def test_dropout_of_one_side_is_named(tmp_path):
    def dropped(hidden):
        return {"in": hidden, "drop": hidden * 2, "late": hidden * 2}

    kinds = {"in": ("tanh", {}), "drop": ("dropout", {"rate": 0.5}), "late": ("linear", {})}
    comparison = compared(
        tmp_path, {"forward": lambda hidden: {"in": hidden, "late": hidden}, "layers": kinds}, {"forward": dropped, "layers": kinds}
    )
    assert (comparison.findings[0].part, comparison.findings[0].layer) == ("forward", "late")
    assert comparison.findings[0].cause.startswith("the layer drop before it is on b alone")


def test_epsilon_without_effect_is_no_cause(tmp_path):
    hat = {**ADAM, "epsilon": 1e-8 / math.sqrt(1 - 0.999)}  # of torch; Keras's 1e-8 acts equally at the first update
    comparison = compared(tmp_path, {"optimizer": hat}, {"optimizer": KERAS, "rate": lambda _: 0.11})
    assert comparison.settings == []
    assert comparison.findings[0].cause == "its step is 1.1 times as large on b"
    small = {"optimizer": {**KERAS, "epsilon": 1e-10}, "rate": lambda _: 0.11}
    comparison = compared(tmp_path / "small", {"optimizer": hat}, small)
    assert [row.setting for row in comparison.settings] == ["epsilon"]
    assert "epsilon" not in comparison.findings[0].cause
    large = {"optimizer": {**KERAS, "epsilon": 1e-1}, "rate": lambda _: 0.11}
    comparison = compared(tmp_path / "large", {"optimizer": hat}, large)
    assert "its epsilon is" in comparison.findings[0].cause


@pytest.mark.parametrize("shares", [(0.9, 0.85), (0.0, 0.3)])
def test_moments_are_judged_while_no_update_is_left_out(tmp_path, shares):
    def momentum(share):
        velocity = {}

        def moved(name, gradient):
            velocity[name] = share * velocity.get(name, 0) + gradient
            return velocity[name]

        return {"moved": moved}

    (finding,) = compared(tmp_path, *map(momentum, shares)).findings
    assert (finding.update, finding.part) == (1, "optimiser")


def test_other_numbers_of_examples_are_not_compared(tmp_path):
    comparison = compared(tmp_path, {}, {"forward": lambda values: {"in": values[:8]}})
    assert comparison.findings == []
    assert any("other numbers of examples" in line for line in comparison.not_exercised)


@pytest.mark.parametrize("labels", [[0, 1, -100, 2], [0, 1, 7, 2]])
def test_losses_with_unusual_labels_are_compared(tmp_path, labels):
    paths = []
    for name, value in (("a", 1.0), ("b", 2.0)):
        writer = Writer(str(tmp_path / name), "0", full=True)
        logits = np.random.default_rng(2).standard_normal((4, 3)).astype("f4")
        add_all(writer, "batch", {"y": np.array(labels)})
        add_all(writer, "forward", {"out": logits})
        kept = (np.array(labels) >= 0) & (np.array(labels) < 3)
        shares = np.exp(logits[kept]) / np.exp(logits[kept]).sum(1, keepdims=True)
        mean = -np.log(shares[np.arange(kept.sum()), np.array(labels)[kept]]).mean()
        writer.add("loss", "loss", np.float32(mean * value * (kept.sum() if name == "b" else 1) / value))
        writer.close()
        paths.append(tmp_path / name)
    finding = compare_recordings(tuple(paths), ("a", "b")).findings[0]
    assert finding.part == "loss"
    assert ("the sum of the cross entropy" in finding.cause) == (-100 in labels)


def test_values_that_are_no_numbers_give_no_traceback(tmp_path):
    first, second = (train(tmp_path / name) for name in "ab")
    values = second / "values.bin"
    values.write_bytes(b"\xff" * values.stat().st_size)
    assert compare_recordings((first, second), ("a", "b")).findings


def test_deep_settings_are_refused(tmp_path):
    path = train(tmp_path / "a")
    with (path / "recording.jsonl").open("a") as file:
        deep = "[" * 100_000 + "]" * 100_000
        file.write(f'{{"kind": "layer", "name": "x", "type": "x", "settings": {{"a": {deep}}}, "framework": "x"}}\n')
    with pytest.raises(UsageError, match="nested more than"):
        compare_recordings((path, path), ("a", "a"))


def test_lines_beyond_the_bound_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_ENTRIES", 40)
    comparison = compared(tmp_path, {}, {})
    assert "lines of a after the first 40" in comparison.not_exercised


def test_tensors_of_numpy_are_recorded(tmp_path):
    recorder.start(str(tmp_path / "a"), full=True)
    try:
        assert recorder.tensor("hidden", np.ones((2, 3))).shape == (2, 3)
        recorder.step()
    finally:
        recorder.stop()
    lines = [json.loads(line) for line in (tmp_path / "a/recording.jsonl").read_text().splitlines()]
    assert [(line["part"], line["name"]) for line in lines if line["kind"] == "tensor"] == [("forward", "hidden")]


SIZES = """
import re, sys
from pathlib import Path
from crosstrain.lockstep.recordings import compare_recordings
comparison = compare_recordings((Path(sys.argv[1]), Path(sys.argv[2])), ("a", "b"))
kibibytes = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # since its exec, unlike ru_maxrss
print(comparison.tensors, kibibytes >> 10)
"""


def test_memory_is_bounded_for_repeated_places(tmp_path):
    """Twenty names of the same 16 MB are compared within the memory of a few."""
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        tensor = {
            "kind": "tensor", "update": 0, "layer": "", "dtype": "float32", "shape": [2000, 2000], "norm": 0.0, "mean": 0.0, "least": 0.0,
            "most": 0.0, "zeros": 0, "invalid": 0, "sketches": [], "array": ["<f4", 0, 4_000_000], "rows": None,
        }  # fmt: skip
        names = [(part, f"w{number}") for part in ("before", "after") for number in range(20)]
        lines = [{"kind": "start", "format": 1, "full": True}, *({**tensor, "part": part, "name": name} for part, name in names)]
        (folder / "recording.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "end", "update": 0}]))
        with (folder / "values.bin").open("wb") as file:
            file.truncate(16_000_000)
    done = subprocess.run(
        [sys.executable, "-c", SIZES, str(tmp_path / "a"), str(tmp_path / "b")], capture_output=True, text=True, check=True, timeout=120
    )
    tensors, megabytes = map(int, done.stdout.split())
    assert tensors >= 20
    assert megabytes < 400


def test_many_equal_shapes_are_aligned_in_seconds(tmp_path):
    for name in "ab":
        draw = np.random.default_rng(4)
        writer = Writer(str(tmp_path / name), "0", full=True)
        tensors = [(f"l{number}.weight", draw.standard_normal((300, 300)).astype("f4")) for number in range(60)]
        add_all(writer, "before", dict(tensors if name == "a" else tensors[::-1]))
        add_all(writer, "after", dict(tensors))
        writer.close()
    begin = time.process_time()
    assert compare_recordings((tmp_path / "a", tmp_path / "b"), ("a", "b")).findings == []
    assert time.process_time() - begin < 15  # all pairs of arrays took a minute


def test_initial_weights_are_read_of_cut_recordings(tmp_path):
    train(tmp_path / "a", count=1, stops=True)
    assert [name for name, _ in initial_weights(str(tmp_path / "a"))] == ["in.weight", "in.bias", "out.weight"]


def test_weights_are_adopted_by_name_before_order():
    weights = [(name, np.full((2, 2), number, "f4")) for number, name in enumerate(("a.weight", "b.weight", "c.bias"))]
    wanted = [("b.weight", (2, 2)), ("a.weight", (2, 2))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name, _ in matched(wanted, weights)] == ["b.weight", "a.weight"]
        assert matched([("x.bias", (2, 2))], weights)[0][0] == "c.bias"
    with pytest.warns(UserWarning, match=r"check that these belong together: x\.weight = a\.weight, y\.weight = b\.weight\."):
        matched([("x.weight", (2, 2)), ("y.weight", (2, 2))], weights)
    with pytest.raises(ValueError, match="no further weight"):
        matched([("x.weight", (3, 2))], weights)


def test_biases_of_recurrent_layers_are_added_or_divided():
    two = [("r.bias_ih_l0", np.full(4, 1.0)), ("r.bias_hh_l0", np.full(4, 2.0))]
    ((name, values),) = matched([("x.bias_sum_l0", (4,))], two)
    assert (name, values.tolist()) == ("r.bias_sum_l0", [3.0] * 4)
    back = matched([("r.bias_ih_l0", (4,)), ("r.bias_hh_l0", (4,))], [(name, values)])
    assert [entry.tolist() for _, entry in back] == [[3.0] * 4, [0.0] * 4]


def test_moved_schedules_are_told_from_others():
    first = {0: 0.2, 1: 0.2, 2: 0.02, 4: 0.02}
    assert next(late for late in SHIFTS if _is_moved(first, {**first, 2: 0.2}, late)) == 1
    assert not any(_is_moved(first, dict.fromkeys(first, 0.2), late) for late in SHIFTS)
