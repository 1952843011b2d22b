"""Absence times of restarted workers, from a run's events."""

from crosstrain.records.store.schema import EventRecord
from crosstrain.records.summary import _restarts


def event(name, time_seconds, **detail):
    return EventRecord(name, time_seconds, detail)


def test_a_worker_that_comes_back_alone_costs_the_run_no_time():
    figures = _restarts(
        [event("task_failed", 3.0, task="worker-1"), event("task_restarted", 7.5, task="worker-1"), event("run_ended", 20.0)]
    )
    assert figures == {"restarts": 1, "restart_seconds_lost": 0, "worker_restarts": 1, "worker_absent_seconds": 4.5}


def test_an_absence_lasts_until_it_or_all_start_anew_or_the_run_ends():
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
