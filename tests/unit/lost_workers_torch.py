"""Check that each shard applies each update exactly once, however workers die.

``python lost_workers_torch.py SEED``. The chief and the other parameter servers are real, on local sockets; the workers are puppets that
speak their protocol, and end where hypothesis decides. The gradient of a step is one at the step's place in each shard, and the learning
rate is one, so a shard's values show how often it has applied a step.
"""

import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from processes import free_ports

from crosstrain.backends.base import Plan
from crosstrain.backends.parameter_server import tickets as ticket_module
from crosstrain.backends.parameter_server.session import AsyncSession
from crosstrain.backends.parameter_server.tickets import TrainTicket, decode
from crosstrain.backends.torch import BACKEND
from crosstrain.backends.torch.asynchronous import FlatRule
from crosstrain.core.cluster import Cluster, Task
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.columns import Column
from crosstrain.exchange.parameter_server.server import ShardServer, shard_bounds
from crosstrain.exchange.parameter_server.wire_protocol import REFRESH_SHARDS, Figures, Hello, Kind, connect
from crosstrain.models.logreg import build

STEPS, WORKERS, EXAMPLES = 36, 3, 30


class Data:
    """60 images of 2 × 3 × 4 pixels, which are never read."""

    def __init__(self):
        self.info = DataInfo.of_images("tiny", {"train": 60, "test": 9}, ImageFeatures((2, 3, 4), 5, (0.4, 0.6), (0.3, 0.2)))

    def column(self, split, name):
        size = self.info.sizes[split]
        return Column({"image": np.zeros((size, 2, 3, 4), np.uint8), "label": np.zeros(size, np.int64)}[name])


@dataclass(frozen=True)
class Fate:
    """The end of a worker's process, after so many updates and a push to some shards.

    At the end of a ticket it has awaited the other shards' answers before it pushes to the chief. `joins`: it joins before it ends.
    `late`: it still pushes to the shards after the chief's when its place has been taken, like a process that was stopped and resumes.
    """

    updates: int
    pushed_to: frozenset
    joins: bool
    late: bool


FATES = st.builds(
    Fate,
    updates=st.integers(0, 8),
    pushed_to=st.frozensets(st.integers(0, 2)),
    joins=st.sampled_from([True, True, True, False]),
    late=st.booleans(),
)


class Puppet:
    """A worker's connections to all shards, the chief's first."""

    def __init__(self, cluster, model, job, place):
        holders = [*cluster.tasks_with_role("chief"), *cluster.tasks_with_role("ps")]
        self.bounds = shard_bounds(model, job.ps)
        self.links, self.values = [], []
        for holder, (start, stop) in zip(holders, self.bounds, strict=True):
            hello = Hello("worker", place, stop - start)
            self.links.append(connect(cluster.endpoint(holder), cluster.secret, hello, time.monotonic() + 5))
            self.links[-1].connection.settimeout(30)
            self.values.append(np.zeros(stop - start, np.float32))
        self.versions = [0] * len(self.links)

    def receive(self, shard):
        frame = self.links[shard].receive(self.values[shard].data.cast("B"))
        self.versions[shard] = frame.version
        return frame

    def join(self):
        self.links[0].send(Kind.JOIN)
        generation = self.receive(0).examples
        for shard in range(1, len(self.links)):
            self.links[shard].send(Kind.JOIN, version=generation)
            self.receive(shard)
        self.links[0].send(Kind.READY)

    def push(self, shard, step):
        gradient = np.zeros_like(self.values[shard])
        gradient[step % len(gradient)] = 1.0
        self.links[shard].send(
            Kind.PUSH, gradient.data.cast("B"), version=self.versions[shard], examples=step, figures=Figures(1.0, float(step))
        )

    def update(self, step, last):
        """Send one whole update, in the order of `Worker._exchange`; return the chief's answer."""
        later_shards = range(1, len(self.links))
        for shard in later_shards:
            self.push(shard, step)
        if last:
            for shard in later_shards:
                self.receive(shard)
        self.push(0, step)
        if not last:
            for shard in later_shards:
                self.receive(shard)
        return self.receive(0)

    def begin_update(self, step, pushed_to, last):
        """Send the part of an update that reaches these shards."""
        later_shards = range(1, len(self.links))
        for shard in later_shards:
            if shard in pushed_to or (last and 0 in pushed_to):
                self.push(shard, step)
                if last and 0 in pushed_to:
                    self.receive(shard)
        if 0 in pushed_to:
            self.push(0, step)

    def close(self):
        for link in self.links:
            link.close()


