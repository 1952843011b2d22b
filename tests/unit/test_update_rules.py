"""The slot names of update rules are in one place."""

from __future__ import annotations

import pytest

from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import choices
from crosstrain.core.update_rules import slot_names

SLOTS = {"sgd": (), "adam": ("first_moment", "second_moment"), "adamw": ("first_moment", "second_moment")}


@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_update_rules_name_their_slots(optimizer):
    assert slot_names(Job.model_validate({"optimizer": optimizer})) == SLOTS[optimizer]


def test_descent_has_a_slot_with_momentum_only():
    assert slot_names(Job(momentum=0.5)) == ("momentum",)


def test_no_other_file_spells_the_slot_names(repository):
    """A second list of them could become outdated."""
    spelled = [
        path.relative_to(repository).as_posix()
        for folder in ("backends", "checkpoint", "engine", "launch")
        for path in sorted((repository / folder).rglob("*.py"))
        if '"first_moment"' in path.read_text(encoding="utf-8") or '"second_moment"' in path.read_text(encoding="utf-8")
    ]
    assert spelled == []
