"""Why recordings of two scripts differ, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recorder.recording import sketch
from .losses import cross_entropy
from .recorded import LayerLine, Recorded, matches
from .recorded_steps import Fit, fit

Array = NDArray[Any]
FITS = 1e-4
EQUAL = 1e-6  # relative differences of losses by rounding
CHANNELS = 16  # most of an image's axis that may be its channels
SMOOTHING = (0.05, 0.1, 0.2)
SHARE = 0.3  # of a difference that a setting must make to be its cause
SHIFTS = (1, -1, 2, -2)  # updates by which a schedule may be moved
AT_FIRST = ("beta1", "beta2", "momentum", "amsgrad")  # settings that change nothing of the first update, which is from empty moments
CLIPPING = ("norm clipped", "norm clipped by tensor", "values clipped")
HAT = " (added before the second moment is corrected)"
Row = tuple[str, str, str]
Pair = tuple[Recorded, Recorded]


@dataclass(frozen=True)
class Evidence:
    """A step that differs: its update, the first ones of both sides, its weight and gradient."""

    update: int
    begins: tuple[int, int]
    weight: Recorded
    gradient: Recorded | None
    step: Fit
    rate: float | None


def of_settings(first: LayerLine, second: LayerLine, begins: tuple[int, int] | None = None) -> list[Row]:
    """Return names and values of the settings that differ between two layers.

    `begins` are the updates at which an optimiser's settings were read: values of epsilon that act as equal ones are left out.
    """
    rows = [] if first.type.lower() == second.type.lower() else [("kind", first.type, second.type)]
    for key in sorted(set(first.settings) & set(second.settings), key=lambda key: (not key.startswith("kind"), key)):
        mine, two = first.settings[key], second.settings[key]
        same = abs(mine - two) <= 1e-9 * abs(mine) if isinstance(mine, (int, float)) and isinstance(two, (int, float)) else mine == two
        if not same and not (key == "epsilon" and begins is not None and _acts_equally(first, second, begins)):
            rows.append((key, _shown(mine), _shown(two)))
    for number, (side, theirs) in enumerate(((first, second), (second, first))):
        for key in sorted(set(side.settings) - set(theirs.settings)):
            if key.startswith(("penalty", "norm clipped", "values clipped", "moving", "kind of")):
                shown = [_shown(side.settings[key]), "none"]
                rows.append((key, *(shown if not number else shown[::-1])))  # type: ignore[arg-type]
    return rows


def of_optimizer(first: LayerLine, second: LayerLine, evidence: Evidence) -> list[Row]:
    """Return the settings that differ and may explain a step's difference."""
    rows = of_settings(first, second, evidence.begins)
    is_epsilon_right = _explains(_of_epsilon((first, second), evidence), evidence)
    decays = [float(side.settings.get("weight decay", 0.0)) for side in (first, second)]
    kept = []
    for row in rows:
        is_without = (
            (row[0] in AT_FIRST and evidence.update == 0 and not (row[0] == "beta2" and is_epsilon_right))
            or (row[0] in ("kind", "rule") and not any(decays) and {row[1].lower(), row[2].lower()} == {"adam", "adamw"})
            or (row[0] == "weight decay" and not _explains(_of_decay(decays, evidence), evidence))
            or (row[0] == "epsilon" and not is_epsilon_right)
            or (row[0] in CLIPPING and evidence.step.factor is None)  # clipping scales a step
        )
        if not is_without and not (row[0] == "rule" and rows[0][0] == "kind"):
            kept.append(row)
    is_epsilon_known = evidence.gradient is not None and all("beta2" in side.settings for side in (first, second))
    hats = [bool(side.settings.get("epsilon hat")) for side in (first, second)]
    if not kept and hats[0] != hats[1] and is_epsilon_known and is_epsilon_right:
        kept.append(("epsilon", *(f"{side.settings['epsilon']:g}{HAT * hat}" for side, hat in zip((first, second), hats, strict=True))))  # type: ignore[arg-type]
    return kept


def _explains(effect: float | None, evidence: Evidence) -> bool:
    """Return whether an effect relative to a step is large enough, or not known."""
    return effect is None or effect >= SHARE * evidence.step.relative


