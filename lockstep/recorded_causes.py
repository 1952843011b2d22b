"""Why recordings of two scripts differ, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recorder.recording import sketch
from .losses import cross_entropy
from .recorded import LayerLine, Recorded

Array = NDArray[Any]
FITS = 1e-4
SMOOTHING = (0.05, 0.1, 0.2)


def of_settings(first: LayerLine, second: LayerLine) -> list[tuple[str, str, str]]:
    """Return names and values of the settings that differ between two layers."""
    rows = [] if first.type.lower() == second.type.lower() else [("kind", first.type, second.type)]
    for key in sorted(set(first.settings) & set(second.settings), key=lambda key: (not key.startswith("kind"), key)):
        mine, two = first.settings[key], second.settings[key]
        same = abs(mine - two) <= 1e-9 * abs(mine) if isinstance(mine, (int, float)) and isinstance(two, (int, float)) else mine == two
        if not same:
            rows.append((key, _shown(mine), _shown(two)))
    for number, (side, theirs) in enumerate(((first, second), (second, first))):
        for key in sorted(set(side.settings) - set(theirs.settings)):
            if key.startswith(("penalty", "norm clipped", "values clipped", "moving", "kind of")):
                shown = [_shown(side.settings[key]), "none"]
                rows.append((key, *(shown if not number else shown[::-1])))  # type: ignore[arg-type]
    return rows


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
    for (shape, a), (other_shape, b) in ((x, y) for x in first.variants(whole=whole) for y in second.variants(whole=whole)):
        if shape != other_shape:
            continue
        ones = np.ones(a.size) if whole else sketch(np.ones(shape))
        matrix = np.stack([a, ones], 1)
        (factor, added), *_ = np.linalg.lstsq(matrix, b, rcond=None)
        if float(np.linalg.norm(b - matrix @ (factor, added))) <= FITS * float(np.linalg.norm(b)):
            return f"values are {factor:.6g} times as large, and {added:.6g} is added: other constants of normalisation"
        if whole and len(shape) == 4:
            images, changed = a.reshape(shape), b.reshape(shape)
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
    return f"it is {factor:.6g} times as large on {names[1]}"


def _formula(side: Mapping[str, Sequence[Recorded]]) -> str:
    """Return by which formula a side's loss comes from its last result, "" if that is not known."""
    loss = float(side["loss"][0].line.mean)
    labels = next(
        (mine.array for mine in side.get("batch", []) if mine.array is not None and mine.line.dtype.startswith(("int", "uint"))), None
    )
    results = [mine.array for mine in side.get("forward", []) if mine.array is not None and mine.array.ndim == 2]
    if (
        labels is None
        or not results
        or labels.reshape(-1).shape[0] != results[-1].shape[0]
        or labels.max(initial=0) >= results[-1].shape[1]
    ):
        return ""
    for words, value in _losses(results[-1].astype(np.float64), labels.reshape(-1).astype(int)):
        if abs(value - loss) <= FITS * abs(loss):
            return words
    return ""


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
    for updates, rate, late in ((first_updates, theirs, 1), (second_updates, mine, 0)):
        for parts in updates.values():
            if parts.get("rate") and parts is not (first, second)[1 - late] and abs(parts["rate"][0].line.mean - rate) <= 1e-6 * rate:
                return f"{words}, that of another update: its schedule is moved"
    return words
