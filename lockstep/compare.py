"""Compare two trainings: updates from equal states, and the layers of the first update at which they part."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.replay import LayerOnTape
from ..core.job import Job
from ..data.base import IMAGE
from ..data.columns import LENGTHS
from ..data.features import read_column
from ..data.preprocessing import apply_changes, normal_table
from ..data.store.stored_dataset import StoredDataset
from ..launch.driver.training_job import TrainingJob
from ..models.layers.reference import Call
from . import causes, side
from .findings import Comparison, Finding, LayerRow, ProbeRow, Side
from .losses import cause_of_loss
from .processes import SideProcess, two_sides
from .reference import arrays_of, has_reference, tape_of
from .replaying import DATA, INDICES, LOSS, TAPE, TARGET, ReplayRequest, examples_of
from .replaying import STATE as LAYER_STATE
from .rounding import GROWTH_LIMIT, SCALE_LIMIT, UNIT, UPDATE_LIMIT, error, relative, unexplained
from .updates import BUFFER, PARAMETER, Rule, parameter_names, updated

Array = NDArray[Any]
Arrays = dict[str, Array]
EXAMPLES = 16  # of a batch whose layers are computed one by one
BETA_ROUNDING = 2.0**-25  # of decay rates held in float32
CLIP_SLACK = 1e-4  # of a norm after clipping


def probes(upto: int) -> list[int]:
    """Return the probed updates: 0, 1, 2, 4, … and the last."""
    steps, step = [0], 1
    while step < upto:
        steps.append(step)
        step *= 2
    return [*steps, upto] if upto else steps


@dataclass
class _Probe:
    """What both sides make of an update from the same state."""

    update: int
    state: Arrays
    rates: list[float]  # by side, as are the following
    gradients: list[Arrays]
    results: list[Arrays]
    row: ProbeRow
    findings: list[Finding] = field(default_factory=list)


class Comparer:
    """Compares the jobs of two sides within a folder."""

    def __init__(self, jobs: tuple[Job, Job], names: tuple[str, str], folder: Path, upto: int) -> None:
        self._jobs, self._names, self._folder, self._upto = jobs, names, folder, upto
        trainings = [TrainingJob.from_job(job) for job in jobs]
        self._spec, self._data = trainings[0].model, trainings[0].data
        self._schedules = [side.Schedule(training) for training in trainings]
        self._probed: dict[int, _Probe] = {}
        self._layers_at: dict[int, list[Finding]] = {}
        self._states: dict[int, str] = {}
        self._precisions = ["fp32", "fp32"]
        self.layers: list[LayerRow] = []
        self.tensors = 0
        self.not_exercised: list[str] = []

    def compare(self, interpreters: tuple[str | None, str | None], environments: tuple[Mapping[str, str], ...] = ({}, {})) -> Comparison:
        """Carry the comparison out."""
        began = time.monotonic()
        with two_sides(interpreters, environments) as sides:
            self._sides: tuple[SideProcess, SideProcess] = sides
            findings = self._begin()
            findings += self._search()
            growth = None if findings else self._growth()
        for finding in findings:
            finding.side = finding.side and self._names["AB".index(finding.side)]
        first, second = (
            Side(name, job.backend, precision, job.workers)
            for name, job, precision in zip(self._names, self._jobs, self._precisions, strict=True)
        )
        return Comparison(
            first,
            second,
            self._jobs[0].model,
            self._jobs[0].data,
            self._upto,
            findings,
            self.layers,
            [probe.row for _, probe in sorted(self._probed.items())],
            self.tensors,
            self.not_exercised,
            growth=growth,
            seconds=time.monotonic() - began,
        )

    def _path(self, name: str) -> str:
        return str(self._folder / f"{name}.npz")

    def _begin(self) -> list[Finding]:
        initial = [self._path(f"initial-{side_process.name}") for side_process in self._sides]
        for side_process, job, path in zip(self._sides, self._jobs, initial, strict=True):
            side_process.send(side.Begin(job.model_dump(mode="json"), path))
        for number, side_process in enumerate(self._sides):
            self._precisions[number] = side_process.receive().precision.split()[0]
        self._states[0] = initial[0]
        first, second = (read(path) for path in initial)
        self.tensors += len(first)
        differing = [name for name in first if name not in second or not np.array_equal(first[name], second[name])]
        if not differing:
            return []
        name = differing[0]
        apart = relative(second[name], first[name]) if name in second and second[name].shape == first[name].shape else float("inf")
        cause = "other initial values, as of another seed" if apart > 1e-3 else "initial values that are rounded otherwise"
        return [Finding(0, "weights", _layer_of(name), name, "", apart, 0.0, cause, len(differing) - 1)]

    def _search(self) -> list[Finding]:
        """Return the findings of the first update at which the sides part."""
        good = -1
        steps = probes(self._upto)
        for step in steps:
            found = self._findings(step, with_layers=step in (0, steps[-1]))
            if found:
                return self._first_between(good, step, found)
            good = step
        return []

    def _first_between(self, good: int, bad: int, findings: list[Finding]) -> list[Finding]:
        while bad - good > 1:
            middle = (good + bad) // 2
            between = self._findings(middle, with_layers=True)
            if between:
                bad, findings = middle, between
            else:
                good = middle
        return findings if bad in self._layers_at else self._findings(bad, with_layers=True)

    def _findings(self, step: int, *, with_layers: bool) -> list[Finding]:
        probe = self._probe(step)
        suspicious = probe.row.gradients > GROWTH_LIMIT * (probe.row.moved_gradients + UNIT) or probe.row.loss > GROWTH_LIMIT * (
            probe.row.moved_loss + UNIT
        )
        found = list(probe.findings)
        if has_reference(self._spec) and (with_layers or suspicious or found):
            found += self._layer_findings(step, probe)
        if suspicious and not any(finding.part in ("data", "forward", "loss", "backward") for finding in found):
            found.append(self._of_whole_pass(step, probe))
        return found

    def _of_whole_pass(self, step: int, probe: _Probe) -> Finding:
        """Return the finding of gradients that differ though each layer by itself agrees."""
        finding = Finding(step, "forward", error=probe.row.gradients, explained=GROWTH_LIMIT * (probe.row.moved_gradients + UNIT))
        first, second = self._jobs
        norms = [row.layer for row in self.layers if row.operation == "batch_norm"]
        if first.precision != second.precision:
            finding.cause = f"products are {first.precision} on one side and {second.precision} on the other, as the settings ask"
        elif first.workers != second.workers and self._spec.buffers:
            finding.layer = norms[0] if norms else ""
            finding.cause = (
                "batch normalisation takes its statistics from each worker's part of a batch, and the sides have"
                f" {first.workers} and {second.workers} workers"
            )
        elif max(first.workers, second.workers) > 1:
            finding.part = "exchange"
            finding.cause = "no layer by itself differs: it is in how the workers' gradients are weighted and summed"
        else:
            finding.cause = "no layer by itself differs: it is in how layers are combined or compiled" if self.layers else ""
        return finding

    def _state_at(self, step: int) -> str:
        """Return the file of the first side's state before an update."""
        if step not in self._states:
            before = max(known for known in self._states if known < step)
            path = self._path(f"state-{step}")
            self._sides[0].ask(side.Advance(self._states[before], before, step - before, path))
            self._states[step] = path
        return self._states[step]

    def _probe(self, step: int) -> _Probe:
        if step not in self._probed:
            path = self._state_at(step)
            files = [(self._path(f"gradients-{name}"), self._path(f"after-{name}")) for name in "AB"]
            for side_process, (gradients, result) in zip(self._sides, files, strict=True):
                side_process.send(side.Probe(path, step, gradients, result))
            answers = [side_process.receive() for side_process in self._sides]
            state = read(path)
            measured_by = [read(measured) for measured, _ in files]
            results = [read(result) for _, result in files]
            losses, rates = [answer.losses[0] for answer in answers], [answer.rate for answer in answers]
            moved_loss, moved = self._moved(step, state, measured_by[0], losses[0])
            apart = _whole(measured_by[1], measured_by[0])
            row = ProbeRow(step, abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-30), apart, moved_loss, moved)
            probe = _Probe(step, state, rates, measured_by, results, row)
            probe.findings = self._update_findings(probe)
            self._probed[step] = probe
        return self._probed[step]

    def _moved(self, step: int, state: Arrays, gradients: Arrays, loss: float) -> tuple[float, float]:
        """Return how far loss and gradients of the first side move when the weights' last bits change."""
        draw = np.random.default_rng(step)
        moved = {
            name: (value * (1 + UNIT * draw.choice([-1.0, 1.0], value.shape))).astype(np.float32) if name.startswith(PARAMETER) else value
            for name, value in state.items()
        }
        path, measured = self._path("moved"), self._path("moved-gradients")
        side.write_arrays(path, moved)
        answer = self._sides[0].ask(side.Measure(path, step, measured))
        return abs(answer.losses[0] - loss) / max(abs(loss), 1e-30), _whole(read(measured), gradients)

    def _update_findings(self, probe: _Probe) -> list[Finding]:
        """Judge each side's update by the formulas, from the gradients that it measured itself."""
        findings: list[Finding] = []
        for number, name in enumerate("AB"):
            job, gradients, result = self._jobs[number], probe.gradients[number], probe.results[number]
            names = parameter_names(probe.state)
            rate = float(self._schedules[number].plan(probe.update, 1).learning_rates[0])
            rule = Rule.of_job(job, rate, probe.update + 1, names)
            if job.clip_norm:
                norm = float(np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values())))
                if norm > job.clip_norm * (1 + CLIP_SLACK):
                    cause = "the norm is clipped by tensor, not of all together"
                    findings.append(Finding(probe.update, "clipping", "", "", name, norm / job.clip_norm - 1, CLIP_SLACK, cause))
            bad = _bad_update(rule, probe.state, gradients, result)
            self.tensors += len(updated(rule, probe.state, gradients))
            if bad is not None:
                key, size, limit = bad
                cause = self._rule_cause(rule, probe, number)
                findings.append(Finding(probe.update, "optimiser", "", key, name, size, limit, cause))
        return findings

    def _rule_cause(self, rule: Rule, probe: _Probe, number: int) -> str:
        gradients, result = probe.gradients[number], probe.results[number]
        for words, changed in causes.of_rule(rule):
            if _bad_update(changed, probe.state, gradients, result) is None:
                return words
        factor = _step_factor(rule, probe.state, gradients, result)[0]
        before = float(self._schedules[number].plan(max(probe.update - 1, 0), 1).learning_rates[0])
        if probe.rates[number] == before != rule.rate:
            return f"the learning rate is that of the update before: {before:.8g} instead of {rule.rate:.8g}"
        scaled = replace(rule, rate=rule.rate * factor)
        if _bad_update(scaled, probe.state, gradients, result) is None:
            return f"the learning rate is {factor:.8g} times that of the schedule"
        return ""

    def _layer_findings(self, step: int, probe: _Probe) -> list[Finding]:
        if step not in self._layers_at:
            self._layers_at[step] = _LayerComparison(self, step, probe).findings()
        return self._layers_at[step]

    def _growth(self) -> float | None:
        """Return the factor by which a difference of the first side's weights in the last bits grows in an update."""
        if self._upto < 2:
            return None
        state = read(self._states[0])
        draw = np.random.default_rng(0)
        moved = {
            name: (value * (1 + UNIT * draw.choice([-1.0, 1.0], value.shape))).astype(np.float32) if name.startswith(PARAMETER) else value
            for name, value in state.items()
        }
        path, result = self._path("moved"), self._path("moved-state")
        side.write_arrays(path, moved)
        begun = _weights_apart(moved, state)
        self._sides[0].ask(side.Advance(path, 0, self._upto, result))
        ended = _weights_apart(read(result), read(self._state_at(self._upto)))
        return float((ended / begun) ** (1.0 / self._upto)) if begun and ended else 1.0


