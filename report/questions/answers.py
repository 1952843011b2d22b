"""All answers about a run, in the order in which people ask; a question that a run says nothing about is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ..catalog.run import Run
from ..diagnosis.verdict import Explanation
from .answer import Answer
from .checkpoint_files import checkpoint_files
from .duration import AS_PLANNED, Wanted, duration
from .hardware_use import hardware_use
from .learning import learning
from .learning_rate import learning_rate
from .network_use import network_use
from .step_time_and_network import step_time_and_network
from .training_set import training_set

__all__ = ["answers", "answers_json", "answers_page"]


def answers(run: Run, explanation: Explanation, wanted: Wanted = AS_PLANNED) -> list[Answer]:
    """Return what is to be said of a run that has a summary, or was taken `as_recorded`.

    Raises UsageError for a plan that cannot be, DamagedRunError.
    """
    series, nodes = run.step_series(learning_rates=True), run.node_series()
    found = [
        duration(run, series, wanted),
        learning(run, series),
        hardware_use(explanation),
        network_use(run, explanation, nodes),
        step_time_and_network(run, explanation, series, nodes),
        learning_rate(run, series),
        training_set(run),
        checkpoint_files(run),
    ]
    return [answer for answer in found if answer is not None]


def answers_page(found: Sequence[Answer]) -> RenderableType:
    """Return the answers as lines, each with its question before it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for answer in found:
        table.add_row(f"  {answer.question}", answer.text)
    return Group("", "Questions that people ask of a run (docs/explain.md):", table)


def answers_json(found: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers as a JSON value, by their keys."""
    return {answer.key: {"text": answer.text, **answer.figures} for answer in found}
