"""How large is the training set: examples, bytes, and of text lines and tokens?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.untrusted.console import one_line
from ...records.text.numbers import bytes_text, count_text
from ..catalog.run import Run
from .answer import Answer, digits3

__all__ = ["training_set"]


def training_set(run: Run) -> Answer | None:
    """Return what the run trained on, from ``job.json``; None where that does not say it."""
    dataset: Mapping[str, Any] = run.job.get("dataset") or {}
    sizes: Mapping[str, int] = dataset.get("sizes") or {}
    if "train" not in sizes:
        return None
    stored: Mapping[str, Any] = (dataset.get("stored") or {}).get("train") or {}
    amount, elements = stored.get("bytes"), stored.get("elements") or {}
    figures = {
        "name": dataset.get("name"),
        "examples": sizes["train"],
        "test_examples": sizes.get("test"),
        "bytes": amount,
        "lines": sizes["train"] * len(elements) if _is_text(dataset) and elements else None,
        "tokens": dict(elements) if _is_text(dataset) else None,
        "elements": dict(elements),
        "epochs_trained": run.summary.get("epochs"),
    }
    return Answer("training_set", "training set", one_line(_text(dataset, figures)), figures)


def _is_text(dataset: Mapping[str, Any]) -> bool:
    return bool(dataset.get("vocabulary_sizes"))


def _text(dataset: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    lines = figures["lines"]
    of = f" ({count_text(lines)} lines)" if lines is not None and lines != figures["examples"] else ""
    parts = [f"{count_text(figures['examples'])} examples{of} of {figures['name'] or 'an unnamed dataset'}"]
    parts.append("size not recorded by the version that wrote it" if figures["bytes"] is None else bytes_text(figures["bytes"]))
    what = "tokens" if _is_text(dataset) else "elements"
    parts += [f"{count_text(number)} {what} of {column}" for column, number in figures["elements"].items()]
    if figures["epochs_trained"] is not None:
        epochs = digits3(figures["epochs_trained"])
        parts.append(f"{epochs} epoch{'s' if epochs != '1' else ''}")
    if figures["test_examples"]:
        parts.append(f"{count_text(figures['test_examples'])} test examples")
    return ", ".join(parts)