class _LayerComparison:
    """The layers of an update on both sides, from a tape of the first side's state."""

    def __init__(self, comparer: Comparer, step: int, probe: _Probe) -> None:
        self._comparer, self._step, self._state = comparer, step, probe.state
        self._job, self._spec, self._data = comparer._jobs[0], comparer._spec, comparer._data

    def findings(self) -> list[Finding]:
        """Compute tape and layers, and return what differs."""
        comparer, spec = self._comparer, self._spec
        batches = examples_of(self._job, self._data, spec.objective.weight, self._step, EXAMPLES)
        columns, target = batch_columns(self._data, spec.inputs, batches), batch_columns(self._data, (spec.target,), batches)
        tape, loss = tape_of(self._job, spec, self._state, columns, target, batches.indices, self._step)
        arrays = arrays_of(tape, loss) | {TARGET + name: value for name, value in target.items()}
        side.write_arrays(str(comparer._folder / TAPE), arrays)
        side.write_arrays(
            str(comparer._folder / LAYER_STATE), {name: value for name, value in self._state.items() if not name.startswith("slots/")}
        )
        layers = [LayerOnTape(call.operation, len(call.inputs), list(call.parameters)) for call in tape.layers]
        for number, side_process in enumerate(comparer._sides):
            job = comparer._jobs[number].model_dump(mode="json")
            request = ReplayRequest(job, str(comparer._folder), f"layers-{side_process.name}.npz", self._step, EXAMPLES, layers)
            side_process.send(side.Layers(request))
        for side_process in comparer._sides:
            side_process.receive()
        results = tuple(read(str(comparer._folder / f"layers-{name}.npz")) for name in "AB")
        self._tape, self._loss, self._target = tape, loss, target
        return self._data_findings(results, batches.indices, columns, target) or self._judged(results)

    def _data_findings(
        self, results: Sequence[Arrays], indices: Array, columns: Mapping[str, Array], target: Mapping[str, Array]
    ) -> list[Finding]:
        findings = []
        for name, arrays in zip("AB", results, strict=True):
            if not np.array_equal(arrays[INDICES], indices):
                findings.append(
                    Finding(self._step, "data", side=name, error=1.0, cause="the order of the examples: another seed or shuffling")
                )
                continue
            for prefix, wanted in ((DATA, columns), (TARGET, target)):
                for column, exact in wanted.items():
                    self._comparer.tensors += 1
                    value = arrays[prefix + column]
                    if value.shape != exact.shape or not np.array_equal(value, exact):
                        apart = relative(value, exact) if value.shape == exact.shape else float("inf")
                        cause = _data_cause(value, exact) if column == IMAGE else ""
                        findings.append(Finding(self._step, "data", "", column, name, apart, 0.0, cause))
        return findings

    def _judged(self, results: Sequence[Arrays]) -> list[Finding]:
        findings: list[Finding] = []
        places: list[tuple[str, Call]] = [(str(number), call) for number, call in enumerate(self._tape.layers)]
        for place, call in [*places, (LOSS, self._loss)]:
            if call.operation in ("relu", "conv_pool", "dense_relu") and call.outputs and not (call.results["output"][0] == 0).any():
                self._comparer.not_exercised.append(f"{call.label}: no element is below 0")
            for tensor, (exact, magnitude) in call.results.items():
                findings += self._result(place, call, tensor, exact, magnitude, results)
        return _merged(findings)

    def _result(self, place: str, call: Call, tensor: str, exact: Array, magnitude: Array, results: Sequence[Arrays]) -> list[Finding]:
        errors = [error(arrays[f"{place}/{tensor}"], exact, magnitude) for arrays in results]
        limits = [unexplained(*errors[number], self._comparer._precisions[number]) for number in range(2)]
        self._comparer.tensors += 1
        self._comparer.layers.append(
            LayerRow(self._step, call.label, call.operation, tensor, errors[0][0] * UNIT, errors[1][0] * UNIT, not any(limits))
        )
        findings = []
        for number, is_bad in enumerate(limits):
            if is_bad:
                value = results[number][f"{place}/{tensor}"].astype(np.float64)
                parameters = {name.removeprefix(PARAMETER): array for name, array in self._state.items() if name.startswith(PARAMETER)}
                buffers = {name.removeprefix(BUFFER): array for name, array in self._state.items() if name.startswith(BUFFER)}
                cause = (
                    cause_of_loss(self._spec, self._target, call, tensor, value)
                    if call.operation == "loss"
                    else causes.of_layer(call, tensor, value, parameters, buffers)
                )
                findings.append(
                    Finding(
                        self._step,
                        _part(call, tensor),
                        call.label if call.operation != "loss" else "",
                        tensor,
                        "AB"[number],
                        errors[number][0] * UNIT,
                        max(errors[1 - number][0], 1.0) * UNIT,
                        cause,
                    )
                )
        return findings


