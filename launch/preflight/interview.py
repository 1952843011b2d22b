"""Asks the probes of all hosts at once: what they are, what time it is there, what data and model they have, and whom they reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...core.errors import InterruptedRunError
from ...core.job import Job
from ...engine.protocol.messages import PROTOCOL, Message, ProtocolError, Stream
from ...engine.protocol.probe_answers import wrong_with_answer

__all__ = ["HostReport", "Probe", "interview", "peers_of"]

LOOK_SECONDS = 0.1
"""How often is looked whether the user has interrupted."""

TIME_QUESTIONS = 3
"""How often a host is asked for the time: the answer that took least is the one that counts."""

ALL_PAIRS_UP_TO = 16
"""Hosts: with more of them each tries the next one, the second, the fourth, the eighth … after it, which reaches every switch between."""

REACH_SECONDS = 6.0
REACH_SHARE = 0.25
"""Of the time so many seconds, but no larger share, are kept for the hosts to try each other, whatever one of them takes to answer: a peer
that does not answer is given up after 3 s, and there may be another before it."""


@dataclass(frozen=True)
class Probe:
    """A probe that was started on a host: the channel to it, and what says why it has ended, once it has.

    `address` is where the others reach the host, as what has started the probe knows it; empty where the probe has to say it.
    """

    host: str
    stream: Stream
    explain: Callable[[], str]
    address: str = ""


@dataclass
class HostReport:
    """What is known of a host. `problem`: why it does not answer, None where it does.

    `described` is what the probe says of the host. Its clock is ahead of this one's by `ahead_seconds`, give or take `error_seconds`.
    `data` and `model` are answers, None where nothing was asked. `tried` is how many others there were to try,
    and `unreachable` says by host why one cannot be reached from here; None where that is not known. `silent`: it has not said all yet.
    """

    host: str
    problem: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    ahead_seconds: float = 0.0
    error_seconds: float = 0.0
    data: Message | None = None
    model: Message | None = None
    ports: tuple[int, ...] = ()
    tried: int = 0
    unreachable: dict[str, str] | None = None
    silent: bool = False


class _ProbeEndedError(Exception):
    """The probe does not answer any more, or not what it was asked; why."""


def interview(
    probes: Sequence[Probe], backend: str, job: Job | None, timeout_seconds: float, interrupted: Callable[[], bool] = lambda: False
) -> list[HostReport]:
    """Ask every probe everything, all hosts side by side; return what is known after so many seconds at the latest, in order.

    With a job also its data, which a host may have to prepare, and a model of the user's. Raises InterruptedRunError where the user
    interrupts.
    """
    deadline = time.monotonic() + timeout_seconds
    kept_seconds = min(REACH_SECONDS, REACH_SHARE * timeout_seconds)
    within = f"{timeout_seconds - kept_seconds:g} of {timeout_seconds:g} s (the rest is for the hosts to try each other)"
    reports = [HostReport(probe.host, f"does not answer within {within}", silent=True) for probe in probes]
    pairs = list(zip(probes, reports, strict=True))
    _side_by_side([partial(_ask, probe, report, backend, job) for probe, report in pairs], deadline - kept_seconds, interrupted)
    there = [(probe, report) for probe, report in pairs if report.problem is None]
    places = {report.host: (report.described["address"], report.ports) for _, report in there if report.described.get("address")}
    _side_by_side([partial(_reach, probe, report, places) for probe, report in there], deadline, interrupted)
    return reports


def peers_of(own: str, hosts: Sequence[str]) -> list[str]:
    """Return whom a host tries to reach: all others or, where there are many, those at distances of powers of two."""
    place, count = hosts.index(own), len(hosts)
    if count <= ALL_PAIRS_UP_TO:
        return [host for host in hosts if host != own]
    return [hosts[(place + distance) % count] for distance in (1 << power for power in range(count.bit_length())) if distance < count]


def _side_by_side(work: Sequence[Callable[[], None]], deadline: float, interrupted: Callable[[], bool]) -> None:
    """Do it all in threads of their own, and wait for the last or the deadline; what takes longer is left to end with its probe."""
    threads = [threading.Thread(target=each, name="preflight", daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(LOOK_SECONDS)
            if interrupted():
                raise InterruptedRunError("interrupted by the user, while the hosts were looked at")


def _ask(probe: Probe, report: HostReport, backend: str, job: Job | None) -> None:
    try:
        report.described = _described(probe, backend)
        if report.described["protocol"] != PROTOCOL:
            report.problem, report.silent = None, False  # what it is asked further it may understand in another way
            return
        report.error_seconds, report.ahead_seconds = min((_compare_clocks(probe) for _ in range(TIME_QUESTIONS)), key=lambda each: each[0])
        report.ports = tuple(_found(probe, "listen")["ports"])
        if job is not None:
            report.model = _answer(probe, "model", model=job.model, backend=backend)
            report.data = _answer(probe, "data", data=job.data, data_dir=None if job.data_dir is None else str(job.data_dir))
    except _ProbeEndedError as error:
        report.problem, report.silent = str(error), False
    else:
        report.problem, report.silent = None, False


def _described(probe: Probe, backend: str) -> Mapping[str, Any]:
    """Return what a host says of itself; of one whose probe speaks another version of the protocol that alone, which is all that counts."""
    found = _found(probe, "describe", backend=backend)
    if found["protocol"] != PROTOCOL:
        return {"protocol": found["protocol"]}
    return {**found, "address": probe.address or found["address"]}


def _compare_clocks(probe: Probe) -> tuple[float, float]:
    """Return by how much the answer may be off, and how far the host's clock is ahead: it was read halfway between question and answer."""
    asked, begun = time.time(), time.monotonic()
    there = _found(probe, "time")["seconds"]
    seconds = time.monotonic() - begun
    return seconds / 2, there - (asked + seconds / 2)


