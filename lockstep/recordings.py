"""Compare recordings of two scripts: names and layouts are aligned by content."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..recorder.recording import BUCKETS, role, sketch
from ..records.store.lockstep_results import Comparison, Finding, LayerRow, ProbeRow, SettingRow, Side
from .recorded import EXACT, Recorded, Recording, difference, in_another_order
from .recorded_causes import of_data, of_loss, of_rate, of_settings
from .rounding import UNIT

Array = NDArray[Any]
SAME = 1e-3  # largest relative difference of weights that are the same ones
LEAST = 1e-5  # relative differences within an update that rounding explains
INHERITED = 0.1  # relative differences of later gradients, whose kinks and small sums rounding decides
JUMP = 100.0  # by which a faulty layer's result differs more than its input
VARIANCE = "running variance"


def compare_recordings(paths: tuple[Path, Path], names: tuple[str, str]) -> Comparison:
    """Return where two recordings part. Raises UsageError."""
    first, second = (Recording(path, name) for path, name in zip(paths, names, strict=True))
    return _Judge(first, second).comparison()


class _Judge:
    """Aligns two recordings, and judges their updates in the order in which they come about."""

    def __init__(self, first: Recording, second: Recording) -> None:
        self._sides = first, second
        self._common = sorted(set(first.updates) & set(second.updates))
        if not self._common:
            raise UsageError("recordings: they have no update in common; give both the same steps.")
        self._tensors = 0
        self._left: set[str] = set()
        self._expected: set[str] = set()
        self._felt: set[str] = set()  # names of weights with gradients above rounding
        self._pairs_of_types: dict[str, str] = {}  # names of forward tensors
        self._rows: list[LayerRow] = []
        self._findings: list[Finding] = []
        begin = self._common[0]
        self._weights = self._aligned_weights(first.updates[begin].get("before", []), second.updates[begin].get("before", []))
        self._owners = {mine.line.layer: theirs.line.layer for mine, theirs in self._weights if mine.line.layer and theirs.line.layer}

    def comparison(self) -> Comparison:
        """Return what was found."""
        probes = []
        for update in self._common:
            probes.append(self._judge(update))
            if self._findings:
                break
        first, second = (Side(side.name, side.framework, "fp32", 1) for side in self._sides)
        return Comparison(
            first, second, "", "", self._common[-1], self._findings, self._rows, probes, self._tensors, sorted(self._left),
            sorted(self._expected),
            settings=list(self._settings()), recorded=True,
        )  # fmt: skip

    def _settings(self) -> Iterator[SettingRow]:
        """Yield the settings of layers, loss and optimiser that differ."""
        first, second = self._sides
        for name, theirs in {**self._owners, **self._pairs_of_types, "optimizer": "optimizer", "loss": "loss"}.items():
            if name in first.layers and theirs in second.layers:
                for key, mine, two in of_settings(first.layers[name], second.layers[theirs]):
                    yield SettingRow(name, theirs, key, mine, two)

    def _aligned_weights(self, first: Sequence[Recorded], second: Sequence[Recorded]) -> list[tuple[Recorded, Recorded]]:
        """Return pairs of weights: of equal values, then those left by their order and shape."""
        pairs: list[tuple[Recorded, Recorded]] = []
        left = list(second)
        for same in (True, False):
            for mine in first:
                if any(mine is paired for paired, _ in pairs):
                    continue
                roles = [role(theirs.line.name) != role(mine.line.name) for theirs in left]
                measured = [(difference(mine, theirs), place) for place, theirs in enumerate(left)]
                known = [
                    (round(apart, 6) if same else 0.0, roles[place], place)
                    for apart, place in measured
                    if apart < (SAME if same else math.inf)
                ]
                if same and not known:
                    known = [(0.0, roles[place], place) for place, theirs in enumerate(left) if in_another_order(mine, theirs)]
                if known:
                    pairs.append((mine, left.pop(min(known)[2])))
        order = {id(mine): place for place, mine in enumerate(first)}
        return sorted(pairs, key=lambda pair: order[id(pair[0])])

    def _measured(self, mine: Recorded, theirs: Recorded) -> float:
        self._tensors += 1
        apart = difference(mine, theirs)
        return EXACT / 10 if apart > SAME and in_another_order(mine, theirs) else apart

    def _judge(self, update: int) -> ProbeRow:
        first, second = (side.updates[update] for side in self._sides)
        begin = update == self._common[0]
        inherited = 0.0
        if begin:
            self._judge_weights(update)
        else:
            inherited = self._of_state(first, second, "before")
        self._judge_data(update, first.get("batch", []), second.get("batch", []))
        reached = self._judge_forward(update, first.get("forward", []), second.get("forward", []), inherited)
        loss = self._judge_loss(update, first, second, reached)
        gradients = self._judge_gradients(update, first, second, max(reached, loss))
        self._judge_update(update, first, second, gradients)
        return ProbeRow(update, loss, gradients, 0.0, 0.0)

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
            known = [(difference(mine, theirs), place) for place, theirs in enumerate(left)]
            if not known:
                self._left.add(f"the batch's column {mine.line.name}")
                continue
            apart, place = min(known)
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
                alike = alike or [theirs for theirs in left if difference(mine, theirs) < SAME]
                alike = alike or [
                    theirs
                    for theirs in left
                    if _family(self._kind(1, theirs)) == _family(kind) and not math.isinf(difference(mine, theirs))
                ]
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
                self._left.add(f"layers of {self._sides[side].name} without a counterpart: {', '.join(left[:5])}")
        reached, last = inherited, inherited
        for mine, theirs in pairs:
            apart = self._measured(mine, theirs)
            limit = max(LEAST, JUMP * reached)
            sound = apart <= limit
            self._rows.append(LayerRow(update, mine.line.name, self._kind(0, mine), "output", 0.0, apart, sound))
            if not sound and not any(finding.part == "forward" for finding in self._findings):
                cause = self._cause_of_layer(mine, theirs)
                self._findings.append(Finding(update, "forward", mine.line.name, "output", "", apart, limit, cause))
            reached, last = max(reached, apart if sound else 0.0), apart
        return max(reached, last)

    def _cause_of_layer(self, mine: Recorded, theirs: Recorded) -> str:
        first, second = self._sides
        layers = [side.layers.get(tensor.line.name) for side, tensor in zip(self._sides, (mine, theirs), strict=True)]
        if layers[0] is not None and layers[1] is not None:
            differing = [row for row in of_settings(layers[0], layers[1]) if row[0] != "momentum"]
            if differing:
                return "; ".join(f"its {key} is {a} on {first.name} and {b} on {second.name}" for key, a, b in differing[:3])
        formats = [side.layers.get(f"{tensor.line.name} (precision)") for side, tensor in zip(self._sides, (mine, theirs), strict=True)]
        if formats[0] is not None and formats[1] is not None and formats[0].type != formats[1].type:
            return f"it is computed in {formats[0].type} on {first.name} and in {formats[1].type} on {second.name}"
        if "dropout" in self._kind(0, mine):
            return "dropout draws other elements on each side; set its rate to 0 in both scripts to compare the rest"
        factor = _factor(mine, theirs)
        return f"it is {factor:.6g} times as large on {second.name}" if factor is not None else ""

    def _of_state(self, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]], part: str) -> float:
        """Return the largest difference of weights that is inherited from the updates before."""
        return max((self._measured(*pair) for pair in self._paired(first.get(part, []), second.get(part, []))), default=0.0)

    def _paired(self, first: Sequence[Recorded], second: Sequence[Recorded]) -> list[tuple[Recorded, Recorded]]:
        """Return tensors of aligned weights."""
        names = {mine.line.name: theirs.line.name for mine, theirs in self._weights}
        by_name = {theirs.line.name: theirs for theirs in second}
        return [(mine, by_name[names[mine.line.name]]) for mine in first if names.get(mine.line.name) in by_name]

    def _judge_loss(self, update: int, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]], reached: float) -> float:
        if not first.get("loss") or not second.get("loss"):
            return 0.0
        mine, theirs = first["loss"][0], second["loss"][0]
        apart = self._measured(mine, theirs) if mine.line.shape == theirs.line.shape else math.inf
        limit = max(LEAST, JUMP / 10 * reached)
        if apart > limit and not any(finding.part in ("forward", "data", "weights") for finding in self._findings):
            cause = of_loss(first, second, (self._sides[0].name, self._sides[1].name))
            self._findings.append(Finding(update, "loss", "", "loss", "", apart, limit, cause))
        return apart

    def _judge_gradients(self, update: int, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]], reached: float) -> float:
        pairs = self._paired(first.get("gradient", []), second.get("gradient", []))
        sizes = [mine.line.norm for mine, _ in pairs]
        measured = [(mine, theirs, self._measured(mine, theirs)) for mine, theirs in pairs]
        largest = max(sizes, default=0.0)
        judged = [(mine, theirs, apart) for mine, theirs, apart in measured if mine.line.norm > 1e-4 * largest]
        limit = max(10 * LEAST if update == self._common[0] else INHERITED, JUMP * reached)
        bad = [(mine, theirs, apart) for mine, theirs, apart in judged if apart > limit]
        if bad and not self._findings:
            mine, theirs, apart = bad[-1]
            factors = [_factor(mine, theirs) for mine, theirs, _ in judged]
            cause, part, layer = "", "backward", mine.line.layer
            known = [factor for factor in factors if factor is not None]
            if len(bad) == len(judged) == len(known) and max(known) - min(known) <= 1e-3 * abs(max(known)):
                cause, layer = f"all gradients are {known[0]:.6g} times as large on {self._sides[1].name}", ""
            elif known and _factor(mine, theirs) is not None:
                cause = f"it is {_factor(mine, theirs):.6g} times as large on {self._sides[1].name}"
            self._findings.append(Finding(update, part, layer, f"gradient of {mine.line.name}", "", apart, limit, cause, len(bad) - 1))
        self._felt = {mine.line.name for mine, _, _ in judged}
        return max((apart for _, _, apart in judged), default=0.0)

    def _judge_update(self, update: int, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]], gradients: float) -> None:
        steps = [self._steps(side) for side in (first, second)]
        trained = {mine.line.name for mine in first.get("gradient", [])}
        pairs = [(mine, theirs) for mine, theirs in self._weights if mine.line.name in steps[0] and theirs.line.name in steps[1]]
        judged = [(mine, *_step_apart(steps[0][mine.line.name], steps[1][theirs.line.name])) for mine, theirs in pairs]
        begins = update == self._common[0] or self._cause_of_rate(first, second)  # else moments that are not recorded are inherited
        limit = max(10 * LEAST if begins else INHERITED, JUMP * gradients)
        for part, wanted in (("optimiser", True), ("buffers", False)):
            felt = self._felt if wanted else {mine.line.name for mine, _, _ in judged} - trained - self._biased(first, second)
            bad = [
                (mine, apart, factor)
                for mine, apart, factor in judged
                if mine.line.name in felt and apart > limit + _rounding(mine, steps[0][mine.line.name][0][1])
            ]
            if not bad or any(finding.part in ("weights", "data", "forward", "loss", "backward") for finding in self._findings):
                continue
            mine, apart, factor = bad[0]
            cause = self._cause_of_update(part, first, second, mine, factor)
            layer = mine.line.layer if part == "buffers" else ""
            self._findings.append(Finding(update, part, layer, mine.line.name, "", apart, limit, cause, len(bad) - 1))

    def _biased(self, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]]) -> set[str]:
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

    def _steps(self, tensors: dict[str, list[Recorded]]) -> dict[str, list[tuple[tuple[int, ...], Array]]]:
        """Return how an update changed each weight, by its name, for each order of the axes."""
        before = {mine.line.name: mine for mine in tensors.get("before", [])}
        steps = {}
        for mine in tensors.get("after", []):
            if mine.line.name in before and before[mine.line.name].line.shape == mine.line.shape:
                held = before[mine.line.name]
                whole = mine.array is not None and held.array is not None
                steps[mine.line.name] = [
                    (shape, after - old)
                    for (shape, after), (_, old) in zip(mine.variants(whole=whole), held.variants(whole=whole), strict=True)
                ]
        return steps

    def _cause_of_rate(self, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]]) -> str:
        a, b = self._sides
        return of_rate(a.updates, b.updates, first, second, (a.name, b.name))

    def _cause_of_update(
        self, part: str, first: dict[str, list[Recorded]], second: dict[str, list[Recorded]], mine: Recorded, factor: float | None
    ) -> str:
        a, b = self._sides
        if part == "buffers":
            layers = a.layers.get(mine.line.layer), b.layers.get(self._owners.get(mine.line.layer, ""))
            differing = of_settings(layers[0], layers[1]) if layers[0] is not None and layers[1] is not None else []
            wanted = [row for row in differing if row[0] == "momentum"] or [row for row in differing if row[0] != "epsilon"]
            return "; ".join(f"its {key} is {x} on {a.name} and {y} on {b.name}" for key, x, y in wanted)
        if rate := self._cause_of_rate(first, second):
            return rate
        if "optimizer" in a.layers and "optimizer" in b.layers:
            differing = of_settings(a.layers["optimizer"], b.layers["optimizer"])
            if differing:
                return "; ".join(f"its {key} is {x} on {a.name} and {y} on {b.name}" for key, x, y in differing[:4])
        return f"its step is {factor:.6g} times as large on {b.name}" if factor is not None else ""


def _rounding(weight: Recorded, step: Array) -> float:
    """Return what rounding of a weight in float32 adds to its step, relative to the step."""
    return 8 * UNIT * weight.line.norm / max(float(np.linalg.norm(step)), 1e-300)


def _family(kind: str) -> str:
    """Return what a kind of layer is, whatever its variant."""
    activations = ("relu", "relu6", "leakyrelu", "gelu", "elu", "silu", "tanh", "sigmoid", "swish", "hardtanh", "selu")
    return "activation" if kind in activations else kind.removeprefix("max ").removeprefix("average ")


def _factor(first: Recorded, second: Recorded) -> float | None:
    """Return k where b = k · a beyond rounding, else None."""
    whole = first.array is not None and second.array is not None
    return _step_apart(list(first.variants(whole=whole)), list(second.variants(whole=whole)))[1]


def _step_apart(
    first: Sequence[tuple[tuple[int, ...], Array]], second: Sequence[tuple[tuple[int, ...], Array]]
) -> tuple[float, float | None]:
    """Return the least relative difference, and a factor that explains it, or None."""
    best, explained = math.inf, None
    for (shape, values), (other_shape, theirs) in itertools.product(first, second):
        if shape != other_shape:
            continue
        if values.size != theirs.size:
            values, theirs = (sketch(mine.reshape(shape)) if mine.size != BUCKETS else mine for mine in (values, theirs))
        square = float(values @ values)
        apart = float(np.linalg.norm(values - theirs)) / max(math.sqrt(square), 1e-300) if (values != theirs).any() else 0.0
        if apart < best:
            factor = float(values @ theirs) / square if square else 0.0
            left = float(np.linalg.norm(theirs - factor * values)) / max(math.sqrt(square), 1e-300)
            best, explained = apart, factor if left <= 1e-3 * apart else None
    return best, explained