def _part(call: Call, tensor: str) -> str:
    if call.operation == "loss":
        return "loss"
    if tensor.startswith("buffer"):
        return "buffers"
    return "forward" if tensor.startswith("output") else "backward"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each part and side, with the number of further layers."""
    kept: dict[tuple[str, str], Finding] = {}
    layers: dict[tuple[str, str], set[str]] = {}
    for finding in findings:
        key = finding.part, finding.side
        kept.setdefault(key, finding)
        layers.setdefault(key, set()).add(finding.layer)
        if not kept[key].cause and finding.layer == kept[key].layer:
            kept[key].cause = finding.cause
    for key, finding in kept.items():
        finding.further = len(layers[key]) - 1
    return list(kept.values())


def _layer_of(key: str) -> str:
    return key.split("/", 1)[-1].rpartition(".")[0]


def read(path: str) -> Arrays:
    """Read arrays by name."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def batch_columns(data: StoredDataset, names: Sequence[str], batches: Any) -> Arrays:
    """Return columns of a batch as forward functions read them, images normalised."""
    columns: Arrays = {}
    for name in names:
        examples = read_column(data, "train", name).take(batches.indices)
        if examples.offsets is not None:
            columns |= {name: examples.padded(), f"{name}{LENGTHS}": examples.lengths}
        elif name == IMAGE:
            images = examples.values if batches.changes is None else apply_changes(examples.values.astype(np.uint8), batches.changes)
            table = normal_table(data.info.mean, data.info.std)
            columns[name] = np.stack([row[images[:, channel]] for channel, row in enumerate(table)], axis=1)
        else:
            columns[name] = examples.values.astype(np.float32) if examples.values.dtype.kind == "f" else examples.values
    return columns


