"""Holders of tickets of the parameter server."""

import numpy as np

from crosstrain.backends.base import Plan
from crosstrain.backends.parameter_server.tickets import TicketQueue, cut_plan


def test_workers_hold_tickets_until_used_or_lost():
    queue = TicketQueue()
    queue.put(cut_plan(Plan(0, 6, 0, 0, np.full(6, 0.1), 0), 3)[:3])
    for worker in range(3):
        queue.join(worker)
        assert queue.working == set(range(worker))
        queue.take(worker)
    queue.finish(0, None)
    queue.release(2, None)
    assert queue.working == {1}
    assert not queue.quiescent  # the lost worker's ticket waits for another one
    queue.take(0)
    assert queue.working == {0, 1}
