"""The driver's view of the cluster, over real sockets operated as agents do."""

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from untyped import Message, array_of, fields_of

from crosstrain.backends.base import Plan
from crosstrain.core.cluster import Cluster, Role, TaskSpec
from crosstrain.core.errors import InterruptedRunError, RunFailedError, StalledRunError
from crosstrain.engine.protocol.messages import PROTOCOL, MessageParser, Stream
from crosstrain.engine.protocol.node_messages import FindStacks, Start
from crosstrain.engine.protocol.task_messages import Drain, Train
from crosstrain.launch.driver import task_group
from crosstrain.launch.driver.cluster_setup import make_tasks
from crosstrain.launch.driver.first_failure import SilentTaskError
from crosstrain.launch.driver.nodes import Nodes
from crosstrain.launch.driver.outcome import with_task_states
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.monitor.host import describe_host


class Agent:
    """The other end of a node's channel; messages wait until they are received."""

    def __init__(self, node: int, end: socket.socket, stream: Stream) -> None:
        self.node = node
        self.end = end
        self.stream = stream

    def send(self, kind: str, **fields: object) -> None:
        self.stream.send(Message(kind, fields))

    def hello(self, host: str) -> None:
        greeting = {"node": self.node, "pid": 1, "identity": {"boot": "b", "network": "n"}, "host": {**describe_host({}), "hostname": host}}
        self.send("hello", protocol=PROTOCOL, scratch="", address=None, **greeting)

    def death(self, task: str, order: int = 1, *, error: str | None = None, **how: object) -> None:
        """Report the end of a task, and before that the exception that ended it."""
        if error is not None:
            fields = {"type": "RuntimeError", "message": error, "errno": None, "exit_code": None, "peer_lost": "peer" in error}
            self.send("error", **fields, **{"from": task})
        spent = {"pid": 1, "cpu_seconds": 0.5, "max_rss_bytes": 1}
        self.send("death", task=task, order=order, **{"code": 1, "signal": None, "tail": [], **spent, **how})

    def answer(self, kind: str, **fields: object) -> None:
        """Answer the next request, in a thread."""

        def work() -> None:
            self.stream.receive()
            with suppress(BrokenPipeError, ValueError):  # the test is over, and its streams may be closed
                self.send(kind, **fields)

        threading.Thread(target=work, daemon=True).start()

    def go(self) -> None:
        """End like a killed process: close the connection."""
        self.end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cluster() -> Iterator[Callable[[int], tuple[TaskGroup, list[Agent]]]]:
    with ExitStack() as ends:

        def make(nodes: int, survives: Collection[Role] = (), rejoins: Collection[Role] = ()) -> tuple[TaskGroup, list[Agent]]:
            channels, agents = [], []
            for node in range(nodes):
                pair = [ends.enter_context(end) for end in socket.socketpair()]
                ours, theirs = (Stream(end.makefile("rb"), end.makefile("wb")) for end in pair)
                ends.callback(theirs.close)
                ends.callback(ours.close)
                ends.callback(pair[1].shutdown, socket.SHUT_RDWR)  # first, so that the driver's threads end
                channels.append(NodeChannel(node, ours, f"10.0.0.{node}", None, None, shares_files=False))
                agents.append(Agent(node, pair[1], theirs))
            placed = [TaskSpec("worker", node, node, leading=node == 0) for node in range(nodes)]  # as if each node had started one
            return TaskGroup(Nodes(channels), placed, survives, rejoins=rejoins), agents

        yield make


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_interrupt_ends_a_wait(cluster):
    control, (agent,) = cluster(1)
    control.nodes.interrupt()
    agent.answer("sampled")
    with pytest.raises(InterruptedRunError):
        control.sample_now()


def test_deferred_interrupt_ends_the_next_wait(cluster):
    control, (agent,) = cluster(1)
    with control.nodes.interrupts_deferred():
        control.nodes.interrupt()
        agent.answer("sampled")
        control.sample_now()
    with pytest.raises(InterruptedRunError):
        control.receive(0.01)


def listen(control: TaskGroup) -> None:
    while True:
        control.receive(5.0)


def failure(control: TaskGroup) -> RunFailedError:
    with pytest.raises(RunFailedError) as raised:
        listen(control)
    return raised.value