def _of_decay(decays: Sequence[float], evidence: Evidence) -> float | None:
    if evidence.rate is None:
        return None
    return abs(decays[0] - decays[1]) * evidence.rate * evidence.weight.line.norm / max(evidence.step.norm, 1e-300)


def _of_epsilon(sides: tuple[LayerLine, LayerLine], evidence: Evidence) -> float | None:
    """Return how far epsilon alone moves a step of Adam, its gradient in place of moments."""
    if evidence.gradient is None or not all("beta2" in side.settings for side in sides):
        return None
    first, second = (_epsilon(side, evidence.update, side.settings["beta2"]) for side in sides)
    line = evidence.gradient.line
    sizes = np.abs(evidence.gradient.array.astype(np.float64)) if evidence.gradient.array is not None else np.array([line.norm])
    if evidence.gradient.array is None:
        sizes = sizes / math.sqrt(max(math.prod(line.shape), 1))
    steps = [sizes / np.maximum(sizes + epsilon, 1e-300) for epsilon in (first, second)]
    return float(np.linalg.norm(steps[0] - steps[1])) / max(float(np.linalg.norm(steps[0])), 1e-300)


def _epsilon(side: LayerLine, update: int, beta: float) -> float:
    """Return epsilon as it is added to the root of the corrected moment.

    With "epsilon hat" of Kingma and Ba (2015), "Adam", section 2, it is added to the moment that is not corrected.
    """
    epsilon = float(side.settings["epsilon"])
    return epsilon / math.sqrt(1.0 - beta ** (update + 1)) if side.settings.get("epsilon hat") and 0.0 < beta < 1.0 else epsilon


def _acts_equally(first: LayerLine, second: LayerLine, begins: tuple[int, int]) -> bool:
    """Return whether two values of epsilon are equal ones, with either side's beta2."""
    sides = first, second
    return any(
        abs(mine - theirs) <= 1e-6 * max(mine, theirs)
        for beta in {side.settings["beta2"] for side in sides if isinstance(side.settings.get("beta2"), float)}
        for mine, theirs in [[_epsilon(side, update, beta) for side, update in zip(sides, begins, strict=True)]]
    )


def of_clipping(pairs: Sequence[Pair], names: tuple[str, str]) -> str:
    """Return how two sides clip gradients, "" where something else explains their difference."""
    ways = [_way_of_clipping([pair[side] for pair in pairs]) for side in (0, 1)]
    if len(pairs) < 2 or ways[0] == ways[1] or not any("clipped by" in words for words, _ in ways):
        return ""
    caps = [cap for _, cap in ways]
    if any(map(math.isfinite, caps)):
        is_so = _is_cut([pair if math.isfinite(caps[1]) else pair[::-1] for pair in pairs], caps[1] if math.isfinite(caps[1]) else caps[0])
    else:
        is_so = all(not pair[0].line.norm or fit(*pair).factor is not None for pair in pairs)
    return f"gradients are {ways[0][0]} on {names[0]}, and {ways[1][0]} on {names[1]}" if is_so else ""


def _way_of_clipping(gradients: Sequence[Recorded]) -> tuple[str, float]:
    """Return in words how gradients are clipped, and at which value, infinite without one."""
    sizes = [max(abs(mine.line.least), abs(mine.line.most)) for mine in gradients]
    norms = [mine.line.norm for mine in gradients]
    total = math.sqrt(sum(norm**2 for norm in norms))
    if sum(abs(size - max(sizes)) <= 1e-6 * max(sizes) for size in sizes) > 1:
        return f"clipped by value, at {max(sizes):.4g}", max(sizes)
    if sum(abs(norm - max(norms)) <= FITS * max(norms) for norm in norms) > 1:
        return f"clipped by tensor, to the norm {max(norms):.4g}", math.inf
    if total and abs(total / float(f"{total:.2g}") - 1) <= 5e-5:  # a chosen norm has few digits
        return f"clipped by their global norm, to {total:.2g}", math.inf
    return f"not clipped: their norm is {total:.4g}", math.inf


