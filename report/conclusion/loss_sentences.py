"""Whether runs that should train alike do so, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ...records.text.numbers import number_text
from .loss_agreement import EQUAL_WITHIN, LossAgreement
from .number_words import counted

__all__ = ["agreements_told"]

MOST_PAIRS_TOLD = 2
"""More pairs of runs are counted, those whose losses are equal, and those whose losses part."""


def agreements_told(found: Sequence[LossAgreement]) -> list[str]:
    """Return how pairs of runs agree, a sentence each; where they are many, how many of them do and how many do not."""
    if len(found) <= MOST_PAIRS_TOLD:
        return [_agreement_told(one) for one in found]
    alike = [one for one in found if one.parts_at is None]
    parts = [one for one in found if one.parts_at is not None]
    parted = [_agreement_told(one) for one in parts]
    if len(parts) > MOST_PAIRS_TOLD:
        places = sorted(one.parts_at or 0 for one in parts)
        parted = [
            f"{len(parts)} of {counted(len(found), 'pair')} of runs of one seed agree within {EQUAL_WITHIN:.2%} up to update "
            f"{places[0] - 1:,}{'' if places[0] == places[-1] else f' to {places[-1] - 1:,}'}."
        ]
    same = [one for one in alike if one.identical]
    near = [one for one in alike if not one.identical]
    told = []
    if same:
        told.append(f"{len(same)} of {counted(len(found), 'pair')} of runs: bitwise identical over {_updates(same)}.")
    if near:
        largest = max(one.largest for one in near)
        told.append(
            f"{len(near)} of {counted(len(found), 'pair')} of runs agree within {EQUAL_WITHIN:.2%} over {_updates(near)} "
            f"(largest difference {largest:.1e})."
        )
    return [*told, *parted]


def _updates(found: Sequence[LossAgreement]) -> str:
    """Return over how many updates pairs agree: the number, or the fewest and the most."""
    counts = sorted(one.updates for one in found)
    return counted(counts[0], "update") if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,} updates"


def _agreement_told(one: LossAgreement) -> str:
    pair = f"{one.run} and {one.other}"
    over = f"over {counted(one.updates, 'update')}"
    if one.identical:
        return f"{pair}: bitwise identical {over}."
    if one.parts_at is None or one.losses is None:
        return f"{pair} agree within {EQUAL_WITHIN:.2%} {over} (largest difference {one.largest:.1e})."
    mine, theirs = one.losses
    told = f"({number_text(theirs, 6)} and {number_text(mine, 6)})"
    if one.parts_at == 1:
        return f"{pair} differ from the first update on {told}."
    return f"{pair} agree within {EQUAL_WITHIN:.2%} until they diverge at update {one.parts_at:,} of {one.updates:,} {told}."
