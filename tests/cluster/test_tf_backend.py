"""The TensorFlow backend in real processes: sync against float64, async by each update."""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tf_tasks
from logreg_reference import Reference, distance
from processes import free_ports, script_process
from torch_tasks import TinyData, plans

from crosstrain.backends.base import make_sampler
from crosstrain.backends.tf import BACKEND
from crosstrain.core.job import Job
from crosstrain.models.logreg import build

pytestmark = pytest.mark.cluster

SCRIPT = Path(tf_tasks.__file__)
process = partial(script_process, SCRIPT)
OPTIMISERS = {
    "sgd": {},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "momentum": {"momentum": 0.8},
    "adam": {"optimizer": "adam", "weight_decay": 0.02, "lr": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01},
}
THREE = {"nodes": 3, "global_batch_size": 11, **OPTIMISERS["nesterov"]}
"""Slices of 4, 4 and 3; the last batch of an epoch has two examples, so that the third rank has none."""


def scenario(folder, **fields):
    path = folder / "scenario.json"
    path.write_text(json.dumps({"port": free_ports(20), **fields}))
    return str(path)


def reference_run(options, chosen):
    """The same plans in float64, for any number of servers; returns (losses, final reference)."""
    job, data = Job(backend="tf", **{key: value for key, value in options.items() if key != "ps"}), TinyData()
    reference, sampler = Reference(build(data.info).initial(job.seed), job), make_sampler(job, data)
    x, y = data.inputs("train").reshape(200, -1), data.labels("train")
    losses = []
    for plan in chosen:
        whole = sampler.whole(plan.epoch, 0, plan.count)
        losses += [reference.step(x[whole.batch(i)], y[whole.batch(i)], plan.learning_rates[i]) for i in range(plan.count)]
    return np.array(losses), reference


def check_run(arrays, options, chosen, name):
    """Check a run's arrays against the formulas, and its repeated epoch against the first pass."""
    losses, reference = reference_run(options, chosen)
    tolerance = 1e-5 if name.startswith("sgd") else 1e-4
    assert arrays["updates"].tolist() == [len(losses)] * 2, name
    np.testing.assert_allclose(arrays["losses"], losses, rtol=tolerance, err_msg=name)
    assert distance({key: arrays[f"end/{key}"] for key in reference.w}, reference.w) < tolerance, name
    loss_sum, correct = reference.evaluate(TinyData().inputs("test").reshape(90, -1), TinyData().labels("test"))
    np.testing.assert_allclose(arrays["evaluated"], [90, loss_sum, correct, len(losses)], rtol=1e-4, err_msg=name)
    assert np.array_equal(arrays["again"], arrays["losses"][-len(arrays["again"]) :]), name
    assert all(np.array_equal(arrays[f"repeated/{key}"], arrays[f"end/{key}"]) for key in reference.w), name


@pytest.mark.thorough
def test_optimizers_follow_formulas_and_fused_is_bit_identical(tmp_path):
    jobs = {name: {"global_batch_size": 10, **options} for name, options in OPTIMISERS.items()}
    jobs["adam-unfused"] = {**jobs["adam"], "steps_per_call": 1}
    with process("alone", scenario(tmp_path, jobs=jobs)) as started:
        assert started.wait(200) == 0
    arrays = {name: np.load(tmp_path / f"{name}.npz") for name in jobs}
    for name, options in jobs.items():
        check_run(arrays[name], options, list(plans(Job(backend="tf", **options), TinyData(), 3)), name)
        assert all(np.array_equal(cut, arrays[name]["again"]) for cut in arrays[name]["cut"]), name
    for key in arrays["adam"].files:
        assert np.array_equal(arrays["adam"][key], arrays["adam-unfused"][key]), key


@pytest.mark.thorough
def test_three_ranks_uneven_batches_and_dead_rank(tmp_path):
    seed = int(os.environ["CROSSTRAIN_TEST_SEED"])
    print("plans are cut at random with the seed", seed)
    path = scenario(tmp_path, options=THREE, seed=seed)
    with ExitStack() as stack:
        started = [stack.enter_context(process("rank", str(rank), path)) for rank in range(3)]
        assert [rank_process.wait(200) for rank_process in started] == [0, 0, -signal.SIGKILL]
    for rank in range(3):
        chosen = tf_tasks.whole_epochs(Job(backend="tf", **THREE), TinyData(), 3)
        arrays = np.load(tmp_path / f"rank-{rank}.npz")
        check_run(arrays, THREE, chosen, f"nesterov on rank {rank}")
        assert all(np.array_equal(cut, arrays["again"]) for cut in arrays["cut"]), "losses depend on how many steps a plan has"
    for rank in range(2):
        assert json.loads((tmp_path / f"death-{rank}.json").read_text()) < 10


@pytest.mark.slow
def test_taken_port_and_missing_peer_are_reported(tmp_path):
    path = scenario(tmp_path)
    with process("taken", path) as taken, process("late", path) as late:
        assert [taken.wait(100), late.wait(100)] == [0, 0]