def _data_cause(value: Array, exact: Array) -> str:
    if value.shape != exact.shape:
        return ""
    channels = exact.shape[1]
    if channels > 1 and np.array_equal(value, exact[:, ::-1]):
        return "the channels are permuted: reversed"
    fits = []
    for channel in range(channels):
        x, y = exact[:, channel].ravel().astype(np.float64), value[:, channel].ravel().astype(np.float64)
        factor, summand = np.polyfit(x, y, 1)
        fits.append((factor, summand, float(np.abs(factor * x + summand - y).max())))
    if all(rest <= 1e-4 * (1 + float(np.abs(exact).max())) for _, _, rest in fits):
        factor, summand, _ = fits[0]
        return f"pixels are normalised by other constants: the first channel is {factor:.5g} times as large, plus {summand:.4g}"
    return ""


def _whole(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    difference = sum(float(((first[name] - second[name]) ** 2).sum()) for name in second)
    return float(np.sqrt(difference / max(sum(float((value**2).sum()) for value in second.values()), 1e-300)))


def _weights_apart(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    names = [name for name in second if name.startswith(PARAMETER)]
    return _whole({name: first[name].astype(np.float64) for name in names}, {name: second[name].astype(np.float64) for name in names})


def _rate_slack(rule: Rule) -> float:
    """Return how far steps may differ because decay rates are held in float32, where another framework's moments are continued."""
    return BETA_ROUNDING / (1.0 - rule.beta2) if rule.adam and rule.update > 1 else 0.0


def _tolerance(rule: Rule, key: str, exact: Array, size: Array) -> Array:
    slack: Array = UNIT * (2.0 * np.abs(exact) + 16.0 * size)
    if key.startswith(PARAMETER):
        slack = slack + _rate_slack(rule) * size
    if "second_moment" in key or "first_moment" in key:
        slack = slack + 2 * BETA_ROUNDING * (np.abs(exact) + size * (1e3 if "second" in key else 10.0))
    return slack


def _bad_update(rule: Rule, before: Arrays, gradients: Arrays, after: Arrays) -> tuple[str, float, float] | None:
    """Return the first value that a rule and rounding do not explain, its relative error and its limit."""
    for key, (exact, size) in updated(rule, before, gradients).items():
        if key not in after or after[key].shape != exact.shape or not np.isfinite(after[key]).all():
            return key, float("inf"), 0.0
        slack = _tolerance(rule, key, exact, size)
        difference = np.abs(after[key] - exact)
        limit = float(np.linalg.norm(slack))
        if float(np.linalg.norm(difference)) > UPDATE_LIMIT * limit or bool((difference > 8 * UPDATE_LIMIT * slack + 1e-38).any()):
            norm = max(float(np.linalg.norm(exact)), 1e-300)
            return key, float(np.linalg.norm(difference)) / norm, limit / norm
    factor, deviation = _step_factor(rule, before, gradients, after)
    if abs(factor - 1.0) > SCALE_LIMIT * deviation + 32 * UNIT + _rate_slack(rule):
        return "the step", abs(factor - 1.0), SCALE_LIMIT * deviation
    return None


def _step_factor(rule: Rule, before: Arrays, gradients: Arrays, after: Arrays) -> tuple[float, float]:
    """Return the common factor of all steps against the rule's, and its standard deviation by rounding."""
    product = square = spread = 0.0
    for key, (exact, _) in updated(rule, before, gradients).items():
        if key.startswith(PARAMETER):
            start = before[key].astype(np.float64)
            step = exact - start
            product += float(((after[key] - start) * step).sum())
            square += float((step**2).sum())
            spread += float(((exact * step) ** 2).sum())
    return (product / square, UNIT * float(np.sqrt(spread)) / square) if square else (1.0, 0.0)
