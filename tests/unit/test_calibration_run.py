"""Conducting a calibration with simulated workers of known speeds.

Tests check the orders that workers get and the figures from their answers.
"""

import pytest

from crosstrain.backends.base import CalibrationResult
from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.engine.calibration import CalibrationRun, calibrate, component_seconds, spread
from crosstrain.engine.protocol.task_messages import Calibrated, Done
from crosstrain.models.logreg import build

INFO = DataInfo.of_images("toy", {"train": 10, "test": 5}, ImageFeatures((1, 2, 2), 3, (0.0,), (1.0,)))


class Workers:
    """Leading tasks that answer immediately, as if each repetition took so many seconds.

    The first repetition of a part takes `cold` more.
    """

    def __init__(self, *seconds, cold=0.0, silent=False, refused=()):
        self.seconds, self.cold, self.silent = seconds, cold, silent
        self.refused = refused  # each worker's refusal of the direct exchange
        self.orders, self.answers = [], []
        self.disturbed = {}  # by the order's number: how much longer it takes

    def __len__(self):
        return len(self.seconds)

    def send(self, order):
        extra = self.cold if [before.order.component for before in self.orders].count(order.order.component) == 1 else 0.0
        self.orders.append(order)
        for worker, usual in enumerate(self.seconds if not self.silent else ()):
            seconds = usual * self.disturbed.get(order.sequence, 1.0)
            count = max(order.order.count, -(-order.order.seconds // seconds) if order.order.seconds else 0)
            refused = self.refused[worker] if order.order.component == "direct" and self.refused else None
            figures = {"count": int(count), "seconds": count * seconds + extra, "native": {"reduce": 1.0 + worker}, "refused": refused}
            self.answers.append((worker, Calibrated(CalibrationResult(worker, **figures))))
            self.answers.append((worker, Done(order.sequence, "calibrate", 0.1, 0.0)))

    def receive(self, timeout_seconds):
        return self.answers.pop(0) if self.answers else None


def test_lockstep_workers_repeat_equally_without_first():
    workers = Workers(0.001, 0.002, cold=0.4)
    figures = CalibrationRun(workers, 0.2, 5.0, 2).measure("communicate", lockstep=True)
    assert {worker: measured.seconds for worker, measured in figures.items()} == pytest.approx({0: 0.001, 1: 0.002})
    assert all(order.order.seconds == 0.0 for order in workers.orders)
    assert [order.order.count for order in workers.orders[:2]] == [0, 1]
    # The low guess from the cold repetition was corrected: half of 0.2 s on the slower worker, twice.
    assert [order.order.count for order in workers.orders[-2:]] == [50, 50]


def test_independent_workers_repeat_for_the_same_time():
    workers = Workers(1 / 1024, 1 / 256)
    figures = CalibrationRun(workers, 0.25, 5.0, 2).measure("compute", lockstep=False)
    assert [order.order.seconds for order in workers.orders] == [0.0, 0.0, 0.125, 0.125]
    assert [measured.tries for measured in figures.values()] == [[1 / 1024] * 2, [1 / 256] * 2]


def test_short_components_are_repeated_at_least_three_times():
    for seconds, counts in ((0.3, [0, 1, 1, 2]), (0.6, [0, 1, 1])):
        workers = Workers(seconds)
        CalibrationRun(workers, 0.2, 5.0, 2).measure("compute", lockstep=False)
        assert [order.order.count for order in workers.orders] == counts


def test_scattered_tries_are_repeated_and_median_counts():
    workers = Workers(1 / 128)
    workers.disturbed = {3: 4.0}
    (figures,) = CalibrationRun(workers, 0.25, 5.0, 2).measure("compute", lockstep=False).values()
    assert len(figures.tries) == 4
    assert figures.seconds == 1 / 128
    assert spread(figures) == 0.0


def test_scattered_tries_end_after_six():
    for disturbed, seconds, apart in (((3, 5), 1 / 128, 0.0), ((3, 5, 7), 2.5 / 128, 1.2)):
        workers = Workers(1 / 128)
        workers.disturbed = dict.fromkeys(disturbed, 4.0)
        (figures,) = CalibrationRun(workers, 0.25, 5.0, 2).measure("compute", lockstep=False).values()
        assert len(figures.tries) == 6
        assert figures.seconds == pytest.approx(seconds)
        assert spread(figures) == pytest.approx(apart)


def test_silent_workers_are_reported():
    with pytest.raises(RunFailedError, match=r"calibrating 'data' took more than 0\.1 s \(--stall-timeout\)"):
        CalibrationRun(Workers(0.1, silent=True), 0.2, 0.1, 2).measure("data", lockstep=False)


def test_calibration_time_scales_with_training():
    assert [component_seconds(seconds, limited=False) for seconds in (0.1, 2.0, 100.0)] == [0.06, 0.1, 0.2]
    assert component_seconds(0.1, limited=True) == 0.4


@pytest.mark.parametrize(
    ("fields", "components"),
    [
        ({"nodes": 1}, {"data", "compute", "half"}),
        ({"nodes": 1, "batch_size": 1}, {"data", "compute"}),
        ({"nodes": 1, "mode": "async"}, {"data", "compute", "half", "communicate", "message"}),
        ({"nodes": 2, "procs_per_node": 2, "global_batch_size": 30}, {"data", "compute", "half", "communicate", "message"}),
    ],
)
def test_calibration_has_existing_components(fields, components):
    job = Job(backend="torch", **fields)
    workers = Workers(*[0.01] * job.workers)
    node_of_worker = {worker: job.workers - worker for worker in range(job.workers)}
    calibration = calibrate(job, build(INFO), workers, 1.0, node_of_worker)
    assert {order.order.component for order in workers.orders} == components
    assert calibration["payload_bytes"] == 4 * 15
    assert (calibration["batch_size"], calibration["half_batch_size"]) == (job.per_worker_batch, job.per_worker_batch // 2)
    assert [(entry["worker"], entry["node"]) for entry in calibration["workers"]] == [*node_of_worker.items()]
    for figures in calibration["workers"]:
        known = {name[: -len("_seconds")] for name, value in figures.items() if name.endswith("_seconds") and value is not None}
        assert known == {"half_compute" if component == "half" else component for component in components}
        assert figures["spread"] == pytest.approx(0.0)
    assert calibration["native"] == {"reduce": (1 + job.workers) / 2}


@pytest.mark.parametrize(("seconds", "tried"), [(None, True), (10.0, True), (10.1, False), (53.0, False)])
def test_half_batch_is_compiled_only_if_quick(seconds, tried):
    """No order may compile for longer than a start has shown, as nothing else could bound it."""
    workers = Workers(0.01)
    calibration = calibrate(Job(backend="torch"), build(INFO), workers, 1.0, {0: 0}, compiling_seconds=seconds)
    assert ("half" in {order.order.component for order in workers.orders}) == tried
    assert (calibration["workers"][0]["half_compute_seconds"] is not None) == tried == (calibration["half_untried"] is None)
    assert tried or f"the {seconds:.0f} s of the run's own, and it is done where that is 10 s at most" in calibration["half_untried"]


DIRECT = {"direct", "direct_message", "direct_step"}


@pytest.mark.parametrize(
    ("fields", "exchanges", "seconds", "refused", "reason"),
    [
        ({}, ("native", "direct"), 0.01, (), None),
        ({}, ("native", "direct"), 0.01, ("", "no port", ""), "no port"),
        ({}, ("native",), 0.01, (), "backend torch does not support it"),
        ({}, ("native", "direct"), 1.5, (), "the exchange takes 1.5 s, and it is tried where that is 1 s at most"),
        ({"device": "gpu"}, ("native", "direct"), 0.01, (), "it is for CPUs"),
        ({"procs_per_node": 22}, ("native", "direct"), 0.01, (), "it is for 64 workers at most, and here are 66"),
    ],
)
def test_direct_exchange_is_tried_last_or_reason_is_given(fields, exchanges, seconds, refused, reason):
    job = Job(backend="torch", nodes=3, batch_size=1, **fields)
    workers = Workers(*[seconds] * job.workers, refused=refused)
    calibration = calibrate(job, build(INFO), workers, 1.0, dict.fromkeys(range(job.workers), 0), exchanges=exchanges)
    components = [order.order.component for order in workers.orders]
    assert calibration["direct_untried"] == reason
    if reason is None:
        assert set(components[components.index("direct") :]) == DIRECT
        assert all(order.order.seconds == 0.0 for order in workers.orders if order.order.component in DIRECT)
    else:
        assert components.count("direct") == bool(refused)
    for figures in calibration["workers"]:
        for name in DIRECT:
            assert figures[f"{name}_seconds"] == (None if reason else pytest.approx(seconds))


def test_direct_exchange_is_not_tried_without_native_exchange():
    for fields in ({"nodes": 1}, {"nodes": 2, "exchange": "direct"}, {"nodes": 2, "mode": "async"}):
        job = Job(backend="torch", **fields)
        workers = Workers(*[0.01] * job.workers)
        calibration = calibrate(job, build(INFO), workers, 1.0, {0: 0, 1: 1}, exchanges={"native", "direct"})
        assert calibration["direct_untried"] is None
        assert not DIRECT & {order.order.component for order in workers.orders}