def test_lost_node_ends_the_next_start_too(cluster):
    """Its end was read while the tasks of the first start were ended."""
    control, agents = cluster(2)
    agents[0].answer("stopped")
    agents[1].go()
    control.end_tasks(0.0, graceful=False)
    second_group = TaskGroup(control.nodes, [])
    with pytest.raises(RunFailedError, match="node 1"):
        second_group.reserve_ports({0: 1, 1: 1}, 30.0)


def on_node_0(control: TaskGroup) -> TaskGroup:
    """Return a group whose only task is on the first node."""
    return TaskGroup(control.nodes, [TaskSpec("worker", 0, 0, leading=True)], places=[0])


@pytest.mark.parametrize("before", [False, True])
def test_loss_of_an_unused_node_is_ignored(cluster, before):
    """Before the group exists or while it runs; messages of the used node still arrive."""
    control, agents = cluster(2)
    group = control if before else on_node_0(control)
    agents[1].go()
    if before:
        with pytest.raises(RunFailedError, match="node 1"):
            listen(control)
        group = on_node_0(control)
    agents[0].answer("ports", ports=[4000])
    assert group.reserve_ports({0: 1}, 5.0) == {0: [4000]}
    assert group.receive(0.2) is None
    assert list(control.nodes.peers.lost) == [1]
    assert group.inspect_tasks(0.01).silent.keys() == {0}
    agents[0].go()
    assert failure(group).task == "agent-0"


def test_violation_of_an_unused_node_ends_the_run(cluster):
    control, agents = cluster(2)
    group = on_node_0(control)
    agents[1].send("no_such_kind")
    assert "node 1" in str(failure(group))
    assert control.nodes.violation is not None


def test_missing_answer_names_its_node(cluster):
    control, agents = cluster(2)
    agents[0].answer("sampled")
    with pytest.raises(RunFailedError, match=r"samples of nodes \[1\]"):
        control.sample_now(1.0)


def ready(agents: list[Agent]) -> None:
    for agent in agents:
        agent.send("ready", precision_used=None, device_used=None, **{"from": f"worker-{agent.node}"})


def test_survivable_task_may_die_once_ready(cluster):
    control, agents = cluster(2, survives=["worker"])
    ready(agents)
    control.await_ready(10.0)
    agents[1].death("worker-1", signal="SIGKILL", code=None)
    agents[0].send("done", sequence=1, command="drain", seconds=0.1, drain_seconds=0.0, **{"from": "worker-0"})
    control.send(Drain(sequence=1))
    answers = [control.receive(0.5) for _ in range(4)]
    assert [answer[1].kind for answer in answers if answer is not None] == ["done"]
    assert [death.task for death in control.deaths] == ["worker-1"]


@pytest.mark.parametrize(("survives", "starts"), [([], True), (["ps"], True), (["worker"], False)])
def test_other_or_early_death_is_a_failure(cluster, survives, starts):
    control, agents = cluster(2, survives=survives)
    if starts:
        ready(agents)
        control.await_ready(10.0)
    agents[1].death("worker-1", signal="SIGKILL", code=None)
    assert failure(control).task == "worker-1"


def test_stall_reports_known_and_unknown_stacks(cluster, monkeypatch):
    """One node has the stacks, one reports a stopped task, one is silent from then on."""
    monkeypatch.setattr(task_group, "COLLECT_SECONDS", 2.0)
    control, agents = cluster(3)
    stacks = [
        {"text": 'Thread 0x1\n  File "/a.py", line 7 in f\n  File "/b.py", line 8 in g\n', "problem": None},
        {"text": "", "problem": "is stopped\nby a signal"},
    ]

    def agent(agent):
        assert agent.stream.receive().kind == "inspect"
        agent.send("states", states={f"worker-{agent.node}": "T" if agent.node == 1 else "S"})
        request = MessageParser(FindStacks).parse(agent.stream.receive())
        assert list(request.tasks) == [f"worker-{agent.node}"]
        if agent.node < 2:
            agent.send("stacks", number=request.number, stacks={f"worker-{agent.node}": stacks[agent.node]})

    threads = [threading.Thread(target=agent, args=(one_agent,)) for one_agent in agents]
    for thread in threads:
        thread.start()
    cluster_state = control.inspect_tasks(10.0)  # all of them answer
    for thread in threads:
        thread.join()
    error = with_task_states(StalledRunError("stalled"), cluster_state)
    assert str(error) == (
        "stalled; stopped by a signal: worker-1; worker-0 stands at /a.py:7 (f); "
        "worker-2 is on a node that sent no stack within 2 s; logs/stacks.txt has all stacks"
    )
    assert error.task == "worker-1"


