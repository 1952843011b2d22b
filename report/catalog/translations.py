"""How the translations of a run were made and scored: the signatures of its records, and what they say in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from .run import Run

__all__ = ["Searched", "scored_at_the_end", "signature_at_the_end", "signature_while_training"]


@dataclass(frozen=True, slots=True)
class Searched:
    """What signatures of translations (docs/run-directory.md) have in common: `method`, ``greedy`` or ``beam 4``, and how many sentences.

    Both are None where they are not known, or not the same everywhere.
    """

    method: str | None = None
    sentences: int | None = None

    @classmethod
    def of(cls, signatures: Iterable[str | None]) -> Self:
        """Read what signatures, such as ``nrefs:1|…|beam4,penalty0.6,+50|sentences:2000``, have in common; None is of no translations."""
        known = {signature for signature in signatures if signature is not None}
        methods, counts = {_method(signature) for signature in known}, {_sentences(signature) for signature in known}
        return cls(methods.pop() if len(methods) == 1 else None, counts.pop() if len(counts) == 1 else None)

    def in_brackets(self, unit: str = "") -> str:
        """Return what is known, after a label: `` (greedy, 500)``, or with the `unit`, ``sentences``; empty where nothing is."""
        count = None if self.sentences is None else f"{self.sentences:,} {unit}".rstrip()
        known = [text for text in (self.method, count) if text is not None]
        return f" ({', '.join(known)})" if known else ""

    @property
    def method_in_brackets(self) -> str:
        """The search alone, after a label: `` (greedy)``; empty where it is not known."""
        return f" ({self.method})" if self.method is not None else ""


def _method(signature: str) -> str | None:
    found = re.search(r"(?:^|\|)(?:(greedy)|beam([0-9]{1,4}))(?:,|\||$)", signature)
    return None if found is None else found[1] or f"beam {found[2]}"


def _sentences(signature: str) -> int | None:
    found = re.search(r"(?:^|\|)sentences:([0-9]{1,15})(?:\||$)", signature)
    return None if found is None else int(found[1])


def signature_while_training(run: Run) -> str | None:
    """Return the signature of the evaluations of a run while it trains; None of a model that translates nothing."""
    return _planned(run, "training")


def signature_at_the_end(run: Run) -> str | None:
    """Return the signature of the translations at a run's end, or, where it never came so far, that of those that were planned."""
    done: str | None = (run.summary.get("translated") or {}).get("signature")
    return done or _planned(run, "end")


def scored_at_the_end(run: Run) -> str | None:
    """Return the signature of the scores at a run's end; None where it has none."""
    return signature_at_the_end(run) if run.metrics_at_the_end else None


def _planned(run: Run, when: str) -> str | None:
    signatures = run.job.get("translation_signatures")
    return None if not signatures else signatures.get(when)