def _reach(probe: Probe, report: HostReport, places: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Have a host try the ports of others. `places` has the address and the ports of each that says where it is."""
    if report.host not in places:
        return  # it does not say its address, or is of another release: nobody is tried from there
    peers = peers_of(report.host, list(places))
    tried = [(peer, port) for peer in peers for port in places[peer][1]]
    try:
        problems = _found(probe, "connect", peers=[(places[peer][0], port) for peer, port in tried])["problems"]
    except _ProbeEndedError as error:
        report.problem = str(error)
        return
    report.tried = len(places) - 1 if peers else 0
    found: dict[str, dict[int, str | None]] = {}
    for (peer, port), problem in zip(tried, problems, strict=True):
        found.setdefault(peer, {})[port] = problem
    report.unreachable = {peer: told for peer, by_port in found.items() if (told := _unreached(by_port))}


def _unreached(by_port: Mapping[int, str | None]) -> str:
    """Return why a peer's ports cannot be reached, empty where all can; where only some cannot, which."""
    problems = {port: problem for port, problem in by_port.items() if problem is not None}
    if len(problems) == len(by_port):
        return ", ".join(dict.fromkeys(problems.values()))
    return ", ".join(f"port {port}: {problem}" for port, problem in problems.items())


def _found(probe: Probe, question: str, **fields: Any) -> Mapping[str, Any]:
    answer = _answer(probe, question, **fields)
    if answer.kind != "found":
        raise _ProbeEndedError(f"cannot say what it is: {answer.get('text')}")
    return answer.fields


def _answer(probe: Probe, question: str, **fields: Any) -> Message:
    try:
        probe.stream.send(Message(question, fields))
        answer = probe.stream.receive()
    except ProtocolError as error:
        raise _ProbeEndedError(f"answers the question {question!r} with {error}: it is broken, or hostile") from error
    except OSError:
        answer = None
    if answer is None:
        raise _ProbeEndedError(probe.explain())
    if (wrong := wrong_with_answer(question, fields, answer)) is not None:
        raise _ProbeEndedError(f"answers the question {question!r} with {wrong}: it is broken, or hostile")
    return answer