def test_stacks_can_be_requested_during_training(cluster):
    control, (agent,) = cluster(1)
    answers = []
    control.stack_requests.on_answer = answers.append
    control.on_silent(0)
    number = fields_of(agent.stream.receive())["number"]
    agent.send("stacks", number=number, stacks={"worker-0": {"text": '  File "/a.py", line 7 in f\n', "problem": None}})
    assert control.receive(1.0) is None
    ((stack,),) = [stacks.values() for stacks in answers]
    assert stack.place == "/a.py:7 (f)"
    agent.send("stacks", number=number, stacks={})
    assert "a message 'stacks' that nobody asked for" in str(failure(control))


@pytest.mark.parametrize("victim_first", [False, True])
def test_lost_node_is_named_and_not_waited_for(cluster, victim_first):
    """Noticed first, or while the cause of a victim's death is determined."""
    control, agents = cluster(3)
    for number, agent in enumerate(agents):
        agent.hello(f"host-{number}")
    control.nodes.greet(5.0)
    if victim_first:
        agents[0].death("worker-0", error="Connection reset by peer")
        time.sleep(0.2)
    agents[1].go()
    error = failure(control)
    assert "node 1 (host host-1, 10.0.0.1) has gone" in str(error)
    assert error.task == "agent-1"
    agents[0].answer("stopped")
    agents[2].answer("stopped")
    assert seconds(lambda: control.end_tasks(10.0, graceful=False)) < 2
    assert seconds(lambda: control.nodes.finish(1)) < 2


def test_unused_nodes_get_no_requests(cluster):
    control, agents = cluster(2)
    group = on_node_0(control)
    agents[0].answer("sampled")
    group.sample_now(5.0)
    group.start_tasks([], lambda node: Start("{}", None, None, None, None, {}, 0.0))
    assert agents[0].stream.receive().kind == "start"
    agents[0].answer("stopped")
    assert seconds(lambda: group.end_tasks(10.0, graceful=False)) < 2
    assert control.nodes.answering == {0, 1}
    control.nodes.finish(0)
    assert agents[1].stream.receive().kind == "finish"  # without an earlier message


def test_stall_names_the_silent_node(cluster):
    """One node answers, one is frozen, the third ends at that moment."""
    control, agents = cluster(3)
    agents[0].answer("states", states={"worker-0": "S"})
    agents[2].go()
    took = time.monotonic()
    error = with_task_states(StalledRunError("stalled"), control.inspect_tasks())
    assert time.monotonic() - took < 1.5
    assert "the agent of node 1 (host 10.0.0.1) does not answer" in str(error)
    assert "the agent of node 2 (host 10.0.0.2) has gone" in str(error)
    assert "worker-0" not in str(error)
    agents[0].answer("stopped")
    assert seconds(lambda: control.end_tasks(10.0, graceful=False)) < 1
    assert agents[1].end.recv(2**16)
    agents[1].end.settimeout(5.0)
    assert agents[1].end.recv(1) == b""  # disconnected, so it ends when it wakes


def test_unread_channel_blocks_nobody(cluster):
    """A frozen agent leaves its channel full; the driver has to continue to notice."""
    control, (agent,) = cluster(1)
    plan = Train.from_plan(Plan(0, 2**17, 0, 0, np.arange(2.0**17)))
    assert seconds(lambda: [control.send(plan) for _ in range(20)]) < 2
    assert control.receive(0.1) is None
    for _ in range(20):
        assert array_of(agent.stream.receive(), "learning_rates").size == 2**17


def test_victim_of_another_node_is_not_blamed(cluster):
    """For a signal that its framework sends to itself."""
    control, agents = cluster(2)
    agents[0].death("worker-0", code=None, signal="SIGABRT", tail=["recv failed: Connection reset by peer"])
    agents[1].death("worker-1", error="cannot read image 17")
    error = failure(control)
    assert error.task == "worker-1"
    assert "cannot read image 17" in str(error)


def rejoining(cluster):
    """Start three workers that can be restarted individually."""
    control, agents = cluster(3, rejoins=["worker"])
    placed = [TaskSpec("worker", node, node, leading=node == 0) for node in range(3)]
    tasks = make_tasks(Cluster(tuple(placed), ("",) * 3, dict.fromkeys((task.name for task in placed), 1), "5e"), [1, 1, 1])
    control.start_tasks(tasks, lambda node: Start("{}", None, None, None, None, {}, 0.0))
    ready(agents)
    control.await_ready(10.0)
    for agent in agents:
        assert agent.stream.receive().kind == "start"
    return control, agents