def work_until_fate(puppet, fate):
    """Work until the chief has no more tickets (True) or until the fate has come (False).

    Also returns the step in progress.
    """
    done = 0
    frame = puppet.receive(0)
    while (ticket := decode(puppet.links[0].receive_trailer(frame))) is not None:
        assert isinstance(ticket, TrainTicket)
        if frame.flags & REFRESH_SHARDS:
            for shard in range(1, len(puppet.links)):
                puppet.links[shard].send(Kind.PULL)
                puppet.receive(shard)
        for step in range(ticket.first_step, ticket.first_step + ticket.count):
            last = step == ticket.first_step + ticket.count - 1
            if fate is not None and done == fate.updates:
                puppet.begin_update(step, fate.pushed_to, last)
                return False, step
            frame = puppet.update(step, last)
            done += 1
    return True, None


def push_late(puppet, step):
    """Push after the lease has ended: each shard closes the connection instead of answering."""
    for shard in range(1, len(puppet.links)):
        puppet.links[shard].connection.settimeout(3)
        try:
            puppet.push(shard, step)
            while True:  # answers to earlier pushes come first
                puppet.receive(shard)
        except ConnectionError:
            continue
        except TimeoutError:
            raise AssertionError(f"shard {shard} has taken a push of a lease that had ended") from None


def run_worker_processes(cluster, model, job, place, fates, errors, over):
    """Run the processes of one worker's place, one after another; the last one stays.

    After the run is `over` none can join any more.
    """
    stopped = None
    try:
        for fate in [*fates, None]:
            puppet = Puppet(cluster, model, job, place)
            if fate is not None and not fate.joins:
                puppet.close()
                continue
            puppet.join()
            if stopped is not None:
                push_late(*stopped)
                stopped[0].close()
                stopped = None
            finished, step = work_until_fate(puppet, fate)
            if finished:
                for link in puppet.links[1:]:
                    link.send(Kind.END)
            if fate is not None and fate.late and not finished:
                puppet.links[0].close()
                stopped = puppet, step
                continue
            puppet.close()
            if finished:
                return
    except BaseException as error:  # noqa: BLE001 — raised in the test's thread
        if not over.is_set():
            errors.append(error)
    finally:
        if stopped is not None:
            stopped[0].close()


def make_cluster(job):
    placed = BACKEND.placement(job)
    ports = {task.name: port for port, task in enumerate(placed, start=free_ports(len(placed)))}
    return Cluster(tuple(placed), ("127.0.0.1",) * job.nodes, ports, "5e" * 32)


def make_task(cluster, name):
    return Task(next(task for task in cluster.tasks if task.name == name), cluster, threads=1)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(ps=st.integers(1, 3), fates=st.tuples(st.just([]), st.lists(FATES, max_size=4), st.lists(FATES, max_size=4)))
def each_update_is_applied_once(ps, fates):
    job, data = Job(backend="torch", mode="async", nodes=WORKERS, batch_size=1, ps=ps, lr=1.0), Data()
    model, cluster = build(data.info), None
    cluster = make_cluster(job)
    errors, opened, over, stop = [], {}, threading.Event(), threading.Event()
    servers = [ShardServer(make_task(cluster, f"ps-{number}"), job, model, FlatRule) for number in range(1, ps)]
    serving = [threading.Thread(target=server.serve, args=(stop,)) for server in servers]
    opening = threading.Thread(
        target=lambda: opened.update(session=AsyncSession(make_task(cluster, "chief-0"), job, model, data, FlatRule))
    )
    working = [
        threading.Thread(target=run_worker_processes, args=(cluster, model, job, place, fates[place], errors, over))
        for place in range(WORKERS)
    ]
    for thread in (*serving, opening, *working):
        thread.start()
    opening.join()
    session = opened["session"]
    try:
        before = session.state()
        initial = np.concatenate([value.ravel() for value in before.parameters.values()]).copy()
        results = [*session.train(Plan(0, STEPS, 0, 0, np.ones(STEPS))), *session.drain()]
        after = session.state()
        values = np.concatenate([value.ravel() for value in after.parameters.values()])
        assert after.updates == STEPS
    finally:
        over.set()
        session.close()
        for thread in (*working, *serving):
            thread.join(30)
            assert not thread.is_alive()
    if errors:
        raise errors[0]
    steps = [result.first_step + number for result in results for number in range(result.count)]
    assert sorted(steps) == list(range(STEPS)), "a step is recorded twice, or never"
    losses = {result.first_step + number: loss for result in results for number, loss in enumerate(result.losses)}
    assert losses == {step: float(step) for step in range(STEPS)}
    for start, stop_at in shard_bounds(model, ps):
        expected = np.zeros(stop_at - start)
        expected[:STEPS] = 1.0
        np.testing.assert_allclose(initial[start:stop_at] - values[start:stop_at], expected, atol=1e-5)


if __name__ == "__main__":
    ticket_module.PIECES_PER_WORKER = 2  # so that most workers end in the middle of a ticket
    seed(int(sys.argv[1]))(each_update_is_applied_once)()
