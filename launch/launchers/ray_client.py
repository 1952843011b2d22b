"""The client of a Ray cluster: a child of the driver that holds nodes and starts commands.

Started as ``python -m crosstrain.launch.launchers.ray_client``, as Ray's library ends a process that loses its cluster, handles signals,
and prints. Gives the nodes back when its standard input ends.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.process import ignore_interrupts
from ...engine.protocol.messages import MAX_ERROR_CHARACTERS, Stream
from ...engine.protocol.transport import take_stdio
from ..node.scratch import ADDRESS_VARIABLE, address_towards
from . import ray_node_holder as node_holder
from .ray_messages import (
    REQUESTS,
    CommandEnded,
    CommandLine,
    CommandsLost,
    Failed,
    KillCommand,
    Place,
    Placed,
    RayEvent,
    RayRequest,
    StartCommand,
    Waiting,
)
from .ray_state import PLACE_ON_EACH, Bundle, bundles_everywhere, bundles_for_workers, shortage

LOOK_SECONDS = 0.5  # interval of looking for more nodes to listen to, or for the requested nodes
PLACE_SECONDS = 3.0  # Ray takes less for nodes that exist and are free; only longer waits are reported
AGENTS_END_SECONDS = 3.0  # time limit for commands to end by themselves when the driver is gone
LEAVE_SECONDS = 8.0  # time limit for giving the nodes back; Ray takes them when this process has ended
MAX_REASON = 400  # characters of Ray's text on an actor's end; the rest is about the cluster
MAX_TRIES = 3  # tries of a start whose node dies before it has begun
OUTSIDE = "ray://"  # begins the address of a cluster that does not include this machine
NO_CLUSTER_HERE = (
    "this machine is a node of no Ray cluster; make it one (`ray start --address=HEAD:6379` here, `ray start --head` for a new cluster), "
    "or name the cluster: --ray-address HEAD:6379, or ray://HEAD:10001 from outside of it"
)
FAILURES = (RayError, OSError, RuntimeError, ValueError)  # exceptions of Ray's calls that the cluster does not serve
SIMULTANEOUS_CALLS = 4  # of an actor: one call waits for events while others start and kill


def main() -> None:
    """Serve the driver on standard input and output until it goes."""
    ignore_interrupts()
    _Client(take_stdio()).serve()


class _Client:
    """Executes the driver's requests in order; another thread sends the nodes' events."""

    def __init__(self, driver: Stream) -> None:
        self._driver = driver
        self._requests: queue.SimpleQueue[RayRequest] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._group: PlacementGroup | None = None
        self._bundles: Sequence[Bundle] = ()
        self._holders: dict[int, Any] = {}
        self._awaited: dict[Any, int] = {}  # node of each call that waits for events
        self._starting: dict[Any, StartCommand] = {}  # request of each start that the node has not acknowledged
        self._running: defaultdict[int, set[int]] = defaultdict(set)  # numbers of the acknowledged starts, by node
        self._lock = threading.Lock()

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        threading.Thread(target=self._send_events, name="events", daemon=True).start()
        try:
            while not self._leaving.is_set():
                with suppress(queue.Empty):
                    self._execute(self._requests.get(timeout=LOOK_SECONDS))
        finally:
            self._leave()

    def _listen(self) -> None:
        with suppress(OSError):
            while (message := self._driver.receive()) is not None:
                self._requests.put(REQUESTS.parse(message))
        self._leaving.set()
        if self._group is not None:
            time.sleep(LEAVE_SECONDS)
        os._exit(1)  # a call to Ray hangs, or there is nothing to give back

    def _send(self, event: RayEvent) -> None:
        with suppress(OSError):  # the driver is gone, which `_listen` sees
            self._driver.send(event)

    def _execute(self, request: RayRequest) -> None:
        try:
            if isinstance(request, Place):
                self._place(request)
            elif isinstance(request, StartCommand) and self._group is not None:
                command = [*map(os.fsdecode, request.command)]
                call = self._holder(request.node).start.remote(request.number, command, request.first_line)
                with self._lock:
                    self._starting[call] = request
            elif isinstance(request, KillCommand) and request.node in self._holders:
                self._holders[request.node].kill.remote(request.number)
        except FAILURES as error:
            self._send(Failed(_text(error)))

    def _place(self, request: Place) -> None:
        address = request.address
        os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")  # events of other users
        _connect(address)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set its own handler
        cloudpickle.register_pickle_by_value(node_holder)
        if request.whole_cluster:
            self._bundles = bundles_everywhere(ray.nodes())
        else:
            self._bundles = bundles_for_workers(request.workers_by_node, request.threads, request.device, ray.nodes())
        if not self._bundles:
            self._send(Failed("no node of the cluster has a CPU"))
            return
        self._group = placement_group([dict(bundle) for bundle in self._bundles], strategy="STRICT_SPREAD")
        reported, begun = "", time.monotonic()
        while not self._group.wait(LOOK_SECONDS):
            if self._leaving.is_set():
                return
            text = PLACE_ON_EACH if request.whole_cluster else shortage(ray.nodes(), self._bundles)
            if text != reported and time.monotonic() - begun >= PLACE_SECONDS:
                self._send(Waiting(text))
                reported = text
        within = not address.startswith(OUTSIDE)
        own_address = ray.util.get_node_ip_address() if within else address_towards(urlsplit(address).hostname or "")
        self._send(Placed(own_address, len(self._bundles)))

    def _holder(self, node: int) -> Any:
        assert self._group is not None
        with self._lock:
            if node not in self._holders:
                bundle = self._bundles[node]
                actor: Any = ray.remote(node_holder.NodeHolder)
                resources = {name: value for name, value in bundle.items() if name not in ("CPU", "GPU")}
                needs = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": resources}
                options = {**needs, "max_concurrency": SIMULTANEOUS_CALLS}
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
                self._holders[node] = actor.options(**options, max_restarts=0, scheduling_strategy=place).remote(ADDRESS_VARIABLE)
                self._awaited[self._holders[node].events.remote()] = node
            return self._holders[node]

    def _send_events(self) -> None:
        while not self._leaving.is_set():
            with self._lock:
                calls = [*self._awaited, *self._starting]
            if not calls:
                time.sleep(LOOK_SECONDS)
                continue
            try:
                for call in ray.wait(calls, num_returns=1, timeout=LOOK_SECONDS)[0]:
                    if call in self._starting:
                        self._acknowledge(call)
                    else:
                        self._send_event(call)
            except FAILURES as error:
                self._send(Failed(_text(error)))
                return

    def _acknowledge(self, call: Any) -> None:
        """Take a node's acknowledgement of a start; retry if the node has died, as Ray replaces it."""
        with self._lock:
            request = self._starting.pop(call)
        try:
            ray.get(call)
        except RayActorError as error:
            if request.tries < MAX_TRIES:
                request.tries += 1
                self._requests.put(request)
            else:
                self._send(CommandsLost([request.number], _reason(error)))
            return
        with self._lock:
            self._running[request.node].add(request.number)

    def _send_event(self, call: Any) -> None:
        with self._lock:
            node = self._awaited.pop(call)
            holder = self._holders[node]
        try:
            events = ray.get(call)
        except ActorUnavailableError:
            events = []  # it may come back; the agent's heartbeats show a lost node sooner
        except RayActorError as error:
            with self._lock:
                del self._holders[node]
                numbers = self._running.pop(node, set())
            self._send(CommandsLost(sorted(numbers), _reason(error)))
            return
        for number, kind, value in events:
            self._send(CommandLine(number, _text(value)) if kind == "line" else CommandEnded(number, value))
        with self._lock:
            self._awaited[holder.events.remote()] = node

    def _leave(self) -> None:
        if self._group is None:
            return
        with suppress(*FAILURES):
            if self._holders:
                ends = [holder.end.remote(AGENTS_END_SECONDS) for holder in self._holders.values()]
                ray.wait(ends, num_returns=len(ends), timeout=AGENTS_END_SECONDS + 1)
            remove_placement_group(self._group)
            ray.shutdown()


def _connect(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        if address != "auto" or os.environ.get("RAY_ADDRESS"):
            raise
        raise ConnectionError(NO_CLUSTER_HERE) from error


def _text(value: object) -> str:
    """Return a text that can be sent, as names of files may be no Unicode."""
    return str(value).encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARACTERS]


def _reason(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    known = re.search(r"actor is dead because (.*?)(\.|$)", text)
    return known[1] if known else text[:MAX_REASON]


if __name__ == "__main__":
    main()
