"""The torch backend in real processes: sync against float64, async by each update.

Sync has 1, 2 and 3 ranks.
"""

import json
import signal
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch_tasks
from logreg_reference import Reference, distance
from processes import free_ports, script_process
from strangers import Strangers, dripping

from crosstrain.backends.base import CalibrationOrder, Plan, make_sampler
from crosstrain.backends.parameter_server.tickets import EvalTicket, TrainTicket, cut_evaluation, cut_plan, decode, encode
from crosstrain.backends.torch import BACKEND
from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.exchange.parameter_server.wire_protocol import Figures, Hello, Kind, connect
from crosstrain.models.logreg import build

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

SCRIPT = Path(torch_tasks.__file__)
process = partial(script_process, SCRIPT)
OPTIMISERS = {
    "sgd": {},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "momentum": {"momentum": 0.8},
    "adam": {"optimizer": "adam", "weight_decay": 0.02, "lr": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01},
}

# ---------------------------------------------------------------------------------------------------------------------------- sync


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Every sync job, run by three processes; returns (jobs, folder with the results)."""
    folder = tmp_path_factory.mktemp("torch-sync")
    jobs = {}
    for world in (1, 2, 3):
        jobs[f"sgd-64-{world}"] = {"nodes": world, "global_batch_size": 64}
        for rule, options in OPTIMISERS.items():
            jobs[f"{rule}-10-{world}"] = {"nodes": world, "global_batch_size": 10, **options}
    jobs["sgd-2-3"] = {"nodes": 3, "global_batch_size": 2}  # the third rank never has an example
    jobs["sgd-7-1"] = {"nodes": 1, "global_batch_size": 7, "distributed": "always", "deterministic": True, "steps_per_call": 3}
    (folder / "scenario.json").write_text(json.dumps({"port": free_ports(150), "jobs": jobs}))
    with ExitStack() as stack:
        started = [stack.enter_context(process("rank", str(rank), str(folder / "scenario.json"))) for rank in range(3)]
        codes = [rank_process.wait(200) for rank_process in started]
    assert codes == [0, 0, -signal.SIGKILL]
    return jobs, folder


def reference_run(options):
    """The same three epochs in float64; returns (losses, number of examples, final reference)."""
    job, data = Job(backend="torch", **options), torch_tasks.TinyData()
    reference, sampler = Reference(build(data.info).initial(job.seed), job), make_sampler(job, data)
    x, y = data.inputs("train").reshape(200, -1), data.labels("train")
    losses, examples = [], 0
    for plan in torch_tasks.plans(job, data, 3):
        whole = sampler.whole(plan.epoch, 0, plan.count)
        examples += len(whole.indices)
        losses += [reference.step(x[whole.batch(i)], y[whole.batch(i)], plan.learning_rates[i]) for i in range(plan.count)]
    return np.array(losses), examples, reference


def test_sync_follows_the_formulas_on_any_number_of_ranks(ranks):
    jobs, folder = ranks
    data = torch_tasks.TinyData()
    for name, options in jobs.items():
        losses, examples, reference = reference_run(options)
        tolerance = 1e-5 if name.startswith("sgd") else 1e-4
        for rank in range(options["nodes"]):
            arrays = np.load(folder / f"{name}-{rank}.npz")
            assert arrays["examples"] == examples, name
            assert arrays["updates"].tolist() == [len(losses)] * 2, name
            np.testing.assert_allclose(arrays["losses"], losses, rtol=tolerance, err_msg=name)
            if rank == 0:  # the others have the state too, but give no copy of it
                assert distance({key: arrays[f"end/{key}"] for key in reference.w}, reference.w) < tolerance, name
            loss_sum, correct = reference.evaluate(data.inputs("test").reshape(90, -1), data.labels("test"))
            np.testing.assert_allclose(arrays["evaluated"], [90, loss_sum, correct, len(losses)], rtol=1e-4, err_msg=name)


def test_loaded_state_continues_bit_identically(ranks):
    jobs, folder = ranks
    for name, options in jobs.items():
        for rank in range(options["nodes"]):
            arrays = np.load(folder / f"{name}-{rank}.npz")
            assert np.array_equal(arrays["again"], arrays["losses"][-len(arrays["again"]) :]), name
            for key in ("dense.weight", "dense.bias") if rank == 0 else ():
                assert np.array_equal(arrays[f"repeated/{key}"], arrays[f"end/{key}"]), name


def test_a_dead_rank_is_noticed(ranks):
    _, folder = ranks
    for rank in (0, 1):
        assert json.loads((folder / f"death-{rank}.json").read_text()) < 10


# --------------------------------------------------------------------------------------------------------------------------- async


class Chief:
    """The chief in a process of its own, commanded over its standard input."""

    def __init__(self, stack, folder, options):
        self.job = Job(backend="torch", mode="async", **options)
        self.cluster = torch_tasks.make_cluster(self.job, free_ports(len(BACKEND.placement(self.job))))
        self.scenario = folder / "scenario.json"
        self.scenario.write_text(json.dumps({"port": self.cluster.ports["chief-0"], "options": options}))
        self.log = stack.enter_context((folder / "chief.log").open("w+"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True, "bufsize": 1}
        self.process = stack.enter_context(process("task", "chief-0", str(self.scenario), **pipes))

    def read(self):
        line = self.process.stdout.readline()
        assert line, f"the chief is gone: {Path(self.log.name).read_text()}"
        return json.loads(line)

    def send(self, do, **command):
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")

    def ask(self, do, **command):
        self.send(do, **command)
        return self.read()

    def state(self):
        answer = self.ask("state")
        return {name: np.array(value) for name, value in answer["parameters"].items()}, answer["updates"]


class HandWorker:
    """A worker that the test drives frame by frame over the real socket."""

    def __init__(self, chief, index, secret=None):
        endpoint = chief.cluster.endpoint(chief.cluster.tasks_with_role("chief")[0])
        self.size = build(torch_tasks.TinyData().info).size
        self.link = connect(endpoint, secret or chief.cluster.secret, Hello("worker", index, self.size), time.monotonic() + 60)
        self.link.connection.settimeout(60)
        self.values = np.zeros(self.size, dtype=np.float32)
        self.version = 0

    def receive(self):
        """Take in parameters and, where there is one, the ticket."""
        frame = self.link.receive(self.values.data.cast("B"))
        assert frame.kind == Kind.PARAMETERS
        self.version = frame.version
        return decode(self.link.receive_trailer(frame)) if frame.trailer else "more"

    def ready(self):
        self.link.send(Kind.READY)

    def join(self):
        """Take in parameters; return the generation of this connection."""
        self.link.send(Kind.JOIN)
        return self.link.receive(self.values.data.cast("B")).examples

    def push(self, step, gradient, lr, loss=0.0):
        self.send_push(step, gradient, lr, loss)
        return self.receive()

    def send_push(self, step, gradient, lr, loss=0.0):
        pushed = np.full(self.size, gradient, dtype=np.float32).data.cast("B")
        self.link.send(Kind.PUSH, pushed, version=self.version, examples=step, figures=Figures(lr, loss))


def test_parameter_server_refuses_strangers(tmp_path):
    """A hundred are silent, drip or send garbage: workers join immediately.

    Dripping connections are closed in five seconds.
    """
    with ExitStack() as stack:
        chief = Chief(stack, tmp_path, {"nodes": 2, "batch_size": 10})
        HandWorker(chief, 0).link.close()  # the chief listens by now
        address = chief.cluster.endpoint(chief.cluster.tasks_with_role("chief")[0])
        with Strangers(address, 100):
            began = time.monotonic()
            workers = [HandWorker(chief, index) for index in range(2)]
            assert time.monotonic() - began < 2.0
            for worker in workers:
                worker.ready()
            assert chief.read() == "open"
            assert dripping(address, 15.0) == pytest.approx(5.0, abs=1.0)
        for worker in workers:
            worker.link.close()


def test_staleness_and_counts_by_hand(tmp_path):
    """A known schedule: worker 1 reads, worker 0 applies four updates, worker 1 pushes."""
    with ExitStack() as stack:
        chief = Chief(stack, tmp_path, {"nodes": 2, "batch_size": 10, "momentum": 0.5})
        with pytest.raises(RunFailedError, match="secret"):
            HandWorker(chief, 0, secret="ab" * 32)
        fast, slow = HandWorker(chief, 0), HandWorker(chief, 1)
        fast.ready(), slow.ready()
        assert chief.read() == "open"
        before, slow = slow, HandWorker(chief, 1)
        assert slow.join() == 2  # the newest connection has the place
        with pytest.raises(ConnectionError):
            before.receive()
        before.link.close()
        slow.ready()
        initial, _ = chief.state()

        chief.send("train", plan=[0, 6, 0, 0], rates=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])  # six tickets of one update
        tickets = {"fast": fast.receive(), "slow": slow.receive()}
        assert {ticket.first_step for ticket in tickets.values()} == {0, 1}
        steps = []
        for turn in range(4):
            steps.append(tickets["fast"].first_step)
            tickets["fast"] = fast.push(steps[-1], 1.0, tickets["fast"].learning_rates[0], loss=float(turn))
        steps.append(tickets["slow"].first_step)
        slow.send_push(steps[-1], 2.0, lr=0.25, loss=9.0)
        results = chief.read()
        chief.send("drain")  # outstanding: the last ticket, held by the fast worker
        steps.append(tickets["fast"].first_step)
        fast.send_push(steps[-1], 1.0, lr=0.5, loss=4.0)
        results += chief.read()
        assert sorted(steps) == list(range(6))
        by_step = {result["step"]: result for result in results}
        assert sorted(by_step) == list(range(6))
        slow_first, slow_last = ([4], [1]), ([5], [0])  # its update was the fifth, or came behind the fast worker's last one
        staleness = [by_step[step]["staleness"] for step in steps]
        assert staleness[:4] == [[0]] * 4
        assert tuple(staleness[4:]) in (slow_first, slow_last)
        assert [by_step[step]["losses"] for step in steps] == [[0.0], [1.0], [2.0], [3.0], [9.0], [4.0]]
        assert [by_step[step]["worker"] for step in steps] == [0, 0, 0, 0, 1, 0]
        assert all(result["examples"] == 10 and 0 <= result["wait"] <= result["seconds"] for result in results)

        values, updates = chief.state()
        velocity, moved = 0.0, 0.0
        last = [(2, 0.25), (1, 0.5)] if tuple(staleness[4:]) == slow_first else [(1, 0.5), (2, 0.25)]
        for gradient, lr in [*((1, 0.1 * (step + 1)) for step in steps[:4]), *last]:
            velocity = 0.5 * velocity + gradient
            moved += lr * velocity
        assert updates == 6
        np.testing.assert_allclose(values["dense.weight"], initial["dense.weight"] - moved, atol=1e-5)
        assert chief.ask("state")["slots"]["momentum"]["dense.bias"] == pytest.approx([velocity] * 5)

        # A worker is lost with a ticket half used: the rest goes to the other, and nothing is applied twice.
        chief.send("train", plan=[6, 14, 0, 6], rates=[0.1] * 14)
        held = slow.receive()
        second_ticket = fast.receive()
        slow.link.close()
        done = [second_ticket.first_step]
        while len(done) < 14:
            ticket = fast.push(done[-1], 0.0, 0.1)
            done.append(ticket.first_step)
        assert sorted(done) == list(range(6, 20))
        assert held.first_step in done
        fast.send_push(done[-1], 0.0, lr=0.1)
        results = chief.read() + chief.ask("drain")
        assert sorted(result["step"] for result in results) == list(range(6, 20))
        assert {result["worker"] for result in results} == {0}

        chief.send("close")
        assert fast.receive() is None
        fast.link.close()
        assert chief.process.wait(30) == 0  # as below: its close may take five seconds for the workers, and then the interpreter ends
    log = (tmp_path / "chief.log").read_text()
    assert (log.count("turned away"), log.count("refused")) == (1, 0)
    assert log.count("lost worker-1") == 2


@pytest.mark.slow  # without the marker tests/unit/test_lost_workers.py has workers die at several servers
def test_two_servers_with_killed_worker_apply_each_update_once(tmp_path):
    """Two workers on two shards: every planned update once, evaluation and state are right.

    A killed worker disturbs nobody.
    """
    data = torch_tasks.TinyData()
    x, y = data.inputs("test").reshape(90, -1), data.labels("test")
    with ExitStack() as stack:
        chief = Chief(stack, tmp_path, {"nodes": 2, "batch_size": 8, "ps": 2, "optimizer": "adam", "lr": 0.01})
        tasks = {name: stack.enter_context(process("task", name, str(chief.scenario))) for name in ("worker-0", "worker-1", "ps-1")}
        assert chief.read() == "open"
        results = []
        for epoch in range(8):
            results += chief.ask("train", plan=[25 * epoch, 25, epoch, 0], rates=[0.02] * 25)
        results += chief.ask("drain")
        steps = [result["step"] + i for result in results for i in range(len(result["losses"]))]
        assert sorted(steps) == list(range(200))
        assert {result["worker"] for result in results} == {0, 1}
        values, updates = chief.state()
        assert updates == 200

        job = Job(backend="torch", mode="async")
        examples, loss_sum, correct, applied = chief.ask("evaluate", split="test")
        expected = Reference(values, job).evaluate(x, y)
        assert [examples, correct, applied] == [90, expected[1], 200]
        assert loss_sum == pytest.approx(expected[0], rel=1e-4)
        assert correct / 90 > 0.75  # 5 classes; the initial weights have about a fifth

        chief.send("train", plan=[225, 25, 9, 0], rates=[0.02] * 25)
        tasks["worker-1"].send_signal(signal.SIGKILL)
        results = chief.read()
        for epoch in range(10, 40):
            results += chief.ask("train", plan=[25 * epoch, 25, epoch, 0], rates=[0.02] * 25)
        results += chief.ask("drain")
        steps = [result["step"] + i for result in results for i in range(len(result["losses"]))]
        assert sorted(steps) == list(range(225, 1000))
        moved, updates = chief.state()
        assert updates == 200 + 775
        assert distance(moved, values) > 0.01

        chief.ask("load", which=0)
        restored, updates = chief.state()
        assert updates == 200
        assert all(np.array_equal(restored[name], values[name]) for name in values)
        assert chief.ask("evaluate", split="test")[1] == pytest.approx(loss_sum, rel=1e-6)
        chief.ask("close")  # which takes up to five seconds for the workers, and as many for the parameter servers
        assert chief.process.wait(30) == 0
        assert tasks["ps-1"].wait(10) == 0
        assert tasks["worker-0"].wait(10) == 0


# ------------------------------------------------------------------------------------------------------------------------- tickets


def test_tickets_cover_a_plan_and_survive_the_wire():
    for count in (1, 7, 24, 1000, 20_000):
        plan = Plan(50, count, 3, 10, np.linspace(0.1, 0.2, count), skip=17)
        tickets = [decode(encode(ticket)) for ticket in cut_plan(plan, 3)]
        assert all(isinstance(ticket, TrainTicket) and ticket.epoch == 3 and ticket.skip == 17 for ticket in tickets)
        assert [ticket.first_step for ticket in tickets] == [50 + sum(t.count for t in tickets[:i]) for i in range(len(tickets))]
        assert [ticket.first_in_epoch - ticket.first_step for ticket in tickets] == [-40] * len(tickets)
        assert np.array_equal(np.concatenate([ticket.learning_rates for ticket in tickets]), plan.learning_rates)
        assert len(tickets) == min(count, max(24, -(-count // 512)))
    pieces = [decode(encode(ticket)) for ticket in cut_evaluation("test", 5000, 3, 1024)]
    assert pieces[0] == EvalTicket("test", 0, 1250)
    assert [piece.stop for piece in pieces] == [1250, 2500, 3750, 5000]
    assert decode(encode(CalibrationOrder("half", 7, 0.125))) == CalibrationOrder("half", 7, 0.125)
    assert decode(encode(None)) is None
