"""How translations were searched and scored, in training and at the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...metrics import MetricInfo
from .run import Run


@dataclass(frozen=True, slots=True)
class Searched:
    """The common parts of translation signatures, such as the `method` ``beam 4``; else None."""

    method: str | None = None
    sentences: int | None = None
    split_sentences: int | None = None

    @classmethod
    def from_signatures(cls, signatures: Iterable[str | None]) -> Self:
        """Parse signatures, such as ``…|beam4,penalty0.6,+50|sentences:2000``, or None."""
        known = {signature for signature in signatures if signature is not None}
        methods, counts = {_method(signature) for signature in known}, {_sentences(signature) for signature in known}
        return cls(methods.pop() if len(methods) == 1 else None, counts.pop() if len(counts) == 1 else None)

    @classmethod
    def while_training(cls, runs: Iterable[Run]) -> Self:
        """Return what the runs' evaluations in training have in common."""
        known = [run for run in runs if signature_while_training(run) is not None]
        sizes = {(((run.job.get("dataset") or {}).get("sizes")) or {}).get("test") for run in known}
        return replace(cls.from_signatures(map(signature_while_training, known)), split_sentences=sizes.pop() if len(sizes) == 1 else None)

    def in_brackets(self, unit: str = "") -> str:
        """Return a label's suffix: `` (greedy, 500 of 2,000)``, or with `unit`; may be empty."""
        of = "" if self.split_sentences is None else f" of {self.split_sentences:,}"
        count = None if self.sentences is None else f"{self.sentences:,}{of} {unit}".rstrip()
        known = [text for text in (self.method, count) if text is not None]
        return f" ({', '.join(known)})" if known else ""

    @property
    def method_in_brackets(self) -> str:
        """The method as a label's suffix, such as `` (greedy)``; may be empty."""
        return f" ({self.method})" if self.method is not None else ""


def _method(signature: str) -> str | None:
    match = re.search(r"(?:^|\|)(?:(greedy)|beam([0-9]{1,4}))(?:,|\||$)", signature)
    return None if match is None else match[1] or f"beam {match[2]}"


def _sentences(signature: str) -> int | None:
    match = re.search(r"(?:^|\|)sentences:([0-9]{1,15})(?:\||$)", signature)
    return None if match is None else int(match[1])


def searched(info: MetricInfo, runs: Sequence[Run]) -> str:
    """Return the label's suffix of a translation metric in training; else empty."""
    return Searched.while_training(runs).in_brackets() if any(info.name in run.translation_metrics for run in runs) else ""


def measured_on(info: MetricInfo, runs: Sequence[Run]) -> str:
    """Return a sentence on the data behind a figure of evaluations in training."""
    if not any(info.name in run.translation_metrics for run in runs):
        return "Over the whole test split, every example once."
    common = Searched.while_training(runs)
    count = "the first --eval-sentences" if common.sentences is None else f"the first {common.sentences:,}"
    of = "" if common.split_sentences is None else f" of {common.split_sentences:,}"
    how = "as each run says" if common.method is None else {"greedy": "greedily"}.get(common.method, f"with {common.method}")
    return f"Over {count}{of} test sentences, decoded {how}."


def signature_while_training(run: Run) -> str | None:
    """Return the signature of a translating run's evaluations in training, if any."""
    return _planned(run, "training")


def signature_at_the_end(run: Run) -> str | None:
    """Return the signature of a run's final translation, or of the planned one."""
    done: str | None = (run.summary.get("translated") or {}).get("signature")
    return done or _planned(run, "end")


def scored_at_the_end(run: Run) -> str | None:
    """Return the signature of the scores at a run's end, if any."""
    return signature_at_the_end(run) if run.metrics_at_the_end else None


def _planned(run: Run, when: str) -> str | None:
    signatures = run.job.get("translation_signatures")
    return None if not signatures else signatures.get(when)
