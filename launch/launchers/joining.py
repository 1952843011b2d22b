"""Joining a run whose processes somebody else started: how a process reaches the driver, and which settings both must agree on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...core.liveness.silence import TICK_SECONDS, SilenceCounter
from ...core.process import InterruptsIgnored, interrupts_answered
from ...core.untrusted.console import note
from ...core.untrusted.listener import PROOF_SECONDS
from ...engine.protocol.messages import PROTOCOL, Message, Stream
from ...engine.protocol.transport import WrongSecretError, connect
from ..environments.base import Membership
from ..node.agent import Agent

__all__ = ["another_protocol", "automatic_request", "difference", "job_request", "join_run", "resume_request", "welcomed"]

OWN_TO_EACH_NODE = frozenset({"out", "name", "data_dir", "mlflow", "mlflow_experiment"})
"""Fields that may differ between the nodes of one job."""

RESUME = "resume"
"""Stands among the settings that a process was asked for where it is to go on with a run."""

DRIVER = 0
"""The only peer that a standby listens for."""

RETRY_SECONDS = 0.2
"""How long a process waits before it tries again to reach the driver."""


def job_request(job: Job) -> dict[str, Any]:
    """Return what every process of a new run has to be asked for alike: the whole job."""
    return _alike(job.model_dump(mode="json"))


def resume_request(resume: Path, given: Mapping[str, Any], place: Membership) -> dict[str, Any]:
    """Return the same for a run that goes on: what was given besides, and the run's name, which only the driver's machine has to have."""
    return {RESUME: resume.name, **_alike(given), **place.shape}


def automatic_request(job: Job) -> dict[str, Any]:
    """Return the same for a run that begins or goes on, as it stands: the job as it was typed, and that it was typed so."""
    return {RESUME: "auto", **job_request(job)}


def _alike(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in OWN_TO_EACH_NODE}


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Say what another process was asked for that the driver was not, or the other way round; None where they agree."""
    if "auto" in (ours.get(RESUME), theirs.get(RESUME)) and ours.get(RESUME) != theirs.get(RESUME):
        return "it and the driver were not both started with --resume auto"
    if (RESUME in ours) != (RESUME in theirs):
        return "it resumes a run (--resume), the driver starts one" if RESUME in theirs else "the driver resumes a run: use --resume"
    different = sorted(key for key in ours.keys() | theirs.keys() if key not in ours or key not in theirs or ours[key] != theirs[key])
    if not different:
        return None
    listed = ", ".join(f"{key} {_value(theirs, key)} instead of {_value(ours, key)}" for key in different)
    return f"its job differs: {listed}"


