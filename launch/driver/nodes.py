"""The nodes of a run, their reports, and which of them are lost; they outlast its attempts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...core.console import note
from ...core.errors import InterruptedRunError, RunFailedError
from ...engine.protocol.answer_checks import read_node_message
from ...engine.protocol.messages import PROTOCOL, ProtocolError, WireMessage
from ...engine.protocol.node_messages import Finish, Hello, Leaving, Log, OtherRelease, Sample, Trace
from ...records.store.schema import SystemRecord
from ..launchers.base import NodeChannel, how_it_ended
from .first_failure import NodeLostError
from .node_channels import NodeConnections
from .outstanding_requests import OutstandingRequests

RETRY_SECONDS = 10.0  # between attempts to restore lost nodes
FLUSH_SECONDS = 2.0  # for sending the last messages to the agents


@dataclass(frozen=True)
class ReportHandlers:
    """Handlers of nodes' unrequested reports, called within `Nodes.receive`."""

    sample: Callable[[SystemRecord], None] = lambda record: None
    log: Callable[[int, str, bytes], None] = lambda node, task, text: None
    trace: Callable[[int, str, bytes], None] = lambda node, path, data: None
    leaving: Callable[[], None] | None = None  # a node is about to be ended; None: no node may report that


class Nodes:
    """Connects one thread to every node; `hosts` are their descriptions in node order."""

    def __init__(
        self,
        channels: Sequence[NodeChannel],
        reports: ReportHandlers = ReportHandlers(),
        check: Callable[[], None] = lambda: None,  # called at least once a second; raises if anything but a node failed
        node_timeout_seconds: float | None = None,
        replace: Callable[[int], NodeChannel | None] = lambda node: None,  # starts another agent, if possible
        on_useless: Callable[[str], None] = lambda why: None,  # gets the reason why that agent is rejected
    ) -> None:
        self.channels = list(channels)
        self.hosts: list[dict[str, Any]] = []
        self.peers = NodeConnections(channels)
        self.requests = OutstandingRequests((channel.node for channel in channels), may_leave=reports.leaving is not None)
        self.node_timeout_seconds = node_timeout_seconds
        self.when_more_answer: Callable[[Collection[int]], bool] = lambda answering: False  # returns whether they are used now
        self._reports = reports
        self._check = check
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

    def interrupt(self) -> None:
        """Make the receiving thread raise InterruptedRunError; safe in a signal handler."""
        self._interrupted.set()
        self.peers.wake()

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """Delay an interrupt within the block; the next `receive` of tasks after it raises."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def wake(self) -> None:
        """Make a waiting `receive` return None; safe in a signal handler."""
        self.peers.wake()

    def raise_if_interrupted(self) -> None:
        """Raise InterruptedRunError if the user has interrupted the run."""
        if self._interrupted.is_set() and not self._deferring:
            raise InterruptedRunError("interrupted by the user")

    def check(self) -> None:
        """Raise RunFailedError if anything but a node failed; continue to restore lost nodes."""
        self._check()
        for node in [node for node, until in self._coming.items() if time.monotonic() >= until]:
            del self._coming[node]
            self.peers.lose(node)
        if self._restoring_seconds is None:
            return
        due = time.monotonic() >= self._next_try  # until then a node that is back waits for the others
        if (due or not self._coming) and self.when_more_answer(self.answering):
            self._restoring_seconds = None
        elif due and self.peers.lost:
            self._begin_restoring(self._restoring_seconds)

    def greet(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Wait for all agents; return the nodes' descriptions. From then on a silent node is lost."""
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
            if isinstance(message, Hello | OtherRelease):
                hosts[node] = self._greeted(node, message)
        if self.node_timeout_seconds is not None:
            self.peers.watch(self.node_timeout_seconds)
        self.hosts = [hosts[channel.node] for channel in self.channels]
        return self.hosts

    def _greeted(self, node: int, message: Hello | OtherRelease) -> dict[str, Any]:
        if isinstance(message, OtherRelease):
            raise RunFailedError(
                f"node {node} speaks protocol {message.protocol}, this driver {PROTOCOL}: install the same version everywhere"
            )
        self._hostnames[node] = message.host.hostname
        channel = self.channels[node]
        if channel.shares_files:
            channel.scratch = Path(os.fsdecode(message.scratch))
        channel.address = channel.address or message.address or ""
        if not channel.address:
            raise RunFailedError(f"{self.name(node)} does not say under which address the others reach it")
        return {**msgspec.to_builtins(message.host), "identity": msgspec.to_builtins(message.identity)}

    def receive(self, timeout_seconds: float, node_of: Mapping[str, int]) -> tuple[int, WireMessage | None] | None:
        """Return a node's next answer or message about its tasks, or None after the timeout.

        The message is None, once per node, if it is lost. Reports are handled here, and a node that breaks the protocol is cut off.
        """
        answer = self.peers.next(timeout_seconds)
        if answer is None:
            return None
        node, message = answer
        if message is None:
            self._coming.pop(node, None)
            return node, None
        try:
            report = read_node_message(node, message, node_of)
            wrong = self.requests.violation_in(node, report)
        except ProtocolError as error:
            wrong = str(error)
        if wrong is not None:
            return (node, None) if self.cut_off(node, wrong) else None
        return None if self._handle_report(node, report) else (node, report)

    def _handle_report(self, node: int, message: WireMessage) -> bool:
        if isinstance(message, Hello | OtherRelease) and node in self._coming:
            self._come_back(node, message)
        elif isinstance(message, Sample):
            self._reports.sample(message.as_record(node))  # the claimed node is untrusted
        elif isinstance(message, Log):
            self._reports.log(node, message.task, message.array("text").tobytes())
        elif isinstance(message, Trace):
            self._reports.trace(node, message.path, message.array("data").tobytes())
        elif isinstance(message, Leaving):
            note(f"trainer: {self.name(node)} is going to be ended")
            if self._reports.leaving is not None:
                self._reports.leaving()
        else:
            return False
        return True

    def request(self, node: int, message: WireMessage, kind: str) -> None:
        """Send a node a request with one answer of this kind."""
        self.requests.add_request(node, kind)
        self.peers.send(node, message)

    def wait(self, seconds: float) -> None:
        """Serve the nodes for this long, without tasks. Raises InterruptedRunError."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.receive(min(left, 1.0), {})
            self.raise_if_interrupted()
            self.check()

    def restore(self, timeout_seconds: float) -> None:
        """Have the launcher replace lost nodes until they greet or the timeout; only without tasks.

        Other nodes stay lost. Raises InterruptedRunError.
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
        return any(node not in self.peers.rejected and node not in self._irreplaceable for node in self.peers.lost)

    def keep_restoring(self, timeout_seconds: float | None) -> None:
        """Restore lost nodes during training, each agent with this timeout; None stops that."""
        self._restoring_seconds = timeout_seconds
        self._next_try = time.monotonic() + RETRY_SECONDS

    def _begin_restoring(self, timeout_seconds: float) -> None:
        self._next_try = time.monotonic() + RETRY_SECONDS
        for node in self._silent - self.peers.rejected.keys():
            self.peers.lose(node)
        for node in [node for node in self.peers.lost if node not in self.peers.rejected]:
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
            self.requests.reset_agent(node)
            self._silent.discard(node)
            self._isolated.pop(node, None)
            self.peers.admit(channel)

    def _come_back(self, node: int, message: Hello | OtherRelease) -> None:
        del self._coming[node]
        try:
            self.hosts[node] = self._greeted(node, message)
        except RunFailedError as error:
            self.peers.lose(node)  # another agent may fit this run
            self._on_useless(str(error))
            return
        self.peers.listen_to(node)

    @property
    def answering(self) -> set[int]:
        """The nodes that are not lost and have answered all requests."""
        return self.peers.alive - self._silent - self._coming.keys()

    def cut_off(self, node: int, wrong: str) -> bool:
        """Disconnect a node that broke the protocol; return False if it was lost already."""
        if node in self.peers.lost:
            return False
        self.peers.cut_off(node, wrong)
        return True

    def isolate(self, node: int, described: str) -> NodeLostError:
        """Disconnect a node that the others cannot reach; return the error for that."""
        self._isolated[node] = described
        self.peers.lose(node)
        return self.loss(node)

    def mark_silent(self, nodes: set[int]) -> None:
        """Mark nodes that do not answer; they are not awaited again."""
        self._silent |= nodes

    def disconnect_silent(self) -> None:
        """Cut off the nodes that do not answer, as closing their channels would block."""
        for node in self._silent & self.peers.alive:
            self.peers.disconnect(node)

    @property
    def violation(self) -> RunFailedError | None:
        """The error of a node that broke the protocol, after which the run is untrusted."""
        broken = next(iter(self.peers.rejected), None)
        return None if broken is None else self.loss(broken)

    def finish(self, exit_code: int) -> None:
        """Send the agents the end of the run, their last message."""
        for node in self.answering:
            self.peers.send(node, Finish(exit_code))
        self.peers.flush(FLUSH_SECONDS)
        self.peers.end_sending(FLUSH_SECONDS)

    def loss(self, node: int) -> NodeLostError:
        """Return the error of a run that has lost this node."""
        return NodeLostError(self.describe_loss(node), f"agent-{node}", node)

    def describe_loss(self, node: int) -> str:
        """Describe how a node was lost."""
        peers = self.peers
        if node in peers.rejected:
            return f"{self.name(node)} sent {peers.rejected[node]}: it is broken, or hostile, and has been cut off"
        if node in self._isolated:
            return self._isolated[node]
        if node in peers.silent:
            places = " and ".join(self.name(place) for place in sorted(peers.silent))
            have = "have" if len(peers.silent) > 1 else "has"
            return f"{places} {have} not been heard of for {peers.silent[node]:g} s (--node-timeout)"
        channel = self.channels[node]
        how = None if channel.process is None else how_it_ended(channel.process, channel.explain)
        return f"the agent of {self.name(node)} {how or 'has gone: the connection to it has ended'}"

    def name(self, node: int) -> str:
        """Return a node's name, with its host if any node is on another host."""
        if all(channel.shares_files and channel.host is None for channel in self.channels):
            return f"node {node}"
        channel = self.channels[node]
        known = (channel.host, self._hostnames.get(node), channel.address)
        return f"node {node} (host {', '.join(dict.fromkeys(name for name in known if name))})"
