"""The nodes of a run, from its start to its end: what they are, what they report on the side, and which of them are lost.

Tasks come and go on them (`task_group.py`); a node that is lost is so for all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import InterruptedRunError, RunFailedError
from ...core.untrusted.console import note
from ...engine.protocol.messages import PROTOCOL, Message
from ...engine.protocol.node_messages import wrong_with
from ..launchers.base import NodeChannel, how_it_ended
from .first_failure import NodeLostError
from .node_channels import DRIVER, Members
from .outstanding_requests import OutstandingRequests

__all__ = ["Nodes"]

RETRY_SECONDS = 10.0
"""How long after an attempt to bring a lost node back the next one begins."""

FLUSH_SECONDS = 2.0
"""How long the last words to the agents may take."""


class Nodes:
    """Hears every node. `on_sample`, `on_log`, `on_trace` and `on_leaving` are called from the caller's thread, within `receive`.

    So is `check`, at least once a second: it raises where something else than a node has failed. A node that has greeted and says nothing
    for `node_timeout_seconds` is lost; without a limit none is for that. `replace` starts another agent in the place of a node that is
    lost, and returns its channel, or None where there is nowhere to start one; `when_more_answer` hears which nodes answer while more are
    tried to be had back (`keep_restoring`), and returns whether it uses them now; `on_useless` hears why one that came was sent away.
    `on_leaving` hears that a node is going to be ended, which each may say once; without it none may. `hosts` are the nodes' descriptions,
    in node order.
    """

    def __init__(
        self,
        channels: Sequence[NodeChannel],
        on_sample: Callable[[Mapping[str, Any]], None],
        on_log: Callable[[int, str, bytes], None],
        on_trace: Callable[[int, str, bytes], None] | None = None,
        check: Callable[[], None] | None = None,
        node_timeout_seconds: float | None = None,
        replace: Callable[[int], NodeChannel | None] = lambda node: None,
        on_useless: Callable[[str], None] = lambda why: None,
        on_leaving: Callable[[], None] | None = None,
    ) -> None:
        self.channels = list(channels)
        self.hosts: list[dict[str, Any]] = []
        self.members = Members(channels)
        self.asked = OutstandingRequests((channel.node for channel in channels), may_leave=on_leaving is not None)
        self.node_timeout_seconds = node_timeout_seconds
        self._on_sample = on_sample
        self._on_log = on_log
        self._on_trace = on_trace
        self._check = check
        self._on_leaving = on_leaving
        self.when_more_answer: Callable[[Collection[int]], bool] = lambda answering: False
        self._replace = replace
        self._on_useless = on_useless
        self._coming: dict[int, float] = {}
        self._irreplaceable: set[int] = set()
        self._restoring_seconds: float | None = None
        self._next_try = 0.0
        self._hostnames: dict[int, str | None] = {}
        self._silent: set[int] = set()
        self._isolated: dict[int, str] = {}
        self._interrupted = threading.Event()
        self._deferring = False

    # What the user does ---------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Make whoever listens raise InterruptedRunError next; safe to call from a signal handler."""
        self._interrupted.set()
        self.members.say(Message("interrupt"))

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """Within the block an interrupt is only remembered: the first `receive` of tasks after it raises."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def wake(self) -> None:
        """Make a `receive` that waits return None; safe to call from a signal handler."""
        self.members.say(Message("wake"))

    def raise_if_interrupted(self) -> None:
        """Raise InterruptedRunError where the user has interrupted the run."""
        if self._interrupted.is_set() and not self._deferring:
            raise InterruptedRunError("interrupted by the user")

    def check(self) -> None:
        """Raise RunFailedError where something that the nodes live in has gone."""
        if self._check is not None:
            self._check()
        for node in [node for node, until in self._coming.items() if time.monotonic() >= until]:
            del self._coming[node]
            self.members.lose(node)
        if self._restoring_seconds is None:
            return
        due = time.monotonic() >= self._next_try  # one that is back is used with others that come until then, and waits for none that hangs
        if (due or not self._coming) and self.when_more_answer(self.answering):
            self._restoring_seconds = None
        elif due and self.members.lost:
            self._begin_restoring(self._restoring_seconds)

    # What they say --------------------------------------------------------------------------------------------------

    def greet(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Await every agent's greeting; return the nodes' descriptions in node order. From then on a silent node is lost."""
        hosts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(hosts) < len(self.channels):
            if (left := deadline - time.monotonic()) <= 0:
                missing = sorted({channel.node for channel in self.channels} - hosts.keys())
                raise RunFailedError(f"waited too long for agents of nodes {missing}; --start-timeout sets how long")
            answer = self.receive(min(left, 1.0), {})
            self.raise_if_interrupted()
            self.check()
            if answer is None:
                continue
            node, message = answer
            if message is None:
                raise self.loss(node)
            if message.kind == "hello":
                hosts[node] = self._greeted(node, message)
        if self.node_timeout_seconds is not None:
            self.members.watch(self.node_timeout_seconds)
        self.hosts = [hosts[channel.node] for channel in self.channels]
        return self.hosts

    def _greeted(self, node: int, message: Message) -> dict[str, Any]:
        if message["protocol"] != PROTOCOL:
            raise RunFailedError(
                f"node {node} speaks protocol {message['protocol']}, this driver {PROTOCOL}: install the same version everywhere"
            )
        self._hostnames[node] = message["host"]["hostname"]
        channel = self.channels[node]
        if channel.shares_files:
            channel.scratch = Path(message["scratch"])
        channel.address = channel.address or message["address"] or ""
        if not channel.address:
            raise RunFailedError(f"{self.name(node)} does not say under which address the others reach it")
        return {**message["host"], "identity": message["identity"]}

    def receive(self, timeout_seconds: float, node_of: Mapping[str, int]) -> tuple[int, Message | None] | None:
        """Return what a node says next of the tasks that there are or in answer to a request, or None after the time.

        None in place of a message, once a node: it is lost. What nodes report on the side is passed on here, and a node that says what
        none does is cut off. `node_of` has the node of each task.
        """
        answer = self.members.next(timeout_seconds)
        if answer is None:
            return None
        node, message = answer
        if message is None:
            self._coming.pop(node, None)
        if message is None or node == DRIVER:
            return answer
        wrong = wrong_with(node, message, node_of) or self.asked.wrong_with(node, message)
        if wrong is not None:
            return (node, None) if self.cut_off(node, wrong) else None
        if message.kind == "hello" and node in self._coming:
            self._come_back(node, message)
        elif message.kind == "sample":
            self._on_sample({**message["record"], "node": node})  # whatever node it says it is of
        elif message.kind == "log":
            self._on_log(node, message.get("task"), message.array("text").tobytes())
        elif message.kind == "trace":
            if self._on_trace is not None:
                self._on_trace(node, message.get("path"), message.array("data").tobytes())
        elif message.kind == "leaving":
            note(f"trainer: {self.name(node)} is going to be ended")
            if self._on_leaving is not None:
                self._on_leaving()
        else:
            return node, message
        return None

    def ask(self, node: int, message: Message, kind: str) -> None:
        """Send a node a request that it answers by one message of a kind."""
        self.asked.of_node(node, kind)
        self.members.tell(node, message)

    def wait(self, seconds: float) -> None:
        """Hear the nodes for so long, while there are no tasks on them. Raises InterruptedRunError where the user interrupts."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.receive(min(left, 1.0), {})
            self.raise_if_interrupted()
            self.check()

    # How lost ones come back ----------------------------------------------------------------------------------------

    def restore(self, timeout_seconds: float) -> None:
        """Have the launcher start agents in the place of nodes that are lost, again and again, until they greet, for so long at most.

        Call while there are no tasks. Those that cannot be started stay lost at once, others that have not greeted then. Raises
        InterruptedRunError.
        """
        deadline = time.monotonic() + timeout_seconds
        afterwards, self._restoring_seconds = self._restoring_seconds, None
        self._coming = {node: min(until, deadline) for node, until in self._coming.items()}
        self._begin_restoring(timeout_seconds)
        while self._coming or (self._replaceable and time.monotonic() < deadline):
            self.receive(0.2, {})
            self.raise_if_interrupted()
            self.check()
            if self._replaceable and self._next_try <= time.monotonic() < deadline:
                self._begin_restoring(deadline - time.monotonic())
        self._restoring_seconds = afterwards

    @property
    def _replaceable(self) -> bool:
        """Whether a node is lost that has not broken the protocol, and the launcher, when asked last, could start an agent for it."""
        return any(node not in self.members.broken and node not in self._irreplaceable for node in self.members.lost)

    def keep_restoring(self, timeout_seconds: float | None) -> None:
        """While tasks train on the others, try again and again to have lost nodes back; each has so long to greet. None: no more."""
        self._restoring_seconds = timeout_seconds
        self._next_try = time.monotonic() + RETRY_SECONDS

    def _begin_restoring(self, timeout_seconds: float) -> None:
        """Start what can be started in the place of the nodes that are lost, save those that broke the protocol."""
        self._next_try = time.monotonic() + RETRY_SECONDS
        for node in self._silent - self.members.broken.keys():
            self.members.lose(node)
        for node in [node for node in self.members.lost if node not in self.members.broken]:
            try:
                channel = self._replace(node)
            except OSError as error:
                raise RunFailedError(f"no agent can be started in the place of {self.name(node)}: {error}", f"agent-{node}") from error
            if channel is None:
                self._irreplaceable.add(node)
                continue
            self._irreplaceable.discard(node)
            self._coming[node] = time.monotonic() + timeout_seconds
            self.channels[node] = channel
            self.asked.of_new_agent(node)
            self._silent.discard(node)
            self._isolated.pop(node, None)
            self.members.admit(channel)

    def _come_back(self, node: int, message: Message) -> None:
        del self._coming[node]
        try:
            self.hosts[node] = self._greeted(node, message)
        except RunFailedError as error:
            self.members.lose(node)  # it is none of the run's; another may come
            self._on_useless(str(error))
            return
        self.members.listen_to(node)

    # How they end ---------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> Sequence[int]:
        """The nodes that are lost, in the order in which that was noticed."""
        return self.members.lost

    @property
    def answering(self) -> set[int]:
        """The nodes that are not lost, and have answered whatever they were asked."""
        return self.members.present - self._silent - self._coming.keys()

    def cut_off(self, node: int, wrong: str) -> bool:
        """Cut a node off for what it has sent; return whether it is lost by that."""
        if node in self.members.lost:
            return False
        self.members.cut_off(node, wrong)
        return True

    def isolate(self, node: int, described: str) -> NodeLostError:
        """Give a node up that the others do not reach, though this process does; return the error that says so."""
        self._isolated[node] = described
        self.members.lose(node)
        return self.loss(node)

    def lose_all(self) -> None:
        """Give every node up, as what they live in has gone; call while there are no tasks."""
        for node in sorted(self.members.present):
            self.members.lose(node)

    def ignores_requests(self, nodes: set[int]) -> None:
        """Remember nodes that do not answer: they are not waited for again."""
        self._silent |= nodes

    def give_up_silent(self) -> None:
        """Cut off the nodes that do not answer: closing their channels would wait for what they do not read."""
        for node in self._silent & self.members.present:
            self.members.give_up(node)

    @property
    def violation(self) -> RunFailedError | None:
        """What a node did that none does, whenever it did, so that nothing of the run can be relied on; None where none did."""
        broken = next(iter(self.members.broken), None)
        return None if broken is None else self.loss(broken)

    def finish(self, exit_code: int) -> None:
        """Tell the agents that the run is over, and how it went; nothing more is told them."""
        for node in self.answering:
            self.members.tell(node, Message("finish", {"exit_code": exit_code}))
        self.members.flush(FLUSH_SECONDS)
        self.members.end_sending(FLUSH_SECONDS)

    def loss(self, node: int) -> NodeLostError:
        """Return the error that a run without this node ends with."""
        return NodeLostError(self.describe_loss(node), f"agent-{node}", node)

    def describe_loss(self, node: int) -> str:
        """Say how a node was lost, in words."""
        members = self.members
        if node in members.broken:
            return f"{self.name(node)} sent {members.broken[node]}: it is broken, or hostile, and has been cut off"
        if node in self._isolated:
            return self._isolated[node]
        if node in members.silent:
            places = " and ".join(self.name(each) for each in sorted(members.silent))
            have = "have" if len(members.silent) > 1 else "has"
            return f"{places} {have} not been heard of for {members.silent[node]:g} s (--node-timeout)"
        channel = self.channels[node]
        how = None if channel.process is None else how_it_ended(channel.process, channel.explain)
        return f"the agent of {self.name(node)} {how or 'has gone: the connection to it has ended'}"

    def name(self, node: int) -> str:
        """Name a node, with its host where the run has nodes on others than this."""
        if all(channel.shares_files and channel.host is None for channel in self.channels):
            return f"node {node}"
        channel = self.channels[node]
        known = (channel.host, self._hostnames.get(node), channel.address)
        return f"node {node} (host {', '.join(dict.fromkeys(name for name in known if name))})"
