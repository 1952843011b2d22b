"""Are the scores of a run's evaluations from here on comparable with those so far? Its best is chosen among all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.job import Job
from ...engine.translation.decodings import described
from ...models.objectives import Objective

__all__ = ["score_problem"]

_RELEASE = re.compile(r"(?<=\|version:)[^|]+")
"""Of sacrebleu, in a signature of its."""


def score_problem(recorded: Mapping[str, Any], job: Job, objective: Objective, test_examples: int) -> list[str]:
    """Return how scores of a resumed job would differ from those of the run whose ``job.json`` is `recorded`: nothing, or one sentence.

    It says what to give, or to install, where they are to be as before. Raises MissingPackageError where sacrebleu is not installed.
    """
    before = (recorded.get("translation_signatures") or {}).get("training")
    if before is None or objective.translation is None:
        return []
    now = described(job, objective, test_examples)
    if now is None or now["training"] == before:
        return []
    remedies = []
    if (sentences := recorded.get("eval_sentences")) not in (None, job.eval_sentences):
        remedies.append(f"give --eval-sentences {sentences}")
    releases = [None if found is None else found[0] for found in map(_RELEASE.search, (before, now["training"]))]
    if None not in releases and releases[0] != releases[1]:
        remedies.append(f"install the release of sacrebleu that it had: pip install sacrebleu=={releases[0]}")
    remedy = f" ({', and '.join(remedies)})" if remedies else ""
    return [f"evaluations would be scored by {now['training']!r}, and so far they were by {before!r}{remedy}"]