def _is_cut(pairs: Sequence[Pair], cap: float) -> bool:
    """Return whether the second gradients are the first ones times a number, cut at a value."""
    kept = [next(matches(*pair), None) for pair in pairs]
    arrays = [(entry[1].astype(np.float64), entry[2].astype(np.float64)) for entry in kept if entry is not None]
    if any(pair[0].array is None or pair[1].array is None for pair in pairs):
        return all(max(abs(cut.line.least), abs(cut.line.most)) <= cap * (1 + 1e-6) for _, cut in pairs)
    factors = [b[inside] @ a[inside] / (a[inside] @ a[inside]) for a, b in arrays if a[inside := np.abs(b) < cap * (1 - 1e-6)].any()]
    factor = float(np.median(factors)) if factors else 1.0
    return all(np.linalg.norm(np.clip(factor * a, -cap, cap) - b) <= 1e-3 * np.linalg.norm(b) for a, b in arrays)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_data(first: Recorded, second: Recorded) -> str:
    """Return why a batch's column differs."""
    if first.rows is not None and second.rows is not None and first.rows.shape == second.rows.shape:
        scale = FITS * float(np.abs(first.rows).max(initial=1e-30))
        if (np.abs(first.rows - second.rows) <= scale).all() and first.line.norm and len(first.line.shape) > 1:
            return "each example has the same values in another order, of its axes or channels"
        if (np.abs(np.sort(first.rows) - np.sort(second.rows)) <= scale).all() and first.rows.std() > scale:
            return "the order of the examples: another seed or shuffling"
    whole = first.array is not None and second.array is not None
    for shape, x, y in matches(first, second):
        a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
        ones = np.ones(a.size) if whole else sketch(np.ones(shape))
        matrix = np.stack([a, ones], 1)
        (factor, added), *_ = np.linalg.lstsq(matrix, b, rcond=None)
        if float(np.linalg.norm(b - matrix @ (factor, added))) <= FITS * float(np.linalg.norm(b)):
            return f"values are {factor:.6g} times as large, and {added:.6g} is added: other constants of normalisation"
        for axis in (1, 3) if whole and len(shape) == 4 else ():
            images, changed = (np.moveaxis(values.reshape(shape), axis, 1) for values in (a, b))
            if images.shape[1] > CHANNELS:
                continue
            if _by_channel(images, changed):
                return "each channel is scaled and moved: other constants of normalisation"
            if _by_channel(images[:, ::-1], changed):
                return "the channels are reversed, as of BGR and RGB"
    return ""


def _by_channel(first: Array, second: Array) -> bool:
    for channel in range(first.shape[1]):
        x, y = first[:, channel].ravel(), second[:, channel].ravel()
        matrix = np.stack([x, np.ones(x.size)], 1)
        fit, *_ = np.linalg.lstsq(matrix, y, rcond=None)
        if float(np.linalg.norm(y - matrix @ fit)) > FITS * float(np.linalg.norm(y)):
            return False
    return True


def of_loss(first: Mapping[str, Sequence[Recorded]], second: Mapping[str, Sequence[Recorded]], names: tuple[str, str]) -> str:
    """Return why losses of equal results differ: by formula, or by a factor."""
    formulas = [_formula(side) for side in (first, second)]
    if formulas[0] != formulas[1] and formulas[1]:
        return f"it is {formulas[0] or 'another formula'} on {names[0]}, and {formulas[1]} on {names[1]}"
    mine, theirs = (float(side["loss"][0].line.mean) for side in (first, second))
    if not mine:
        return ""
    batch = next((column.line.shape[0] for column in first.get("batch", []) if column.line.shape), 0)
    factor = theirs / mine
    for number, words in (
        (batch, "the sum over the batch instead of its mean"),
        (1 / batch if batch else 0, "divided by the batch once more"),
    ):
        if number and abs(factor / number - 1) <= FITS:
            return f"it is {factor:.6g} times as large on {names[1]}: {words}"
    return f"it is {factor:.6g} times as large on {names[1]}" if abs(factor - 1) > FITS else ""


