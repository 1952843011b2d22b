"""Compare two trainings: updates from equal states, and layers where these part."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import read_checkpoint
from ..core.errors import UsageError
from ..core.job import Job
from ..launch.driver.training_job import TrainingJob
from ..models.imported.description import ImportedSpec
from ..records.store.lockstep_results import Comparison, Finding, LayerRow, ProbeRow, Side
from . import causes, side
from .arrays import Arrays, read, write_arrays
from .gradients import Sums, compared, extra_decay, relative_of_all, total, with_changed_bits
from .layers import LayerTape, UncomputedError
from .processes import LAYERS, REFERENCE, TRAINING, SideProcesses, ending, layers_computed, receive_all, started
from .reference import has_reference
from .rounding import FLIP_DRAWS, FLIP_LIMIT, FLIP_UNITS, GROWTH_LIMIT, SCALE_LIMIT, UNIT, UPDATE_LIMIT, relative
from .serving import Preload
from .updates import BUFFER, PARAMETER, Rule, parameter_names, updated_in_blocks

Array = NDArray[Any]
BETA_ROUNDING = 2.0**-25  # of decay rates held in float32
CLIP_SLACK = 1e-4  # of a norm after clipping
DECAY_SLACK = 0.05  # of a weight decay that is fitted to gradients


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
    measured: list[Arrays]  # see `measured_gradients`
    gradients: dict[str, Sums]  # of parameters
    results: list[Arrays]
    loss: float  # of the first side
    row: ProbeRow
    findings: list[Finding] = field(default_factory=list)
    flips: bool | None = None  # whether they explain what differs; None: not looked at


class Comparer:
    """Compares the jobs of two sides within a folder."""

    def __init__(
        self, jobs: tuple[Job, Job], names: tuple[str, str], folder: Path, upto: int, checkpoints: Mapping[int, Path] | None = None
    ) -> None:
        """Prepare a comparison; `checkpoints` of the first side spare it training from the start."""
        self._checkpoints = checkpoints or {}
        self._jobs, self._names, self._folder = jobs, names, folder
        trainings = [TrainingJob.from_job(job) for job in jobs]
        self._spec, self._data = trainings[0].model, trainings[0].data
        self._schedules = [side.Schedule(training) for training in trainings]
        self._upto = min([upto, *(schedule.total - 1 for schedule in self._schedules if schedule.total is not None)])
        self._last: _Probe | None = None  # its arrays are several times the model's size, so that no others are kept
        self._probe_rows: dict[int, ProbeRow] = {}
        self._layers_at: dict[int, list[Finding]] = {}
        self._states: dict[int, str] = {}
        self._precisions = ["fp32", "fp32"]
        self._rows_at: dict[int, list[LayerRow]] = {}
        self.tensors = 0
        self.not_exercised: list[str] = []

    def compare(self, interpreters: tuple[str | None, str | None]) -> Comparison:
        """Carry the comparison out, in new processes of these interpreters."""
        sides = [SideProcesses(side, name, interpreter) for side, name, interpreter in zip("AB", self._names, interpreters, strict=True)]
        with ending(sides):
            return self.compare_in(sides)

    def compare_in(self, sides: Sequence[SideProcesses]) -> Comparison:
        """Carry the comparison out in these processes, which may have compared before."""
        began = time.monotonic()
        for job, side_processes in zip(self._jobs, sides, strict=True):
            side_processes.process(TRAINING)
            if has_reference(self._spec):
                side_processes.process(LAYERS).send(Preload(job.model_dump(mode="json")))
        if has_reference(self._spec) and isinstance(self._spec, ImportedSpec):
            sides[0].process(REFERENCE).send(Preload(self._jobs[0].model_dump(mode="json")))
        self._processes, self._sides = sides, started(sides, TRAINING, self._jobs[0].start_timeout)
        findings = self._begin()
        findings += self._search()
        growth = None if findings else self._growth()
        for finding in findings:
            if finding.part in ("forward", "backward") and not finding.cause and self._jobs[0].precision != self._jobs[1].precision:
                finding.cause = self._precision_cause()
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
            self._rows_at.get(findings[0].update if findings else -1, self._rows_at[max(self._rows_at)] if self._rows_at else []),
            [row for _, row in sorted(self._probe_rows.items())],
            self.tensors,
            self.not_exercised,
            growth=growth,
            seconds=time.monotonic() - began,
        )

    def _path(self, name: str) -> str:
        return str(self._folder / f"{name}.arrays")

    def _begin(self) -> list[Finding]:
        initial = [self._path(f"initial-{side_process.name}") for side_process in self._sides]
        for side_process, job, path in zip(self._sides, self._jobs, initial, strict=True):
            side_process.send(side.Begin(job.model_dump(mode="json"), path))
        self._precisions = [answer.precision.split()[0] for answer in receive_all(self._sides)]
        self._states[0] = initial[0]
        first, second = (read(path) for path in initial)
        self.tensors += len(first)
        differing = [name for name in first if name not in second or not np.array_equal(first[name], second[name])]
        if not differing:
            return []
        name = differing[0]
        apart = relative(second[name], first[name]) if name in second and second[name].shape == first[name].shape else float("inf")
        cause = "other initial values, as of another seed" if apart > 1e-3 else "initial values that are rounded otherwise"
        return [Finding(0, "weights", "", name, "", apart, 0.0, cause, len(differing) - 1)]

    def _search(self) -> list[Finding]:
        """Return the findings of the first update at which the sides part."""
        good = -1
        steps = probes(self._upto)
        for step in steps:
            findings = self._findings(step, with_layers=step in (0, steps[-1]))
            if findings:
                return self._first_between(good, step, findings)
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
        row = probe.row
        suspicious = not (  # also where the second side's are not finite
            row.gradients <= _explained(row) and row.loss <= GROWTH_LIMIT * (row.moved_loss + UNIT)
        )
        findings = list(probe.findings or self._decay_findings(probe))
        if has_reference(self._spec) and (with_layers or suspicious or findings):
            findings += self._layer_findings(step, probe)
        if suspicious and not findings and not self._flips_explain(probe):
            findings.append(self._of_whole_pass(step, probe))
        return findings

    def _decay_findings(self, probe: _Probe) -> list[Finding]:
        """Return the finding of a weight decay that is in gradients wrongly, or missing."""
        rules = [self._rule(number, probe.update, probe.state) for number in range(2)]
        rule = rules[0]
        if any(part.decoupled for part in rules) or len({(part.weight_decay, part.exempt) for part in rules}) > 1 or not rule.weight_decay:
            return []
        for exempt, words, sign in ((True, "decays parameters that are to be spared", 1.0), (False, "decays no weights", -1.0)):
            group = total(sums for name, sums in probe.gradients.items() if (name in rule.exempt) == exempt)
            factor, _, deviation = group.share_of_weights
            near = abs(abs(factor) / rule.weight_decay - 1.0) <= DECAY_SLACK
            if near and abs(factor) > SCALE_LIMIT * deviation:
                side_name = "B" if sign * factor > 0 else "A"
                cause = f"weight decay: it {words}"
                return [Finding(probe.update, "optimiser", "", "", side_name, probe.row.gradients, _explained(probe.row), cause)]
        return []

    def _of_whole_pass(self, step: int, probe: _Probe) -> Finding:
        """Return the finding of gradients that differ though each layer by itself agrees."""
        row = probe.row
        part = "backward" if row.loss <= GROWTH_LIMIT * (row.moved_loss + UNIT) else "forward"
        finding = Finding(step, part, error=row.gradients, explained=_explained(row))
        first, second = self._jobs
        rows = self._rows_at.get(step, [])
        norms = [row.layer for row in rows if row.operation == "batch_norm"]
        if first.precision != second.precision:
            finding.cause = self._precision_cause()
        elif first.workers != second.workers and self._spec.buffers:
            finding.layer = norms[0] if norms else ""
            finding.cause = (
                "batch normalisation takes its statistics from each worker's part of a batch, and the sides have"
                f" {first.workers} and {second.workers} workers"
            )
        elif (scale := _measured_scale(probe)) is not None or (scale := total(probe.gradients.values()).scale) is not None:
            finding.part, finding.cause = "optimiser", self._scale_cause(scale)
        elif (decay := extra_decay(probe.gradients)) is not None:
            finding.part, finding.cause = (
                "optimiser",
                f"gradients differ by {decay:.3g} times the weights, a weight decay",
            )
        elif max(first.workers, second.workers) > 1:
            finding.part = "exchange"
            finding.cause = "no layer by itself differs: it is in how the workers' gradients are weighted and summed"
        else:
            finding.cause = "no layer by itself differs: it is in how layers are combined or compiled" if rows else ""
        return finding

    def _scale_cause(self, scale: float) -> str:
        if self._jobs[1].momentum or self._jobs[1].optimizer != "sgd":
            return f"what its momentum takes of gradients is {scale:.6g} times as large, by dampening or by a factor of all gradients"
        return f"all gradients are {scale:.6g} times as large, though no layer by itself differs"

    def _precision_cause(self) -> str:
        first, second = (job.precision for job in self._jobs)
        return f"products are {first} on one side and {second} on the other, as the settings ask"

    def _state_at(self, step: int) -> str:
        """Return the file of the first side's state before an update."""
        if step not in self._states:
            before = max(known for known in self._states if known < step)
            saved = max((known for known in self._checkpoints if before < known <= step), default=None)
            if saved is not None:
                self._states[saved] = self._path(f"state-{saved}")
                write_arrays(self._states[saved], read_checkpoint(self._checkpoints[saved]).arrays)
                return self._state_at(step)
            path = self._path(f"state-{step}")
            self._sides[0].ask(side.Advance(self._states[before], before, step - before, path))
            self._states[step] = path
        return self._states[step]

    def _probe(self, step: int) -> _Probe:
        if self._last is None or self._last.update != step:
            self._last = None
            path = self._state_at(step)
            files = [(self._path(f"gradients-{name}"), self._path(f"after-{name}")) for name in "AB"]
            for side_process, (file, result) in zip(self._sides, files, strict=True):
                side_process.send(side.Probe(path, step, file, result))
            answers = receive_all(self._sides)
            state = read(path)
            measured = [read(file) for file, _ in files]
            results = [read(result) for _, result in files]
            losses, rates = [answer.loss for answer in answers], [answer.rate for answer in answers]
            if not np.isfinite(losses[0]) or not all(np.isfinite(value).all() for value in results[0].values()):
                what = "weights are" if np.isfinite(losses[0]) else "loss is"
                raise UsageError(f"{self._names[0]}: its {what} not finite at update {step + 1}; give a smaller --upto.")
            file = self._send_moved(step, state, 0)
            rules = [self._rule(number, step, state) for number in range(2)]
            gradients = compared(state, measured, rules)
            row = ProbeRow(step, _loss_apart(losses[1], losses[0]), total(gradients.values()).relative, math.nan, math.nan)
            probe = _Probe(step, state, rates, measured, gradients, results, losses[0], row)
            bad = [_bad_update(rules[number], state, measured[number], results[number]) for number in range(2)]
            row.moved_loss = _loss_apart(self._sides[0].receive().loss, losses[0])
            row.moved_gradients = relative_of_all(read(file), measured[0])
            probe.findings = self._update_findings(probe, bad)
            self._last, self._probe_rows[step] = probe, row
        return self._last

    def _send_moved(self, step: int, state: Arrays, number: int, units: float = 1.0) -> str:
        """Ask the first side for loss and gradients at weights that are moved by their last bits.

        Returns the file of the gradients.
        """
        path, file = self._path("moved"), self._path("moved-gradients")
        write_arrays(path, with_changed_bits(state, (step, number), units))
        self._sides[0].send(side.Measure(path, step, file))
        return file

    def _flips_explain(self, probe: _Probe) -> bool:
        """Return whether other last bits of weights move each gradient as far as the sides part.

        That is so where an input of a ReLU, or two of a maximum, lie within rounding of a kink: some bits flip it, and others do not.
        """
        if probe.flips is None:
            apart = {name: sums.relative for name, sums in probe.gradients.items()}
            limits, loss_limit, probe.flips = dict.fromkeys(apart, 0.0), 0.0, False
            for number in range(FLIP_DRAWS + 1):
                units, factor = (FLIP_UNITS, FLIP_LIMIT) if number else (1.0, GROWTH_LIMIT)
                file = self._send_moved(probe.update, probe.state, number, units)
                loss, gradients = self._sides[0].receive().loss, read(file)
                loss_limit = max(loss_limit, factor * (_loss_apart(loss, probe.loss) + UNIT))
                for name, gradient in probe.measured[0].items():
                    limits[name] = max(limits[name], factor * (relative(gradients[name], gradient) + UNIT))
                if probe.row.loss <= loss_limit and all(size <= limits[name] for name, size in apart.items()):
                    probe.row.moved_loss = max(probe.row.moved_loss, _loss_apart(loss, probe.loss))
                    probe.row.moved_gradients = max(probe.row.moved_gradients, relative_of_all(gradients, probe.measured[0]))
                    probe.flips = True
                    break
        return probe.flips

    def _update_findings(self, probe: _Probe, bad: Sequence[tuple[str, float, float] | None]) -> list[Finding]:
        """Judge each side's update by the formulas, from the gradients that it measured itself."""
        findings: list[Finding] = []
        for number, name in enumerate("AB"):
            job, rule = self._jobs[number], self._rule(number, probe.update, probe.state)
            norms = [math.sqrt((sums.first, sums.second)[number]) for sums in probe.gradients.values()]
            if job.clip_norm and (clipping := _clipping(job.clip_norm, norms, sum(sums.count for sums in probe.gradients.values()))):
                findings.append(Finding(probe.update, "clipping", "", "", name, *clipping))
            self.tensors += sum(1 for key in probe.results[number] if not key.startswith(BUFFER))
            if (wrong := bad[number]) is not None:
                key, size, limit = wrong
                findings.append(Finding(probe.update, "optimiser", "", key, name, size, limit, self._rule_cause(rule, probe, number)))
        return findings

    def _rule(self, number: int, step: int, state: Arrays) -> Rule:
        """Return a side's rule for an update, at the rate of its job's schedule."""
        rate = float(self._schedules[number].plan(step, 1).learning_rates[0])
        return Rule.of_job(self._jobs[number], rate, step + 1, parameter_names(state))

    def _rule_cause(self, rule: Rule, probe: _Probe, number: int) -> str:
        gradients, result = probe.measured[number], probe.results[number]
        still = [name for name in parameter_names(probe.state) if np.array_equal(result[PARAMETER + name], probe.state[PARAMETER + name])]
        if still and any((probe.gradients[name].first, probe.gradients[name].second)[number] for name in still):
            return f"{still[0]} is not updated"
        for words, changed in causes.of_rule(rule, probe.state, gradients, result):
            if _bad_update(changed, probe.state, gradients, result) is None:
                return words
        scale = _measured_scale(probe)
        if scale is not None and abs(scale - 1.0) > probe.row.moved_gradients * GROWTH_LIMIT:
            return self._scale_cause(scale)
        factor = _step_factor(rule, probe.state, gradients, result)
        before = float(self._schedules[number].plan(max(probe.update - 1, 0), 1).learning_rates[0])
        if probe.rates[number] == before != rule.rate:
            return f"the learning rate is that of the update before: {before:.8g} instead of {rule.rate:.8g}"
        scaled = replace(rule, rate=rule.rate * factor)
        if _bad_update(scaled, probe.state, gradients, result) is None:
            return f"the learning rate is {factor:.8g} times that of the schedule"
        return ""

    def _layer_findings(self, step: int, probe: _Probe) -> list[Finding]:
        if step not in self._layers_at:
            try:
                self._layers_at[step] = self._compared_layers(step, probe)
            except UncomputedError as error:
                self._layers_at[step], self.not_exercised = [], [f"layers one by one: {error}"]
        return self._layers_at[step]

    def _compared_layers(self, step: int, probe: _Probe) -> list[Finding]:
        tape = LayerTape(self._jobs[0], self._spec, self._data, probe.state, step, self._folder, self._processes[0])
        files = [f"layers-{name}.arrays" for name in "AB"]
        processes = started(self._processes, LAYERS, self._jobs[0].start_timeout)
        requests = [tape.request(job, file) for job, file in zip(self._jobs, files, strict=True)]
        for problem, name in zip(layers_computed(processes, requests), self._names, strict=True):
            if problem is not None:
                raise UncomputedError(f"{name}: {problem}")
        findings = tape.findings([read(str(self._folder / file)) for file in files], self._precisions)
        self._rows_at[step], self.not_exercised = tape.rows, tape.not_exercised
        self.tensors += tape.tensors
        return findings

    def _growth(self) -> float | None:
        """Return the factor by which changed last bits of the first side's weights grow."""
        if self._upto < 2:
            return None
        state = read(self._states[0])
        moved = with_changed_bits(state, 0, 1.0)
        path, result = self._path("moved"), self._path("moved-state")
        write_arrays(path, moved)
        begun = _weights_apart(moved, state)
        self._sides[0].ask(side.Advance(path, 0, self._upto, result))
        ended = _weights_apart(read(result), read(self._state_at(self._upto)))
        return float((ended / begun) ** (1.0 / self._upto)) if begun and ended else 1.0


