"""Joining a run whose processes were started externally, with the same settings in all."""

from __future__ import annotations

import reprlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...core.console import note
from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...core.listener import PROOF_SECONDS
from ...core.process import interrupts_answered, interrupts_ignored
from ...core.settings.job_fields import fields_with_role
from ...engine.protocol.join_messages import JoinRequest, Refused, Welcome
from ...engine.protocol.messages import PROTOCOL, Alive, MessageParser, Stream
from ...engine.protocol.node_messages import Finish
from ...engine.protocol.transport import WrongSecretError, connect
from ..node.agent import Agent, await_silence
from .environments import Membership

NODE_SPECIFIC_FIELDS = frozenset({*fields_with_role("destination"), "data_dir"})  # fields that may differ between the nodes of one job
RESUME = "resume"  # the key of a request that resumes a run
RETRY_SECONDS = 0.2  # interval of tries to reach the driver
_ANSWERS = MessageParser(Welcome, Refused)
_TO_STANDBYS = MessageParser(Alive, Finish)


def job_request(job: Job) -> dict[str, Any]:
    """Return the settings that all processes of a new run must share: the whole job."""
    return _common(job.model_dump(mode="json"))


def resume_request(resume: Path, settings: Mapping[str, Any], place: Membership) -> dict[str, Any]:
    """Return the settings that all processes of a resumed run share, with the run's name."""
    return {RESUME: resume.name, **_common(settings), **place.shape}


def automatic_request(job: Job) -> dict[str, Any]:
    """Return the settings that all processes share with ``--resume auto``: the job as typed."""
    return {RESUME: "auto", **job_request(job)}


def _common(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in NODE_SPECIFIC_FIELDS}


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe how the driver's and another process's requests differ; None if they agree."""
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
    return _SHORT.repr(settings[key]) if key in settings else "not given"


_SHORT = reprlib.Repr()  # bounds the text of values from another process, also if they are nested
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 100


def another_protocol(whose: str, theirs: int | None, ours: str) -> str:
    """Describe a peer with another version of the protocol, or none."""
    spoken = "a protocol from before it had a number" if theirs is None else f"protocol {theirs}"
    return f"{whose} speaks {spoken}, {ours} {PROTOCOL}: install the same version everywhere"


def join_run(settings: Mapping[str, Any], place: Membership, secret: bytes, start_timeout_seconds: float) -> int:
    """Join as an agent or standby; return the run's exit code. Raises RunFailedError on failure."""
    request = JoinRequest(place.node, place.local_rank, dict(settings), PROTOCOL)
    stream, node_timeout_seconds = welcomed(request, place, secret, start_timeout_seconds)
    driver = place.rendezvous[0]

    def answer() -> None:
        note(f"trainer: node {place.node} has joined a run, which its driver alone ends: press Ctrl-C there (node 0, at {driver})")

    with interrupts_ignored(), interrupts_answered(answer):
        if place.local_rank > 0:
            return _stand_by(stream, node_timeout_seconds, place)
        agent = Agent(stream, place.node, remote=True, loss_exit_code=place.loss_exit_code)
        if place.starts_again:
            signal.signal(signal.SIGTERM, lambda number, frame: agent.leave())  # the end of the block takes it back
        try:
            return agent.serve()
        except OSError as error:
            failure = RunFailedError(f"node {place.node} cannot do what the driver asks: {error}")
            failure.exit_code = place.loss_exit_code
            raise failure from error


def _stand_by(stream: Stream, node_timeout_seconds: float, place: Membership) -> int:
    over = threading.Event()
    problem = ""

    def watch_driver() -> None:
        nonlocal problem
        if (silence := await_silence(stream, node_timeout_seconds, over)) is not None:
            problem = silence
            stream.cut()

    watched = False
    try:
        while (message := stream.receive()) is not None:
            request = _TO_STANDBYS.parse(message)
            if isinstance(request, Finish):
                return request.exit_code
            if place.node != 0 and not watched:
                watched = True
                threading.Thread(target=watch_driver, name="silence", daemon=True).start()
    except OSError as error:
        problem = problem or f"the driver has gone ({error})"
    finally:
        over.set()
    lost = RunFailedError(problem or "the driver has gone")
    lost.exit_code = place.loss_exit_code
    raise lost


def welcomed(request: JoinRequest, place: Membership, secret: bytes, start_timeout_seconds: float) -> tuple[Stream, float]:
    """Ask the driver until it accepts; return the channel and the node time-out in seconds.

    Raises UsageError if it refuses or has another secret, RunFailedError after the start time-out. If processes are restarted, another
    secret is retried: it may be that of another run at the driver's former address.
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
    late = threading.Event()

    def give_up() -> None:
        late.set()
        stream.cut()

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), give_up)
    timer.daemon = True
    timer.start()
    problem: OSError | None = None
    try:
        yield
    except OSError as error:
        problem = error
        if not late.is_set():
            raise
    finally:
        timer.cancel()
        timer.join()  # it cuts nothing any more
    if late.is_set():
        stream.close()
        raise TimeoutError("it knows the secret, but has not answered whether this process may join") from problem


def _ask(request: JoinRequest, stream: Stream, *, starts_again: bool) -> tuple[Stream, float]:
    """Return the stream and node time-out if accepted. Raises UsageError, OSError if retryable."""
    with ExitStack() as unless_welcome:
        unless_welcome.callback(stream.close)
        stream.send(request)
        message = stream.receive()
        if message is None:
            raise ConnectionError("the driver closed the connection")
        if message.kind == "welcome" and message.protocol != PROTOCOL:
            raise UsageError(another_protocol("the driver", message.protocol, "this process"))
        answer = _ANSWERS.parse(message)
        if isinstance(answer, Refused):
            error = ConnectionError if starts_again and answer.for_now else UsageError
            raise error(f"the driver turned this process away: {answer.reason}")
        assert isinstance(answer, Welcome)
        stream.limit_silence(2 * answer.node_timeout_seconds)
        unless_welcome.pop_all()
    return stream, answer.node_timeout_seconds