def _formula(side: Mapping[str, Sequence[Recorded]]) -> str:
    """Return by which formula a side's loss comes from its last result, "" if that is not known."""
    loss = float(side["loss"][0].line.mean)
    labels = next(
        (mine.array for mine in side.get("batch", []) if mine.array is not None and mine.line.dtype.startswith(("int", "uint"))), None
    )
    results = [mine.array for mine in side.get("forward", []) if mine.array is not None and mine.array.ndim == 2]
    if labels is None or not results or labels.size != len(results[-1]) or not np.isfinite(results[-1]).all():
        return ""
    logits, classes = results[-1].astype(np.float64), labels.reshape(-1).astype(np.float64)
    is_counted = classes >= 0  # a negative class is ignored, as torch's -100
    if not is_counted.any() or not np.isfinite(classes).all() or classes.max() >= logits.shape[1]:
        return ""
    errors: dict[str, float] = {}
    for words, value in _losses(logits[is_counted], classes[is_counted].astype(int)):
        errors.setdefault(words, abs(value - loss))
    best = min(errors.values())
    near = [words for words, error in errors.items() if error <= 2 * best + EQUAL * abs(loss)]  # of formulas that agree, the usual one
    return near[0] if best <= FITS * abs(loss) else ""


def _losses(logits: Array, labels: Array) -> Iterator[tuple[str, float]]:
    count = len(labels)

    def entropy(values: Array, smoothing: float = 0.0) -> float:
        return float(cross_entropy(values, labels, np.ones(count), smoothing)[0][0])

    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = shifted / shifted.sum(1, keepdims=True)
    are_shares = bool((logits >= 0).all()) and np.allclose(logits.sum(1), 1, atol=1e-3)
    if are_shares:
        yield "the mean cross entropy of logits", float(-np.log(np.clip(logits[np.arange(count), labels], 1e-7, 1)).mean())
    twice = "a cross entropy that takes softmax of probabilities, so twice"
    yield twice if are_shares else "the mean cross entropy of logits", entropy(logits) / count
    yield twice, entropy(probabilities) / count
    clipped = np.clip(logits, 1e-7, 1 - 1e-7)  # as Keras does, by labels and by vectors
    for shares in (clipped / clipped.sum(1, keepdims=True), np.clip(logits / logits.sum(1, keepdims=True), 1e-7, 1 - 1e-7)):
        yield "a cross entropy that takes logits for probabilities", float(-np.log(shares[np.arange(count), labels]).mean())
    yield "the sum of the cross entropy over the batch, not its mean", entropy(logits)
    for smoothing in SMOOTHING:
        yield f"a cross entropy with label smoothing {smoothing:g}", entropy(logits, smoothing) / count
    wanted = np.eye(logits.shape[1])[labels]
    binary = np.maximum(logits, 0) - logits * wanted + np.log1p(np.exp(-np.abs(logits)))
    yield "a binary cross entropy of each class", float(binary.mean())
    yield "the mean square of softmax's error", float(((probabilities - wanted) ** 2).mean())


def of_rate(
    first_updates: Mapping[int, Any],
    second_updates: Mapping[int, Any],
    first: Mapping[str, Sequence[Recorded]],
    second: Mapping[str, Sequence[Recorded]],
    names: tuple[str, str],
) -> str:
    """Return how the learning rates of an update differ, "" where they do not."""
    if not first.get("rate") or not second.get("rate"):
        return ""
    mine, theirs = first["rate"][0].line.mean, second["rate"][0].line.mean
    if abs(mine - theirs) <= 1e-6 * abs(mine):
        return ""
    words = f"the learning rate is {mine:.6g} on {names[0]} and {theirs:.6g} on {names[1]}"
    rates = [
        {update: parts["rate"][0].line.mean for update, parts in updates.items() if parts.get("rate")}
        for updates in (first_updates, second_updates)
    ]
    late = next((updates for updates in SHIFTS if _is_moved(rates[0], rates[1], updates)), 0)
    if not late:
        return words
    return f"{words}: its schedule is {abs(late)} update{'s' * (abs(late) > 1)} {'later' if late > 0 else 'earlier'} on {names[1]}"


def _is_moved(first: Mapping[int, float], second: Mapping[int, float], late: int) -> bool:
    """Return whether the second rates, of which there are several, are the first ones moved."""
    pairs = [(mine, rate) for update, rate in second.items() if (mine := _rate_at(first, update - late)) is not None]
    return len({rate for _, rate in pairs}) > 1 and all(abs(mine - rate) <= 1e-6 * abs(mine) for mine, rate in pairs)


def _rate_at(rates: Mapping[int, float], update: int) -> float | None:
    """Return the rate of an update, which may lie between two recorded ones of equal rates."""
    before, behind = [known for known in rates if known <= update], [known for known in rates if known >= update]
    if not before or not behind:
        return None
    return rates[max(before)] if rates[max(before)] == rates[min(behind)] else None