def _value(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "not given"


def another_protocol(whose: str, theirs: object, ours: str) -> str:
    """Say that a peer speaks another version of the protocol, or none that has a number."""
    spoken = f"protocol {theirs}" if type(theirs) is int else "a protocol from before it had a number"
    return f"{whose} speaks {spoken}, {ours} {PROTOCOL}: install the same version everywhere"


def join_run(asked: Mapping[str, Any], place: Membership, secret: bytes, start_timeout_seconds: float) -> int:
    """Join the driver as a node's agent or as a standby; return the run's exit code when it has ended. `asked`: see ExternalLauncher.

    Raises RunFailedError where this node cannot do what it is asked.
    """
    request = Message("join", {"protocol": PROTOCOL, "node": place.node, "local_rank": place.local_rank, "asked": dict(asked)})
    stream, node_timeout_seconds = welcomed(request, place, secret, start_timeout_seconds)
    driver = place.rendezvous[0]

    def answer() -> None:
        note(f"trainer: node {place.node} has joined a run, which its driver alone ends: press Ctrl-C there (node 0, at {driver})")

    with InterruptsIgnored(), interrupts_answered(answer):
        if place.local_rank > 0:
            return _Standby(stream, node_timeout_seconds, place).wait()
        agent = Agent(stream, place.node, remote=True, loss_exit_code=place.loss_exit_code)
        if place.starts_again:
            signal.signal(signal.SIGTERM, lambda number, frame: agent.leave())  # the end of the block takes it back
        try:
            return agent.serve()
        except OSError as error:
            failure = RunFailedError(f"node {place.node} cannot do what the driver asks: {error}")
            failure.exit_code = place.loss_exit_code
            raise failure from error


class _Standby:
    """A process that waits for the end of a run in which it has nothing to do.

    On another node than the driver's it may be cut off from that, and gives it up when it says nothing for the node time-out, counted from
    its first sign of life on. On the driver's own node it hears of the driver's end, however that ends, and waits where it is only stopped.
    """

    def __init__(self, stream: Stream, node_timeout_seconds: float, place: Membership) -> None:
        self._stream = stream
        self._counter = SilenceCounter(node_timeout_seconds, time.monotonic())
        self._remote = place.node != 0
        self._loss_exit_code = place.loss_exit_code
        self._over = threading.Event()
        self._why = ""

    def wait(self) -> int:
        """Return the run's exit code when it has ended. Raises RunFailedError where the driver goes before."""
        listens = False
        try:
            while (message := self._stream.receive()) is not None:
                if message.kind == "finish":
                    return int(message["exit_code"])
                if self._remote and not listens:
                    listens = True
                    threading.Thread(target=self._listen, name="silence", daemon=True).start()
        except OSError as error:
            self._why = self._why or f"the driver has gone ({error})"
        finally:
            self._over.set()
        lost = RunFailedError(self._why or "the driver has gone")
        lost.exit_code = self._loss_exit_code
        raise lost

    def _listen(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            if self._counter.tick(time.monotonic(), {DRIVER: self._stream.arrivals}):
                self._why = f"the driver has not been heard of for {self._counter.limit_seconds:g} s (--node-timeout)"
                self._stream.cut()
                return


def welcomed(request: Message, place: Membership, secret: bytes, start_timeout_seconds: float) -> tuple[Stream, float]:
    """Ask the driver, which may not be listening yet or have strangers at its door, until it answers; return the channel to it.

    With it comes the run's node time-out, in seconds.

    Raises UsageError where it refuses or has another secret, RunFailedError where the start time-out passes without an answer. Where
    processes are started again in other places, another secret may be that of a run which has the driver's former address.
    """
    host, ports = place.rendezvous
    deadline = time.monotonic() + start_timeout_seconds
    problem = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        for port in ports:
            try:
                stream = connect((host, port), secret, min(left, PROOF_SECONDS))
                with _cut_at(deadline, stream):
                    return _ask(request, stream, starts_again=place.starts_again)
            except WrongSecretError as error:
                problem = f"the handshake failed: {error}"
                if len(ports) == 1 and not place.starts_again:
                    raise UsageError(f"the handshake with {host}:{port} failed: {error}") from error
            except OSError as error:
                problem = str(error)
        time.sleep(RETRY_SECONDS)
    raise RunFailedError(
        f"the driver could not be reached at {host}, port {ports[0]}, within {start_timeout_seconds:g} s (--start-timeout): {problem}"
    )


@contextmanager
def _cut_at(deadline: float, stream: Stream) -> Iterator[None]:
    """Cut a stream where the block is not through at the deadline, however its peer spends the time. Raises TimeoutError then."""
    decided = threading.Lock()  # by whoever is first: the block, or the deadline

    def give_up() -> None:
        if decided.acquire(blocking=False):
            stream.cut()

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), give_up)
    timer.daemon = True
    timer.start()
    late = "it knows the secret, but has not answered whether this process may join"
    try:
        yield
    except OSError as error:
        if decided.acquire(blocking=False):
            raise
        raise TimeoutError(late) from error
    else:
        if not decided.acquire(blocking=False):
            stream.close()
            raise TimeoutError(late)
    finally:
        timer.cancel()


def _ask(request: Message, stream: Stream, *, starts_again: bool) -> tuple[Stream, float]:
    """Return the stream, and the run's node time-out, where the driver welcomes us.

    Raises UsageError where it refuses, OSError where it goes away; closes it then. Where processes are started again, a driver that refuses
    this one for now has not ended yet with those that were there before, and counts as one that goes away.
    """
    welcome = False
    try:
        stream.send(request)
        answer = stream.receive()
        if answer is None:
            raise ConnectionError("the driver closed the connection")
        welcome = answer.kind == "welcome"
        if not welcome and starts_again and answer.get("for_now"):
            raise ConnectionError(f"the driver turned this process away: {answer.get('reason')}")
        if not welcome:
            raise UsageError(f"the driver turned this process away: {answer.get('reason', answer.kind)}")
        if (found := answer.get("protocol")) != PROTOCOL:
            welcome = False
            raise UsageError(another_protocol("the driver", found, "this process"))
        node_timeout_seconds: float = answer["node_timeout_seconds"]
        stream.limit_silence(2 * node_timeout_seconds)
    finally:
        if not welcome:
            stream.close()
    return stream, node_timeout_seconds