class Cluster:
    """An async cluster; the chief is commanded over its standard input."""

    def __init__(self, stack, folder, options):
        path = scenario(folder, options=options)
        self.tasks = {}
        for placed in BACKEND.placement(Job(backend="tf", mode="async", **options)):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1} if placed.leading else {}
            self.tasks[placed.name] = stack.enter_context(process("task", placed.name, path, **pipes))
        self.chief = self.tasks["chief-0"]
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self.collect, daemon=True).start()
        assert self.read() == "open"

    def collect(self):
        for line in self.chief.stdout:
            self.lines.put(line)
        self.lines.put("")

    def read(self, seconds=None):
        """The chief's next answer. Raises queue.Empty where none comes in time."""
        line = self.lines.get(timeout=seconds)
        assert line, "the chief is gone"
        return json.loads(line)

    def send(self, do, **command):
        self.chief.stdin.write(json.dumps({"do": do, **command}) + "\n")

    def ask(self, do, **command):
        self.send(do, **command)
        return self.read()

    def send_plan(self, plan):
        fields = [plan.first_step, plan.count, plan.epoch, plan.first_in_epoch]
        self.send("train", plan=fields, rates=plan.learning_rates.tolist())

    def train(self, plan):
        self.send_plan(plan)
        return self.read()


@pytest.mark.slow
def test_async_with_one_worker_is_sync(tmp_path):
    """Without other updates between, losses and weights follow the formulas, on two servers."""
    options = {"batch_size": 10, "ps": 2, **OPTIMISERS["adamw"]}
    with ExitStack() as stack:
        cluster = Cluster(stack, tmp_path, options)
        chosen = list(plans(Job(backend="tf", mode="async", **options), TinyData(), 3))
        results = []
        for plan in chosen[:2]:
            results += cluster.train(plan)
        results += cluster.ask("drain")
        middle = cluster.ask("state")
        assert middle["updates"] == 40
        last = cluster.train(chosen[2]) + cluster.ask("drain")
        evaluated, end = cluster.ask("evaluate", split="test"), cluster.ask("state")
        cluster.ask("load", which=0)
        again = cluster.train(chosen[2]) + cluster.ask("drain")
        repeated = cluster.ask("state")
        cluster.ask("close")
        assert cluster.chief.wait(10) == 0
    arrays = {"updates": np.array([end["updates"], repeated["updates"]]), "evaluated": np.array(evaluated)}
    arrays["losses"], arrays["again"] = (np.concatenate([result["losses"] for result in part]) for part in (results + last, again))
    for prefix, state in ("end", end), ("repeated", repeated):
        arrays |= {f"{prefix}/{name}": np.array(value, np.float32) for name, value in state["parameters"].items()}
    check_run(arrays, options, chosen, "adamw on one worker")
    assert {value for result in results + last for value in result["staleness"]} == {0}
    assert sum(result["examples"] for result in results + last) == 600


@pytest.mark.thorough
def test_async_counts_every_update_and_its_staleness(tmp_path):
    """A worker is stopped with an update in progress while the other trains.

    That update is as stale as the number of updates since then.
    """
    options = {"nodes": 2, "batch_size": 1, "momentum": 0.5, "lr": 0.001}
    chosen = iter(tf_tasks.whole_epochs(Job(backend="tf", mode="async", **options), TinyData(), 50))
    with ExitStack() as stack:
        cluster = Cluster(stack, tmp_path, options)
        results = [result for _ in range(4) for result in cluster.train(next(chosen))]
        by_worker = [sum(len(result["losses"]) for result in results if result["worker"] == index) for index in range(2)]
        assert min(by_worker) >= 0.5 * sum(by_worker) / 2

        trained, seen = 4, []
        for _ in range(6):
            attempt, counted = stop_a_worker(cluster, [next(chosen) for _ in range(4)])
            results, trained = results + attempt, trained + 4
            staleness = sorted(value for result in attempt if result["worker"] == 1 for value in result["staleness"])
            seen.append((counted, staleness[-2:]))
            # It had an update in hand, the chief did not wait for it, and nothing else kept it from the processors for long.
            if counted and staleness[-1] > 100 and staleness[-2] < 30:
                break
        else:
            pytest.fail(f"no attempt in which only the update in hand was stale; updates since then, and the two stalest: {seen}")
        # Between its reading and its stop, and between its waking and its push, the other may apply a few more.
        least, most = counted
        assert least <= staleness[-1] <= most + 30
        assert most - least < 0.2 * least

        steps = [result["step"] + i for result in results for i in range(len(result["losses"]))]
        assert sorted(steps) == list(range(200 * trained))
        examples, _, _, applied = cluster.ask("evaluate", split="test")
        assert (examples, applied) == (90, 200 * trained)
        assert cluster.ask("state")["updates"] == 200 * trained
        cluster.ask("close")
        assert cluster.chief.wait(10) == 0


def stop_a_worker(cluster, chosen):
    """Stop worker 1 in the middle of a plan, let the other train the rest, and wake it.

    Returns all results, and the least and the most updates that were counted while it was stopped. None where the stop hit the moment
    in which TensorFlow's coordinator expects the worker to confirm that it forgot a value: it then waits, and the other worker with it.
    """
    worker = cluster.tasks["worker-1"]
    results = cluster.train(chosen[0])
    before = cluster.ask("version")
    worker.send_signal(signal.SIGSTOP)
    time.sleep(0.02)  # messages that had left the worker arrive
    cluster.send("version")
    for plan in chosen[1:]:
        cluster.send_plan(plan)
    answers, waited = [], False
    try:
        while len(answers) < len(chosen):
            answers.append(cluster.read(5))
        time.sleep(0.5)  # the other worker finishes the outstanding steps
        after = cluster.ask("version")
        counted = after - answers[0], after - before
    except queue.Empty:
        waited = True
    worker.send_signal(signal.SIGCONT)
    while len(answers) < len(chosen):
        answers.append(cluster.read())
    for part in [*answers[1:], cluster.ask("drain")]:
        results += part
    return results, None if waited else counted
