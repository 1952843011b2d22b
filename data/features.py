"""Checks of the features of columns, their form in JSON, and normalisation by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .base import Dataset, Split, TableFeatures, TextFeatures
from .columns import Column, ColumnSpec

Features = TextFeatures | TableFeatures
MAX_ELEMENTS = 1 << 16  # of a column's mean and standard deviation
MAX_NUMBER = 1e30


def features_problem(columns: Sequence[ColumnSpec], features: Features) -> str | None:
    """Return why data of these columns cannot have these features, or None."""
    specs = {column.name: column for column in columns}
    if problem := _target_problem(specs, features):
        return problem
    return _statistics_problem(specs, features) if isinstance(features, TableFeatures) else None


def _target_problem(specs: Mapping[str, ColumnSpec], features: Features) -> str | None:
    name, classes = features.target, features.classes
    if isinstance(features, TextFeatures) and not name:
        return "classes: there is no target column that has them" if classes or features.class_names else None
    if name not in specs:
        return f"target: there is no column {name!r}; there are {', '.join(specs)}"
    spec = specs[name]
    if isinstance(features, TextFeatures) and (not classes or name in features.vocabulary_sizes or len(specs) == 1):
        return f"target: {name!r} of a text has to be a column of classes next to a column of tokens"
    if isinstance(features, TableFeatures) and len(specs) == 1:
        return f"target: {name!r} is the only column; there is no input"
    if classes and (spec.dtype, spec.shape) == ("int64", ()):
        count = classes
    elif not classes and spec.dtype == "uint8" and len(spec.shape) == 1 and spec.shape[0]:
        count = spec.shape[0]
    elif not classes and spec.dtype == "float32" and not spec.varies:
        count = 0
    else:
        return (
            f"target: {name!r} is {spec.dtype} {list(spec.shape)} with {classes} classes; it has to be int64 [] with classes, or without"
            " them float32 or uint8 [classes]"
        )
    if features.class_names and len(features.class_names) != count:
        return f"class_names: {len(features.class_names)} names for {count} classes"
    return None


def _statistics_problem(specs: Mapping[str, ColumnSpec], features: TableFeatures) -> str | None:
    if set(features.mean) != set(features.std):
        return "mean and std: they have to be of the same columns"
    for name, mean in features.mean.items():
        std = features.std[name]
        if name not in specs or specs[name].dtype != "float32" or name == features.target:
            return f"mean and std: {name!r} is no input column of float32"
        elements = math.prod(specs[name].fixed_shape)
        if not len(mean) == len(std) == elements <= MAX_ELEMENTS:
            wanted = f"{elements}, one for each element, at most {MAX_ELEMENTS:,}"
            return f"mean and std: those of {name!r} have {len(mean)} and {len(std)} numbers, and have to have {wanted}"
        if not (all(abs(m) <= MAX_NUMBER for m in mean) and all(1 / MAX_NUMBER <= s <= MAX_NUMBER for s in std)):
            return f"mean and std: those of {name!r} have to be within ±{MAX_NUMBER:g}, the std at least {1 / MAX_NUMBER:g}"
    return None


def values_problem(features: Features, name: str, least: float, most: float) -> str | None:
    """Return why a column cannot have values from `least` to `most`, or None."""
    limit = None
    if name == features.target:
        limit = features.classes or (2 if isinstance(most, int) else None)  # whole numbers without classes are 0 or 1
    if isinstance(features, TextFeatures):
        limit = features.vocabulary_sizes.get(name, limit)
    elif not (math.isfinite(least) and math.isfinite(most)):
        return f"{name} has values that are no finite numbers"
    elif name in features.mean:
        largest = max(abs(least), abs(most)) + max(map(abs, features.mean[name]))
        if largest > float(np.finfo(np.float32).max) * min(features.std[name]):
            return f"{name} lies in {least:g}…{most:g}, which is beyond float32 once it is normalised"
    return None if not limit or (least >= 0 and most < limit) else f"{name} lies in {least}…{most}, not in 0…{limit - 1}"


def described_features(features: Features) -> dict[str, Any]:
    """Return features as JSON; those of a table have `mean`."""
    described: dict[str, Any] = {}
    if isinstance(features, TextFeatures):
        described = {"vocabulary_sizes": dict(features.vocabulary_sizes), "languages": list(features.languages)}
        described["bleu_tokenizer"] = features.bleu_tokenizer
    else:
        described = {kind: {name: list(values) for name, values in getattr(features, kind).items()} for kind in ("mean", "std")}
    if features.target:
        described |= {"target": features.target, "classes": features.classes, "class_names": list(features.class_names)}
    return described


def features_from(described: Mapping[str, Any]) -> Features:
    """Return the features that `described_features` described."""
    target = described.get("target", ""), described.get("classes", 0), tuple(described.get("class_names", ()))
    if described.get("mean") is None:
        languages, tokenizer = tuple(described.get("languages", ())), described.get("bleu_tokenizer", "13a")
        return TextFeatures(dict(described["vocabulary_sizes"]), languages, tokenizer, *target)
    mean, std = ({name: tuple(values) for name, values in described[kind].items()} for kind in ("mean", "std"))
    return TableFeatures(*target, mean, std)


def read_column(data: Dataset, split: Split, name: str) -> Column:
    """Return a column as models read it: normalised where a table has its mean and std.

    (x − mean) / std is computed in float64 and rounded once to float32, so that every backend has the same bits.
    """
    column, features = data.column(split, name), data.info.features
    if not isinstance(features, TableFeatures) or name not in features.mean:
        return column
    shape = column.values.shape[1:]
    mean, std = (np.reshape(values[name], shape) for values in (features.mean, features.std))
    normalised = np.empty(column.values.shape, np.float32)
    step = max(1, _BLOCK // max(1, math.prod(shape)))
    for start in range(0, len(normalised), step):
        normalised[start : start + step] = (column.values[start : start + step].astype(np.float64) - mean) / std
    return replace(column, values=normalised)


_BLOCK = 1 << 20  # elements whose float64 values are in memory at a time


def column_statistics(values: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) of each element of a float32 column [n, …]; a constant one has std 1.

    Sums are rounded once, so that neither order nor processor matters.
    """
    rows = np.reshape(values, (len(values), -1)).astype(np.float64)
    means = [math.fsum(element) / len(rows) for element in rows.T]
    deviations = [math.sqrt(math.fsum((element - mean) ** 2) / len(rows)) for element, mean in zip(rows.T, means, strict=True)]
    return tuple(means), tuple(deviation or 1.0 for deviation in deviations)
