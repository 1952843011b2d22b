"""What a prepared dataset consists of, in figures: for people, and as a JSON document."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from ...core.untrusted.bounded_json import UnreadableError, parse_json
from ..base import LABEL, ImageFeatures
from .manifest import SPLITS
from .stored_dataset import StoredDataset

__all__ = ["described", "distinct_test_pairs"]

_VOCABULARY = "vocabulary.json"
_TEST_LINES = ("test.source.txt", "test.target.txt")
_TEXT_SOURCES = "packages.json"
"""Of a text that is made of others: what it was made of, and ``pairs_sha256``, its digest."""


def described(dataset: StoredDataset) -> dict[str, Any]:
    """Return the facts about a dataset by name, JSON-ready; lengths are in pieces, END included."""
    info = dataset.info
    facts: dict[str, Any] = {"name": info.name, "examples": dict(info.sizes), "synthetic": info.synthetic}
    if isinstance(info.features, ImageFeatures):
        facts |= {"shape": list(info.input_shape), "classes": info.classes}
        if info.class_names:
            facts["class_names"] = list(info.class_names)
        counts = {split: np.bincount(dataset.column(split, LABEL).values, minlength=info.classes) for split in SPLITS}
        facts["smallest_class_examples"] = {split: int(count.min()) for split, count in counts.items()}
    else:
        facts |= {"languages": list(info.features.languages), "bleu_tokenizer": info.features.bleu_tokenizer}
        facts["vocabulary_sizes"] = dict(info.features.vocabulary_sizes)
        for column in (column for column in info.columns if column.varies):
            for split in SPLITS:
                lengths = dataset.column(split, column.name).lengths
                facts[f"{split}_{column.name}"] = {
                    "tokens": int(lengths.sum()),
                    "mean_length": round(float(lengths.mean()), 2),
                    "median_length": int(np.median(lengths)),
                    "longest": int(lengths.max()),
                }
        if (distinct := distinct_test_pairs(dataset)) is not None:
            facts["distinct_test_pairs"] = distinct
        if (digest := _text_sha256(dataset)) is not None:
            facts["text_sha256"] = digest
        if _VOCABULARY in dataset.attachments:
            facts["vocabulary"] = parse_json(dataset.attachment(_VOCABULARY))
    return {**facts, "left_out": list(dataset.left_out), "notes": list(dataset.notes), "path": str(dataset.path), "digest": dataset.digest}


def distinct_test_pairs(dataset: StoredDataset) -> int | None:
    """Return how many of the test split's pairs of sentences are different ones, None of what is no translation."""
    if not set(_TEST_LINES) <= set(dataset.attachments):
        return None
    source, target = (dataset.attachment(name).split(b"\n") for name in _TEST_LINES)
    return len(set(zip(source[:-1], target[:-1], strict=False)))


def _text_sha256(dataset: StoredDataset) -> str | None:
    """Return the digest of a dataset's text where it says one, by which two machines see whether they have the same."""
    if _TEXT_SOURCES not in dataset.attachments:
        return None
    with suppress(UnreadableError):  # an attachment of that name in a dataset of somebody's own
        sources = parse_json(dataset.attachment(_TEXT_SOURCES))
        if isinstance(sources, dict) and isinstance(said := sources.get("pairs_sha256"), str):
            return said
    return None