def _explained(row: ProbeRow) -> float:
    """Return how far rounding explains gradients of a whole pass to differ."""
    return GROWTH_LIMIT * (row.moved_gradients + UNIT)


def _loss_apart(loss: float, sound: float) -> float:
    return abs(loss - sound) / max(abs(sound), 1e-30)


def _measured_scale(probe: _Probe) -> float | None:
    return total(compared(probe.state, probe.measured).values()).scale


def _clipping(limit: float, norms: Sequence[float], count: int) -> tuple[float, float, str] | None:
    """Return how far gradients exceed a norm, what rounding explains, and the cause, if they do.

    `norms`: of each parameter's gradient; `count`: elements of all.
    """
    norm = math.sqrt(sum(part**2 for part in norms))
    slack = CLIP_SLACK + 4 * UNIT * math.sqrt(count)  # of a float32 sum
    if not norm > limit * (1 + slack):
        return None
    by_tensor = abs(max(norms) / limit - 1.0) <= CLIP_SLACK
    cause = "the norm is clipped by tensor, not of all together" if by_tensor else f"its norm is {norm:.6g}, and clip_norm {limit:g}"
    return norm / limit - 1, slack, cause


def _weights_apart(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    return relative_of_all(first, {name: value for name, value in second.items() if name.startswith(PARAMETER)})


def _rate_slack(rule: Rule) -> float:
    """Return how far steps may differ after another framework's moments.

    Decay rates are held in float32, and frameworks correct for that differently.
    """
    return BETA_ROUNDING / (1.0 - rule.beta2) if rule.adam and (rule.update > 1 or not rule.corrected) else 0.0


def _tolerance(rule: Rule, key: str, exact: Array, size: Array) -> Array:
    slack: Array = UNIT * (2.0 * np.abs(exact) + 16.0 * size)
    if key.startswith(PARAMETER):
        slack = slack + _rate_slack(rule) * size
    if "second_moment" in key or "first_moment" in key:
        slack = slack + 2 * BETA_ROUNDING * (np.abs(exact) + size * (1e3 if "second" in key else 10.0))
    return slack


def _bad_update(rule: Rule, before: Arrays, measured: Arrays, after: Arrays) -> tuple[str, float, float] | None:
    """Return the first value that a rule does not explain, its relative error and its limit.

    `measured`: see `measured_gradients`.
    """
    step = _StepFactor()
    for name, values in measured.items():
        sums: dict[str, _Sums] = {}
        for key, part, (exact, size) in updated_in_blocks(rule, before, name, values):
            if key not in after or after[key].shape != values.shape:
                return key, float("inf"), 0.0
            value = after[key].reshape(-1)[part].astype(np.float64)
            sums.setdefault(key, _Sums()).add(value, exact, _tolerance(rule, key, exact, size))
            if key.startswith(PARAMETER):
                step.add(before[key].reshape(-1)[part], value, exact)
        for key, summed in sums.items():
            if summed.is_bad:
                return key, *summed.error_and_limit
    factor, deviation = step.factor_and_deviation
    if abs(factor - 1.0) > SCALE_LIMIT * deviation + 32 * UNIT + _rate_slack(rule):
        return "the step", abs(factor - 1.0), SCALE_LIMIT * deviation
    return None


@dataclass
class _Sums:
    """Sums of squares of a value's error, tolerance and size."""

    errors: float = 0.0
    slacks: float = 0.0
    sizes: float = 0.0
    element: bool = False
    finite: bool = True

    def add(self, value: Array, exact: Array, slack: Array) -> None:
        difference = np.abs(value - exact)
        self.errors, self.slacks = self.errors + float(difference @ difference), self.slacks + float(slack @ slack)
        self.sizes += float(exact @ exact)
        self.element = self.element or bool((difference > 8 * UPDATE_LIMIT * slack + 1e-38).any())
        self.finite = self.finite and bool(np.isfinite(value).all())

    @property
    def is_bad(self) -> bool:
        return not self.finite or self.element or math.sqrt(self.errors) > UPDATE_LIMIT * math.sqrt(self.slacks)

    @property
    def error_and_limit(self) -> tuple[float, float]:
        norm = max(math.sqrt(self.sizes), 1e-300)
        return (math.sqrt(self.errors) / norm, math.sqrt(self.slacks) / norm) if self.finite else (math.inf, 0.0)


@dataclass
class _StepFactor:
    """The factor of all steps against the rule's, and its deviation by rounding."""

    product: float = 0.0
    square: float = 0.0
    spread: float = 0.0

    def add(self, before: Array, value: Array, exact: Array) -> None:
        start = before.astype(np.float64)
        step = exact - start
        self.product += float((value - start) @ step)
        self.square += float(step @ step)
        self.spread += float(((exact * step) ** 2).sum())

    @property
    def factor_and_deviation(self) -> tuple[float, float]:
        return (self.product / self.square, UNIT * math.sqrt(self.spread) / self.square) if self.square else (1.0, 0.0)


def _step_factor(rule: Rule, before: Arrays, measured: Arrays, after: Arrays) -> float:
    """Return the factor of all steps against the rule's."""
    step = _StepFactor()
    for name, values in measured.items():
        for key, part, (exact, _) in updated_in_blocks(rule, before, name, values):
            if key.startswith(PARAMETER):
                step.add(before[key].reshape(-1)[part], after[key].reshape(-1)[part].astype(np.float64), exact)
    return step.factor_and_deviation[0]
