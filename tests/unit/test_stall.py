"""A stall is the silence of tasks while this process listens, not a pause of its own."""

import time

import pytest
from test_impossible_answers import Task, train

from crosstrain.core.errors import StalledRunError

LIMIT_SECONDS = 1.0


class Away(Task):
    """Each wait takes far longer than the limit, as in a stopped process; then answers arrive."""

    absences = 0

    def receive(self, timeout_seconds):
        if self.absences < 2:
            self.absences += 1
            time.sleep(2 * LIMIT_SECONDS)
            return None
        return super().receive(timeout_seconds)


class Silent(Task):
    """Never answers."""

    def receive(self, timeout_seconds):
        time.sleep(timeout_seconds)


def test_paused_process_is_no_stall():
    assert train(Away(), stall_timeout=LIMIT_SECONDS).updates_reported == 24


def test_silent_task_is_a_stall():
    began = time.monotonic()
    with pytest.raises(StalledRunError, match=r"stalled: no step finished for 1 s \(--stall-timeout 1\)"):
        train(Silent(), stall_timeout=LIMIT_SECONDS)
    assert time.monotonic() - began >= LIMIT_SECONDS