def report_ready(agent):
    agent.send("ready", precision_used=None, device_used=None, **{"from": f"worker-{agent.node}"})


def restarting_task(control):
    """Return the name of the failed task that is being restarted."""
    error = failure(control)
    assert control.can_replace(error.task)
    control.failures.replace(error.task, str(error).splitlines()[0], 0.0, 30.0)
    return error.task


def ready_again(control):
    """Return the names of restarted tasks that are ready, once there are any."""
    for _ in range(50):
        control.receive(0.1)
        if restarted := [control.failures.restarted.popleft() for _ in range(len(control.failures.restarted))]:
            return [task.name for task in restarted]
    raise AssertionError("none is")


def test_rejoining_task_is_restarted_and_others_are_heard(cluster):
    control, agents = rejoining(cluster)
    control.send(Drain(sequence=1))
    agents[1].death("worker-1", error="connection reset by peer")  # a victim: other causes are awaited for a second
    agents[0].send("done", sequence=1, command="drain", seconds=0.1, drain_seconds=0.0, **{"from": "worker-0"})
    assert restarting_task(control) == "worker-1"
    heard = [answer[1].kind for answer in (control.receive(0.3) for _ in range(8)) if answer is not None]
    assert heard == ["done"]
    assert agents[1].stream.receive().kind == "open_probe"  # a victim may have lost an unreachable node
    again = MessageParser(Start).parse(agents[1].stream.receive())
    assert ([task.task for task in again.tasks], again.start_seconds, again.again) == (["worker-1"], 30.0, True)
    report_ready(agents[1])
    assert ready_again(control) == ["worker-1"]
    agents[1].death("worker-1", signal="SIGKILL", code=None)  # again: each start may report one death
    assert restarting_task(control) == "worker-1"
    assert [death.task for death in control.deaths] == ["worker-1"] * 2


def test_stalled_task_is_replaced_without_failure(cluster):
    control, agents = rejoining(cluster)
    agents[0].send("worker_stalled", worker=2, **{"from": "worker-0"})
    assert restarting_task(control) == "worker-2"
    agents[2].death("worker-2", signal="SIGKILL", code=None)
    report_ready(agents[2])
    assert ready_again(control) == ["worker-2"]


def test_silent_task_is_raised_if_it_can_restart(cluster):
    control, _ = rejoining(cluster)
    control.on_silent(2)
    error = failure(control)
    assert (type(error), error.task) == (SilentTaskError, "worker-2")
    assert control.receive(0.1) is None  # training may continue without it
    control, agents = cluster(3)
    ready(agents)
    control.await_ready(10.0)
    control.on_silent(2)
    assert control.receive(0.1) is None


def test_root_cause_fails_run_unless_a_task_can_rejoin(cluster):
    control, agents = rejoining(cluster)
    agents[1].death("worker-1", signal="SIGKILL", code=None)
    for _ in range(2):  # until it is replaced
        assert failure(control).task == "worker-1"
    control, agents = rejoining(cluster)
    agents[1].death("worker-1", error="connection closed by peer")
    agents[2].go()
    assert failure(control).task == "agent-2"
    assert not control.can_replace("worker-1")
    control, agents = rejoining(cluster)
    for node in (1, 2):
        agents[node].death(f"worker-{node}", signal="SIGKILL", code=None)
        assert restarting_task(control) == f"worker-{node}"
    agents[0].death("worker-0", signal="SIGKILL", code=None)
    assert failure(control).task == "worker-0"
    assert not control.can_replace("worker-0")


def test_slow_restarted_task_cannot_restart_again(cluster, monkeypatch):
    monkeypatch.setattr(task_group, "REPORT_SECONDS", 0.0)
    control, agents = rejoining(cluster)
    agents[1].death("worker-1", signal="SIGKILL", code=None)
    assert failure(control).task == "worker-1"
    control.failures.replace("worker-1", "killed", 0.0, 0.0)
    error = failure(control)
    assert "was restarted, but not ready within --start-timeout" in str(error)
    assert (error.task, control.can_replace("worker-1")) == ("worker-1", False)
