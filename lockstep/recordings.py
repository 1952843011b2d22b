"""Compare recordings of two scripts: names and layouts are aligned by content."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..core.errors import UsageError
from ..recorder.recording import BIAS_SUM, EVALUATION, role
from ..records.store.lockstep_results import Comparison, Finding, LayerRow, ProbeRow, SettingRow, Side
from .recorded import EXACT, LayerLine, Recorded, Recording, difference, fits, in_another_order, is_near
from .recorded_causes import Evidence, of_clipping, of_data, of_loss, of_optimizer, of_rate, of_settings
from .recorded_pairs import SAME, Pair, add_biases, aligned_weights, named_weights
from .recorded_steps import Fit, farthest, fit, fit_of_steps, rounding_of
from .rounding import UNIT
from .text import sentence

LEAST = 1e-5  # relative differences within an update that rounding explains
INHERITED = 0.1  # relative differences of later gradients, whose kinks and small sums rounding decides
BETWEEN = 0.01  # of the way that all weights go in updates that are not recorded
GROWN = 0.01  # relative difference of losses from which on nothing is judged
GROWTH = 2.0  # times an update by which rounding may grow
JUMP = 100.0  # by which a faulty layer's result differs more than its input
VARIANCE, PENALTY = "running variance", "penalty of its weights"
NOT_COMPARED = math.nan
OTHER_EXAMPLES = "losses and results of layers: the sides' recorded batches have other numbers of examples"
Parts = dict[str, list[Recorded]]


def compare_recordings(paths: tuple[Path, Path], names: tuple[str, str]) -> Comparison:
    """Return where two recordings part. Raises UsageError."""
    first, second = (Recording(path, name) for path, name in zip(paths, names, strict=True))
    add_biases(first, second)
    comparison = _Judge(first, second).comparison()
    comparison.sentence = sentence(comparison).strip()
    return comparison


class _Judge:
    """Aligns two recordings, and judges their updates in the order in which they come about."""

    def __init__(self, first: Recording, second: Recording) -> None:
        self._sides = first, second
        self._common = sorted(set(first.updates) & set(second.updates))
        if not self._common:
            raise UsageError("recordings: they have no update in common; give both the same steps.")
        self._tensors = 0
        self._left: set[str] = {*first.not_read, *second.not_read}
        self._expected: set[str] = set()
        self._felt: set[str] = set()  # names of weights with gradients above rounding
        self._explained = 0.0  # relative difference of the steps and gradients of the last update
        self._largest = 0.0  # of gradients of all updates up to now, while none is left out
        self._pairs_of_types: dict[str, str] = {}  # names of forward tensors
        self._rows: list[LayerRow] = []
        self._findings: list[Finding] = []
        begin = self._common[0]
        self._weights = aligned_weights(first.updates[begin].get("before", []), second.updates[begin].get("before", []))
        self._names = {mine.line.name: theirs.line.name for mine, theirs in self._weights}
        self._owners = {mine.line.layer: theirs.line.layer for mine, theirs in self._weights if mine.line.layer and theirs.line.layer}
        for side, theirs in ((first, second), (second, first)):
            if alone := sorted(set(side.updates) - set(theirs.updates)):
                self._left.add(f"updates that {side.name} alone has: {_listed([str(update + 1) for update in alone])}")

    def comparison(self) -> Comparison:
        """Return what was found."""
        probes: list[ProbeRow] = []
        upto = self._common[-1]
        for place, update in enumerate(self._common):
            probes.append(self._judge(update, self._common[place - 1] if place else None))
            if not self._findings and self._has_grown(probes[-1], is_first=not place):
                upto = self._common[place - 1] if place else update
                break
            if self._findings:
                break
        first, second = (Side(side.name, side.framework, "fp32", 1) for side in self._sides)
        return Comparison(
            first, second, "", "", upto, self._findings, self._rows, probes, self._tensors, sorted(self._left),
            sorted(self._expected),
            settings=list(self._settings()), recorded=True,
        )  # fmt: skip

    def _has_grown(self, row: ProbeRow, *, is_first: bool) -> bool:
        """Return whether differences have grown so far that nothing can be said from here on."""
        if not (row.loss > GROWN or row.gradients > INHERITED):
            return False
        kinds = (("losses", row.loss), ("gradients", row.gradients))
        amounts = " and ".join(f"{kind} differ by {apart:.2g}" for kind, apart in kinds if apart > 0.0)
        if is_first:
            cause = "the difference grows from layer to layer, and begins in none of them"
            self._findings.append(Finding(row.update, "backward", "", "", "", max(row.loss, row.gradients, key=abs), LEAST, cause))
        else:
            self._left.add(f"updates from {row.update + 1} on: there {amounts}, which grew from update to update")
        return True

    def _settings(self) -> Iterator[SettingRow]:
        """Yield the settings of layers, loss and optimiser that differ."""
        first, second = self._sides
        for name, theirs in {**self._owners, **self._pairs_of_types, "optimizer": "optimizer", "loss": "loss"}.items():
            if name in first.layers and theirs in second.layers:
                begins = min(first.updates), min(second.updates)
                for key, mine, two in of_settings(first.layers[name], second.layers[theirs], begins):
                    yield SettingRow(name, theirs, key, mine, two)

    def _measured(self, mine: Recorded, theirs: Recorded) -> float:
        self._tensors += 1
        apart = difference(mine, theirs)
        return EXACT / 10 if apart > SAME and in_another_order(mine, theirs) else apart

    def _judge(self, update: int, previous: int | None) -> ProbeRow:
        first, second = (side.updates[update] for side in self._sides)
        inherited = 0.0
        if previous is None:
            self._judge_weights(update)
        else:
            inherited = self._judge_between(update, previous)
        self._judge_data(update, first.get("batch", []), second.get("batch", []))
        reached = self._judge_forward(update, first.get("forward", []), second.get("forward", []), inherited)
        loss = self._judge_loss(update, first, second, reached)
        gradients = self._judge_gradients(update, first, second, max(reached, loss if loss > 0.0 else 0.0))
        self._judge_update(update, first, second, gradients if gradients > 0.0 else 0.0)
        return ProbeRow(update, loss, gradients, 0.0, 0.0)

    def _judge_between(self, update: int, previous: int) -> float:
        """Judge how weights moved since the last update; return the difference of the states."""
        begins, ends = ([side.updates[number] for side in self._sides] for number in (previous, update))
        held = [parts.get("after") or parts.get("before", []) for parts in begins]
        pairs = {mine.line.name: (mine, theirs) for mine, theirs in self._paired(ends[0].get("before", []), ends[1].get("before", []))}
        states = {name: self._measured(*pair) for name, pair in pairs.items()}
        ways = [
            (mine, fit_of_steps((mine, theirs), pairs[mine.line.name]))
            for mine, theirs in self._paired(held[0], held[1])
            if mine.line.name in pairs and self._is_trained(mine) and not (mine.line.invalid and theirs.line.invalid)
        ]
        limit = min(max(BETWEEN, JUMP * self._explained), INHERITED)
        if (worst := farthest(ways, limit, INHERITED, update - previous)) is not None:
            after = max((self._measured(*pair) for pair in self._paired(held[0], held[1]) if self._is_trained(pair[0])), default=0.0)
            self._findings.append(self._of_states(update, previous, worst.line.name, (after, states[worst.line.name])))
        return max(states.values(), default=0.0)

    def _is_trained(self, weight: Recorded) -> bool:
        """Return whether a weight has gradients; where none are recorded, whether its name does."""
        return weight.line.name in self._felt if self._felt else not role(weight.line.name).startswith(("running", "moving", "num_"))

    @staticmethod
    def _of_states(update: int, previous: int, weight: str, apart: tuple[float, float]) -> Finding:
        """Return that weights differ, though they agreed after the last recorded update."""
        before, now = apart
        cause = f"the weights before update {update + 1} differ by {now:.2g}, though they agreed after update {previous + 1}; "
        if update - previous > 1:
            cause += f'the updates between are not recorded. Record them too, with steps="{previous}-{update}", counted from 0'
            growth = (now / max(before, UNIT)) ** (1 / (update - previous))
            if growth <= GROWTH:
                cause += f". Rounding that grows {growth:.3g} times an update also explains it"
        else:
            cause += "something between the two changes them"
        return Finding(update, "weights", "", weight, "", now, 0.0, cause)

    def _judge_weights(self, update: int) -> None:
        differing = [(mine, theirs, apart) for mine, theirs in self._weights if (apart := self._measured(mine, theirs)) > EXACT]
        first, second = (side.updates[update].get("before", []) for side in self._sides)
        missing = len(first) - len(self._weights), len(second) - len(self._weights)
        if any(missing):
            names = self._sides[0].name, self._sides[1].name
            self._left.add(f"weights without a counterpart: {missing[0]} of {names[0]}, {missing[1]} of {names[1]}")
        if differing:
            mine, theirs, apart = differing[0]
            deviations = [line.norm / math.sqrt(max(math.prod(line.shape), 1)) for line in (mine.line, theirs.line)]
            cause = f"its initial values differ: their root mean square is {deviations[0]:.3g} and {deviations[1]:.3g}"
            if 0.0 in deviations:
                cause = f"its initial values are zero on {self._sides[deviations.index(0.0)].name} alone"
            self._findings.append(Finding(update, "weights", "", mine.line.name, "", apart, 0.0, cause, len(differing) - 1))

    def _judge_data(self, update: int, first: Sequence[Recorded], second: Sequence[Recorded]) -> None:
        left = list(second)
        for mine in first:
            known = [(difference(mine, theirs), place) for place, theirs in enumerate(left) if fits(mine, theirs)]
            if not left:
                self._left.add(f"the batch's column {mine.line.name}")
                continue
            apart, place = min(known, default=(math.inf, 0))
            if math.isinf(apart):
                same_rows = [number for number, theirs in enumerate(left) if theirs.line.shape[:1] == mine.line.shape[:1]]
                self._left.add(f"the batch's column {mine.line.name}, whose shape differs")
                if same_rows:
                    left.pop(same_rows[0])
                continue
            theirs = left.pop(place)
            self._tensors += 1
            if apart > EXACT:
                cause = of_data(mine, theirs)
                self._findings.append(Finding(update, "data", "", mine.line.name, "", apart, EXACT, cause))

    def _forward_pairs(self, first: Sequence[Recorded], second: Sequence[Recorded]) -> list[tuple[Recorded, Recorded]]:
        """Return pairs of forward tensors: of aligned layers, and by kind between these."""
        places = {theirs.line.name: place for place, theirs in enumerate(second)}
        anchors = [
            (number, places[self._owners[mine.line.name]])
            for number, mine in enumerate(first)
            if self._owners.get(mine.line.name) in places
        ]
        anchors = [(-1, -1), *sorted(anchors), (len(first), len(second))]
        pairs = []
        for (begin, other_begin), (end, other_end) in itertools.pairwise(anchors):
            if begin >= 0:
                pairs.append((first[begin], second[other_begin]))
            left = list(second[other_begin + 1 : max(other_end, other_begin + 1)])
            for mine in first[begin + 1 : end]:
                kind = self._kind(0, mine)
                alike = [theirs for theirs in left if self._kind(1, theirs) == kind or theirs.line.name == mine.line.name]
                alike = alike or [theirs for theirs in left if is_near(mine, theirs, SAME) and difference(mine, theirs) < SAME]
                alike = alike or [theirs for theirs in left if _family(self._kind(1, theirs)) == _family(kind) and fits(mine, theirs)]
                if alike:
                    left = left[next(place for place, theirs in enumerate(left) if theirs is alike[0]) + 1 :]
                    pairs.append((mine, alike[0]))
        return pairs

    def _kind(self, side: int, tensor: Recorded) -> str:
        layer = self._sides[side].layers.get(tensor.line.name)
        return layer.type if layer is not None else tensor.line.name

    def _judge_forward(self, update: int, first: Sequence[Recorded], second: Sequence[Recorded], inherited: float) -> float:
        """Judge the forward pass; return the difference at its end."""
        pairs = self._forward_pairs(first, second)
        self._pairs_of_types = {**self._pairs_of_types, **{mine.line.name: theirs.line.name for mine, theirs in pairs}}
        for side, tensors in enumerate((first, second)):
            paired = {id(pair[side]) for pair in pairs}
            if left := [mine.line.name for mine in tensors if id(mine) not in paired]:
                self._left.add(f"layers of {self._sides[side].name} without a counterpart: {_listed(left)}")
        reached, last = inherited, inherited
        for place, (mine, theirs) in enumerate(pairs):
            if _has_other_examples(mine, theirs):
                self._left.add(OTHER_EXAMPLES)
                continue
            apart = self._measured(mine, theirs)
            limit = max(LEAST, JUMP * reached)
            sound = apart <= limit
            self._rows.append(LayerRow(update, mine.line.name, self._kind(0, mine), "output", 0.0, apart, sound))
            if not sound and not any(finding.part == "forward" for finding in self._findings):
                cause = "; ".join(
                    filter(None, (self._of_layers_between(pairs, place, (first, second)), self._cause_of_layer(mine, theirs)))
                )
                self._findings.append(Finding(update, "forward", mine.line.name, "output", "", apart, limit, cause))
            reached, last = max(reached, apart if sound else 0.0), apart
        return max(reached, last)

    def _of_layers_between(self, pairs: Sequence[Pair], place: int, tensors: tuple[Sequence[Recorded], Sequence[Recorded]]) -> str:
        """Return which layers one side alone has between the last equal results and a pair's."""
        words = []
        for number, (side, known) in enumerate(zip(self._sides, tensors, strict=True)):
            paired = {id(pair[number]) for pair in pairs}
            order = [id(mine) for mine in known]
            begin = order.index(id(pairs[place - 1][number])) + 1 if place else 0
            alone = [mine.line.name for mine in known[begin : order.index(id(pairs[place][number]))] if id(mine) not in paired]
            words += [f"the layer {name} before it is on {side.name} alone" for name in alone if _has_effect(side.layers.get(name))]
        return "; ".join(words)

    def _cause_of_layer(self, mine: Recorded, theirs: Recorded) -> str:
        first, second = self._sides
        layers = [side.layers.get(tensor.line.name) for side, tensor in zip(self._sides, (mine, theirs), strict=True)]
        if layers[0] is not None and layers[1] is not None:
            differing = [row for row in of_settings(layers[0], layers[1]) if row[0] not in ("momentum", VARIANCE)]
            if differing:
                return _unlike(differing[:3], first, second)
        formats = [side.layers.get(f"{tensor.line.name} (precision)") for side, tensor in zip(self._sides, (mine, theirs), strict=True)]
        if formats[0] is not None and formats[1] is not None and formats[0].type != formats[1].type:
            return f"it is computed in {formats[0].type} on {first.name} and in {formats[1].type} on {second.name}"
        if "dropout" in self._kind(0, mine):
            return "dropout draws other elements on each side; set its rate to 0 in both scripts to compare the rest"
        factor = fit(mine, theirs).factor
        return f"it is {factor:.6g} times as large on {second.name}" if factor is not None else ""

    def _paired(self, first: Sequence[Recorded], second: Sequence[Recorded]) -> list[Pair]:
        """Return tensors of aligned weights."""
        by_name = {theirs.line.name: theirs for theirs in second}
        return [(mine, by_name[self._names[mine.line.name]]) for mine in first if self._names.get(mine.line.name) in by_name]

    def _judge_loss(self, update: int, first: Parts, second: Parts, reached: float) -> float:
        if not first.get("loss") or not second.get("loss"):
            return NOT_COMPARED
        mine, theirs = first["loss"][0], second["loss"][0]
        sizes = [{column.line.shape[0] for column in parts.get("batch", []) if column.line.shape} for parts in (first, second)]
        if penalised := self._with_penalties():
            self._left.add(f"losses: that of {penalised} has penalties of its weights")
            return NOT_COMPARED
        if all(sizes) and sizes[0] != sizes[1]:
            self._left.add(OTHER_EXAMPLES)
            return NOT_COMPARED
        apart = self._measured(mine, theirs) if mine.line.shape == theirs.line.shape else math.inf
        limit = max(LEAST, JUMP / 10 * reached)
        if apart > limit and not any(finding.part in ("forward", "data", "weights") for finding in self._findings):
            cause = of_loss(first, second, (self._sides[0].name, self._sides[1].name))
            unplaced = self._cause_of_mode() or ("" if self._rows else "no layer has a counterpart: it is in the forward pass or the loss")
            self._findings.append(Finding(update, "forward" if unplaced else "loss", "", "loss", "", apart, limit, unplaced or cause))
        return apart

    def _with_penalties(self) -> str:
        """Return the side whose layers alone have penalties of their weights."""
        return self._only_side(lambda side: any(PENALTY in layer.settings for layer in side.layers.values()))

    def _only_side(self, has: Callable[[Recording], bool]) -> str:
        """Return the name of the only side of which something is so, "" for none or both."""
        names = [side.name for side in self._sides if has(side)]
        return names[0] if len(names) == 1 else ""

    def _cause_of_mode(self) -> str:
        """Return which module was not told to train."""
        name = self._only_side(lambda side: EVALUATION in side.layers)
        words = "computes as in evaluation, without dropout and statistics of the batch; call model.train() before"
        return f"the module of {name} {words}" if name else ""

    def _gradients(self, first: Parts, second: Parts) -> dict[str, Pair]:
        """Return gradients by the first side's names of weights; note those without a counterpart."""
        known = []
        for side, parts, names in zip(self._sides, (first, second), (list(self._names), list(self._names.values())), strict=True):
            recorded = parts.get("gradient", [])
            known.append(named_weights(recorded, names))
            paired = {id(mine) for mine in known[-1].values()}
            if left := [mine.line.name for mine in recorded if id(mine) not in paired]:
                self._left.add(f"gradients of {side.name} whose names no weight has: {_listed(left)}")
        return {name: (known[0][name], known[1][theirs]) for name, theirs in self._names.items() if name in known[0] and theirs in known[1]}

    def _with_one_gradient(self, first: Parts, second: Parts) -> list[tuple[str, str]]:
        """Return weights that have a gradient on one side alone, and the side's name."""
        sides = [named_weights(parts.get("gradient", []), list(self._names)) for parts in (first,)]
        sides.append(named_weights(second.get("gradient", []), list(self._names.values())))
        if not all(sides):
            return []
        return [
            (name, self._sides[0 if name in sides[0] else 1].name)
            for name, theirs in self._names.items()
            if (name in sides[0]) != (theirs in sides[1])
        ]

    def _judge_gradients(self, update: int, first: Parts, second: Parts, reached: float) -> float:
        pairs = self._gradients(first, second)
        measured = [(name, pair, self._measured(*pair)) for name, pair in pairs.items()]
        largest = max((mine.line.norm for mine, _ in pairs.values()), default=0.0)
        judged = [entry for entry in measured if entry[1][0].line.norm > 1e-4 * largest]
        limit = max(10 * LEAST if update == self._common[0] else INHERITED, JUMP * reached)
        bad = [entry for entry in judged if entry[2] > limit]
        alone = self._with_one_gradient(first, second)
        if (bad or alone) and not self._findings:
            self._findings.append(self._of_gradients(update, judged, bad, alone, limit))
        self._felt = {name for name, _, _ in judged}
        squares = [(pair[0].line.norm ** 2, apart) for _, pair, apart in judged]
        self._explained = math.sqrt(sum(size * apart**2 for size, apart in squares) / max(sum(size for size, _ in squares), 1e-300))
        return max((apart for _, _, apart in judged), default=NOT_COMPARED)

    def _of_gradients(
        self,
        update: int,
        judged: Sequence[tuple[str, Pair, float]],
        bad: Sequence[tuple[str, Pair, float]],
        alone: Sequence[tuple[str, str]],
        limit: float,
    ) -> Finding:
        """Return where gradients differ, and why."""
        first, second = (side.name for side in self._sides)
        gone = [f"{name} has a gradient on {side} alone" for name, side in alone[:3]]
        penalised = self._with_penalties()
        penalties = f"penalties of weights are in the gradients of {penalised} alone" if penalised else ""
        missing = "; ".join(filter(None, [self._cause_of_mode(), penalties, *gone]))
        if not bad:
            layer = next(mine.line.layer for mine, _ in self._weights if mine.line.name == alone[0][0])
            return Finding(update, "backward", layer, f"gradient of {alone[0][0]}", "", 1.0, 0.0, missing, len(alone) - 1)
        if clipping := of_clipping([pair for _, pair, _ in judged], (first, second)):
            apart = max(apart for _, _, apart in bad)
            cause = "; ".join(filter(None, (missing, clipping)))
            return Finding(update, "clipping", "", "", "", apart, limit, cause)
        name, pair, apart = bad[-1]
        factors = [fit(*known).factor for _, known, _ in judged]
        known_factors = [factor for factor in factors if factor is not None]
        factor, cause, layer = fit(*pair).factor, missing, pair[0].line.layer
        if len(bad) == len(judged) == len(known_factors) and max(known_factors) - min(known_factors) <= 1e-3 * abs(max(known_factors)):
            cause, layer = "; ".join(filter(None, (missing, f"all gradients are {known_factors[0]:.6g} times as large on {second}"))), ""
        elif factor is not None:
            cause = "; ".join(filter(None, (missing, f"it is {factor:.6g} times as large on {second}")))
        return Finding(update, "backward", layer, f"gradient of {name}", "", apart, limit, cause, len(bad) - 1)

    def _judge_update(self, update: int, first: Parts, second: Parts, gradients: float) -> None:
        judged = self._steps(first, second)
        trained = set(self._gradients(first, second)) if self._felt else {mine.line.name for mine, _ in judged if self._is_trained(mine)}
        begins = update == self._common[0] or self._cause_of_rate(first, second)  # else moments that are not recorded are inherited
        self._largest = max(self._largest, gradients)
        inherited = min(INHERITED, max(10 * LEAST, JUMP * self._largest)) if self._is_recorded_up_to(update) else INHERITED
        limit = max(10 * LEAST if begins else inherited, JUMP * gradients)
        for part, wanted in (("optimiser", self._felt or trained), ("buffers", {mine.line.name for mine, _ in judged} - trained)):
            felt = wanted if part == "optimiser" else wanted - self._biased(first, second)
            bad = [(mine, step) for mine, step in judged if mine.line.name in felt and step.relative > limit + rounding_of(mine, step.norm)]
            if not bad or any(finding.part not in ("optimiser", "buffers") for finding in self._findings):
                continue
            mine, step = bad[0]
            cause = self._cause_of_update(part, update, (first, second), mine, step)
            layer = mine.line.layer if part == "buffers" else ""
            self._findings.append(Finding(update, part, layer, mine.line.name, "", step.relative, limit, cause, len(bad) - 1))

    def _is_recorded_up_to(self, update: int) -> bool:
        """Return whether no update before was left out, so that nothing unknown is inherited."""
        return self._common[: update + 1] == list(range(update + 1))

    def _steps(self, first: Parts, second: Parts) -> list[tuple[Recorded, Fit]]:
        """Return how an update's changes of the weights fit."""
        before, after = (
            {mine.line.name: (mine, theirs) for mine, theirs in self._paired(first.get(part, []), second.get(part, []))}
            for part in ("before", "after")
        )
        return [(pair[0], fit_of_steps(pair, after[name])) for name, pair in before.items() if name in after]

    def _biased(self, first: Parts, second: Parts) -> set[str]:
        """Return the running variances that differ as two formulas do, by n and n − 1."""
        names = set()
        for mine, theirs in self._paired(first.get("after", []), second.get("after", [])):
            layers = self._sides[0].layers.get(mine.line.layer), self._sides[1].layers.get(theirs.line.layer)
            ways = {str(layer.settings.get(VARIANCE)) for layer in layers if layer is not None}
            counts = [int(known) for way in ways for known in re.findall(r"by n − 1 = (\d+)", way)]
            if role(mine.line.name) == "running_var" and len(ways) == 2 and counts and difference(mine, theirs) <= 1.05 / max(counts[0], 1):
                names.add(mine.line.name)
                sides = " and ".join(sorted(ways))
                self._expected.add(f"batch normalisation keeps the running variance of a batch {sides}")
        return names

    def _cause_of_rate(self, first: Parts, second: Parts) -> str:
        a, b = self._sides
        return of_rate(a.updates, b.updates, first, second, (a.name, b.name))

    def _cause_of_update(self, part: str, update: int, parts: tuple[Parts, Parts], mine: Recorded, step: Fit) -> str:
        a, b = self._sides
        if part == "buffers":
            layers = a.layers.get(mine.line.layer), b.layers.get(self._owners.get(mine.line.layer, ""))
            differing = of_settings(layers[0], layers[1]) if layers[0] is not None and layers[1] is not None else []
            wanted = [row for row in differing if row[0] == "momentum"] or [row for row in differing if row[0] != "epsilon"]
            return _unlike(wanted, a, b)
        if rate := self._cause_of_rate(*parts):
            rules = of_settings(a.layers["optimizer"], b.layers["optimizer"]) if "optimizer" in a.layers and "optimizer" in b.layers else []
            return "; ".join(filter(None, (rate, _unlike([row for row in rules if row[0] == "kind"], a, b))))
        if role(mine.line.name).startswith(BIAS_SUM) and step.factor is not None:
            words = "a recurrent layer has one bias on one side, and two that are added on the other"
            return f"{words}: it moves {step.factor:.3g} times as far on {b.name}"
        if "optimizer" in a.layers and "optimizer" in b.layers:
            gradient = named_weights(parts[0].get("gradient", []), list(self._names)).get(mine.line.name)
            rate_used = parts[0]["rate"][0].line.mean if parts[0].get("rate") else None
            evidence = Evidence(update, (min(a.updates), min(b.updates)), mine, gradient, step, rate_used)
            if differing := of_optimizer(a.layers["optimizer"], b.layers["optimizer"], evidence):
                return _unlike(differing[:4], a, b)
        return f"its step is {step.factor:.6g} times as large on {b.name}" if step.factor is not None else ""


def _has_other_examples(mine: Recorded, theirs: Recorded) -> bool:
    """Return whether two results are of batches of other sizes, as those of an accumulation are."""
    first, second = mine.line.shape, theirs.line.shape
    return len(first) == len(second) > 0 and first[0] != second[0] and math.prod(first[1:]) == math.prod(second[1:])


def _has_effect(layer: LayerLine | None) -> bool:
    """Return whether a layer is no change of shape, and no dropout of nothing."""
    if layer is None:
        return False
    return layer.type not in ("flatten", "identity", "inputlayer", "reshape", "permute") and layer.settings.get("rate", 1.0) != 0.0


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _unlike(rows: Sequence[tuple[str, str, str]], first: Recording, second: Recording) -> str:
    """Return the settings of two sides that differ, in words."""
    return "; ".join(f"its {key} is {mine} on {first.name} and {theirs} on {second.name}" for key, mine, theirs in rows)


def _family(kind: str) -> str:
    """Return what a kind of layer is, whatever its variant."""
    activations = ("relu", "relu6", "leakyrelu", "gelu", "elu", "silu", "tanh", "sigmoid", "swish", "hardtanh", "selu")
    return "activation" if kind in activations else kind.removeprefix("max ").removeprefix("average ")
