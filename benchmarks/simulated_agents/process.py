"""One process with many simulated agents.

Usage: ``python -m benchmarks.simulated_agents.process --first N --count N … OPTION VALUE …``
The options behind ``--`` are those of the driver's ``trainer run``. The process joins with one connection for each agent, serves
them until the driver has sent the end of the run, and exits with that code.
"""

from __future__ import annotations

import argparse
import os
import selectors
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from crosstrain.core.errors import TrainerError
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.protocol.join_messages import JoinRequest
from crosstrain.engine.protocol.messages import PROTOCOL
from crosstrain.engine.protocol.transport import Incoming, Outgoing, read_secret
from crosstrain.launch.launchers.environments import detect
from crosstrain.launch.launchers.joining import job_request, welcomed
from crosstrain.launch.launchers.machine_checks import allow_files_of_nodes
from crosstrain.launch.launchers.rendezvous import apply_membership

from .agent import SimulatedAgent, Timers, described_host, sample_of_this_process

LOADED = "loaded"
"""Printed by a process that is about to join: loading Python many times on one machine is not part of a start."""

JOINING_AT_A_TIME = 32
"""Concurrent joins of each process: real nodes join at the same moment."""


class Connection:
    """The connection of one agent."""

    def __init__(self, node: int, rendezvous: str, settings: Mapping[str, Any], timers: Timers, pattern: Mapping[str, Any]) -> None:
        """Join the driver. Raises UsageError or RunFailedError where it does not let the node in."""
        resolved = resolve(settings, {}, None)
        place = detect({}, rendezvous, node, resolved.job.nodes)
        assert place is not None
        job, _ = apply_membership(resolved.job, resolved.sources, place)
        request = JoinRequest(node, 0, job_request(job), PROTOCOL)
        self._stream, _ = welcomed(request, place, read_secret(None), job.start_timeout)  # kept: it owns the connection
        detached = self._stream.detach()
        self.incoming, self.outgoing = Incoming(detached), Outgoing(detached)
        self.agent = SimulatedAgent(node, self.outgoing.send, timers, pattern)

    def serve(self, events: int) -> bool:
        """Receive and send pending messages; return whether the run continues for this agent."""
        if events & selectors.EVENT_WRITE:
            self.outgoing.flush()
        if events & selectors.EVENT_READ:
            self.incoming.fill()
        while (message := self.incoming.next()) is not None:  # also messages read with the welcome
            self.agent.hear(message[0])
        return self.agent.exit_code is None and not self.incoming.ended

    def close(self) -> None:
        """Leave."""
        self.outgoing.close()
        self.incoming.close()
        self._stream.close()


def serve(connections: list[Connection], timers: Timers) -> int:
    """Serve all agents until each has received the end of the run; return the exit code.

    1 if one never received it.
    """
    codes = []
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.incoming.descriptor, selectors.EVENT_READ, connection)
            if not connection.serve(0):
                raise ConnectionError("a connection ended before it was served")
        while left := len(connections) - len(codes):
            seconds = timers.run()
            for connection in connections:  # with unsent messages
                if connection.outgoing.waiting and connection.incoming.descriptor >= 0:
                    connection.outgoing.flush()
            for key, events in selector.select(1.0 if seconds is None else seconds):
                if not key.data.serve(events):
                    selector.unregister(key.fileobj)
                    codes.append(1 if key.data.agent.exit_code is None else key.data.agent.exit_code)
                    key.data.close()
            assert left >= 0
    return max(codes)


def main(arguments: list[str] | None = None) -> int:
    """Join, and take part in the run to its end."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulated_agents.process")
    parser.add_argument("--first", type=int, required=True, help="the number of the first node")
    parser.add_argument("--count", type=int, required=True, help="how many nodes")
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("options", nargs="*", help="settings of the job: name=value")
    options = parser.parse_args(arguments)
    settings = dict(option.split("=", 1) for option in options.options)
    allow_files_of_nodes(options.count, joining=True)
    timers, pattern = Timers(), sample_of_this_process()
    described_host(settings["backend"])
    print(LOADED, flush=True)
    try:
        with ThreadPoolExecutor(JOINING_AT_A_TIME) as joining:
            nodes = range(options.first, options.first + options.count)
            connections = [*joining.map(lambda node: Connection(node, options.rendezvous, settings, timers, pattern), nodes)]
    except TrainerError as error:
        print(f"simulated agents: {error}", file=sys.stderr)
        return error.exit_code
    return serve(connections, timers)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
