"""A worker that delivers nothing while others do is reported once, and nothing else is."""

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.engine.worker_watch import MAX_TICK_SECONDS, WorkerWatch

LIMIT = 10.0


class Watched:
    """A watch with a fake clock, and its reports."""

    def __init__(self, workers):
        self.now, self.events, self.messages = 0.0, [], []
        self.watch = WorkerWatch(
            workers, LIMIT, lambda event, **detail: self.events.append((event, detail["worker"])), self.messages.append, self.clock
        )

    def clock(self):
        return self.now

    def turn(self, *workers, seconds=1.0):
        self.now += seconds
        self.watch.tick()
        for worker in workers:
            self.watch.on_updates(worker)


def test_silent_worker_and_its_return_are_reported_once():
    run = Watched(3)
    for _ in range(30):
        run.turn(0, 2)
    assert run.events == [("worker_silent", 1)]
    assert "worker-1 has finished no step for 11 s" in run.messages[0]
    run.turn(0, 1, 2)
    assert run.events == [("worker_silent", 1), ("worker_answers", 1)]


def test_common_pause_and_stopped_driver_are_no_silence():
    run = Watched(2)
    for _ in range(20):
        run.turn(0, 1)
        run.turn(seconds=1000 * LIMIT)  # the driver was stopped
    for _ in range(20):
        run.turn()  # an evaluation: no worker delivers
    run.watch.on_quiescent()
    run.turn(0)
    run.turn(0, 1)
    assert run.events == []


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 3)), max_size=200))
def test_worker_within_the_limit_is_never_reported(turns):
    run = Watched(3)
    last = dict.fromkeys(range(3), 0.0)
    passed = 0.0
    for worker, seconds in turns:
        passed += min(seconds, MAX_TICK_SECONDS)
        late = {late_worker for late_worker in last if passed - last[late_worker] > LIMIT}
        before = len(run.events)
        run.turn(worker, seconds=seconds)
        last[worker] = passed
        assert {name for event, name in run.events[before:] if event == "worker_silent"} <= late - {worker}


def test_restarting_worker_is_not_expected():
    run = Watched(3)
    run.turn(0, 1, 2)
    run.watch.on_absent(1)
    for _ in range(40):
        run.turn(0, 2)
    run.watch.on_back(1)
    for _ in range(int(LIMIT)):
        run.turn(0, 2)
    assert run.events == []
    for _ in range(10):
        run.turn(0, 2)
    assert run.events == [("worker_silent", 1)]
