"""Absence times of restarted workers, from a run's events."""

from crosstrain.records.store.schema import EventRecord
from crosstrain.records.summary import _restarts


def event(name, time_seconds, **detail):
    return EventRecord(name, time_seconds, detail)


def test_restarts_of_single_worker_cost_run_no_time():
    figures = _restarts(
        [event("task_failed", 3.0, task="worker-1"), event("task_restarted", 7.5, task="worker-1"), event("run_ended", 20.0)]
    )
    assert figures == {"restarts": 1, "restart_seconds_lost": 0, "worker_restarts": 1, "worker_absent_seconds": 4.5}


def test_absence_ends_with_task_restart_run_restart_or_run_end():
    events = [
        event("task_failed", 1.0, task="worker-1"),
        event("task_failed", 2.0, task="worker-1"),  # lost again while starting: absent all the time
        event("task_failed", 3.0, task="worker-2"),
        event("attempt_failed", 5.0, cause="the chief"),
        event("run_restarted", 9.0, seconds_lost=6.0),
        event("task_failed", 11.0, task="worker-2"),
        event("run_ended", 12.0),
    ]
    figures = _restarts(events)
    assert figures == {"restarts": 5, "restart_seconds_lost": 6.0, "worker_restarts": 4, "worker_absent_seconds": 8.0 + 6.0 + 1.0}
