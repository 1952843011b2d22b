"""Queries the probes of all hosts concurrently: description, clock, data, model, network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from pydantic import ValidationError

from ...backends.base import Availability
from ...core.bounded_json import JsonObject, UnreadableError, read_json
from ...core.drafts import replacing
from ...core.errors import InterruptedRunError
from ...core.job import Job
from ...core.plugins import available, find
from ...core.process import python
from ...data.store.location import user_cache
from ...engine.backend_probe import probe_all
from ...engine.protocol import probe_messages as messages
from ...engine.protocol.messages import PROTOCOL, ProtocolError, Stream
from ...engine.protocol.node_messages import OtherRelease
from ...monitor.gpu import nvidia_hardware

LOOK_SECONDS = 0.1  # interval of looking for an interrupt
TIME_QUESTIONS = 3  # queries of a host's clock, of which the fastest answer counts
ALL_PAIRS_UP_TO = 16  # with more hosts, each tries the 1st, 2nd, 4th, 8th … after it, which reaches every switch between them
REACH_SECONDS = 6.0
REACH_SHARE = 0.25  # upper share of the time; reserved for tries between hosts, as a silent peer takes 3 s, and another may precede it


@dataclass(frozen=True)
class Probe:
    """A probe on a host; `explain` describes its end; without `address` the probe sends it."""

    host: str
    stream: Stream
    explain: Callable[[], str]
    address: str = ""


@dataclass
class HostReport:
    """A host's results. `problem`: why it does not answer; `silent`: some answers are missing.

    The host's clock is `ahead_seconds` ± `error_seconds` ahead of this one's. `data` and `model` are answers, None without a query. `tried`
    counts the other hosts tried; `unreachable` has the reasons by host, None if unknown.
    """

    host: str
    problem: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    ahead_seconds: float = 0.0
    error_seconds: float = 0.0
    data: messages.DataDigest | messages.Problem | None = None
    model: messages.ModelDigest | messages.Problem | None = None
    ports: tuple[int, ...] = ()
    tried: int = 0
    unreachable: dict[str, str] | None = None
    silent: bool = False


class _ProbeEndedError(Exception):
    """The probe has ended or its answer is invalid, with the reason."""


def interview(
    probes: Sequence[Probe], backend: str, job: Job | None, timeout_seconds: float, interrupted: Callable[[], bool] = lambda: False
) -> list[HostReport]:
    """Query all probes concurrently; return reports in order. Raises InterruptedRunError."""
    deadline = time.monotonic() + timeout_seconds
    reserved_seconds = min(REACH_SECONDS, REACH_SHARE * timeout_seconds)
    within = f"{timeout_seconds - reserved_seconds:g} of {timeout_seconds:g} s (the rest is for the hosts to try each other)"
    reports = [HostReport(probe.host, f"does not answer within {within}", silent=True) for probe in probes]
    pairs = list(zip(probes, reports, strict=True))
    _run_concurrently([partial(_query, probe, report, backend, job) for probe, report in pairs], deadline - reserved_seconds, interrupted)
    answering = [(probe, report) for probe, report in pairs if report.problem is None]
    places = {report.host: (report.described["address"], report.ports) for _, report in answering if report.described.get("address")}
    _run_concurrently([partial(_reach, probe, report, places) for probe, report in answering], deadline, interrupted)
    return reports


def peers_of(host_here: str, hosts: Sequence[str]) -> list[str]:
    """Return the hosts to try: all others, or of many those at distances of powers of two."""
    place, count = hosts.index(host_here), len(hosts)
    if count <= ALL_PAIRS_UP_TO:
        return [host for host in hosts if host != host_here]
    return [hosts[(place + distance) % count] for distance in (1 << power for power in range(count.bit_length())) if distance < count]


def _run_concurrently(work: Sequence[Callable[[], None]], deadline: float, interrupted: Callable[[], bool]) -> None:
    threads = [threading.Thread(target=function, name="preflight", daemon=True) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(LOOK_SECONDS)
            if interrupted():
                raise InterruptedRunError("interrupted by the user, while the hosts were looked at")


def _query(probe: Probe, report: HostReport, backend: str, job: Job | None) -> None:
    try:
        report.described = _described(probe, backend)
        if report.described["protocol"] != PROTOCOL:
            report.problem, report.silent = None, False  # it may misunderstand further queries
            return
        report.error_seconds, report.ahead_seconds = min((_compare_clocks(probe) for _ in range(TIME_QUESTIONS)), key=itemgetter(0))
        report.ports = tuple(_result(probe, messages.Listen()).ports)
        if job is not None:
            report.model = _answer(probe, messages.Model(job.model, backend))
            report.data = _answer(probe, messages.Data(job.data, None if job.data_dir is None else str(job.data_dir)))
    except _ProbeEndedError as error:
        report.problem, report.silent = str(error), False
    else:
        report.problem, report.silent = None, False


def _described(probe: Probe, backend: str) -> Mapping[str, Any]:
    description = _result(probe, messages.Describe(backend))
    if isinstance(description, OtherRelease):
        return {"protocol": description.protocol}
    return {**to_builtins(description), "address": probe.address or description.address}


def _compare_clocks(probe: Probe) -> tuple[float, float]:
    """Return the error and lead of a host's clock, read halfway between query and answer."""
    begun_at, begun = time.time(), time.monotonic()
    host_time = _result(probe, messages.Time()).seconds
    seconds = time.monotonic() - begun
    return seconds / 2, host_time - (begun_at + seconds / 2)


def _reach(probe: Probe, report: HostReport, places: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    if report.host not in places:
        return  # without an address, or of another release
    peers = peers_of(report.host, list(places))
    tried = [(peer, port) for peer in peers for port in places[peer][1]]
    try:
        problems = _result(probe, messages.Connect([(places[peer][0], port) for peer, port in tried])).problems
    except _ProbeEndedError as error:
        report.problem = str(error)
        return
    report.tried = len(places) - 1 if peers else 0
    results: dict[str, dict[int, str | None]] = {}
    for (peer, port), problem in zip(tried, problems, strict=True):
        results.setdefault(peer, {})[port] = problem
    report.unreachable = {peer: reason for peer, by_port in results.items() if (reason := _unreached(by_port))}


def _unreached(by_port: Mapping[int, str | None]) -> str:
    problems = {port: problem for port, problem in by_port.items() if problem is not None}
    if len(problems) == len(by_port):
        return ", ".join(dict.fromkeys(problems.values()))
    return ", ".join(f"port {port}: {problem}" for port, problem in problems.items())


def _result(probe: Probe, question: messages.Question) -> Any:
    answer = _answer(probe, question)
    if isinstance(answer, messages.Problem):
        raise _ProbeEndedError(f"cannot say what it is: {answer.text}")
    return answer


def _answer(probe: Probe, question: messages.Question) -> Any:
    """Return the typed answer to a question, which may be a `Problem`."""
    try:
        probe.stream.send(question)
        if (answer := probe.stream.receive()) is not None:
            return messages.read_probe_answer(question, answer)
    except ProtocolError as error:
        raise _ProbeEndedError(f"answers the question {question.kind!r} with {error}: it is broken, or hostile") from error
    except OSError:
        pass
    raise _ProbeEndedError(probe.explain())


# Framework probes are cached, as imports take seconds; an entry holds while its dependencies (`_holds_for`) are unchanged.

MAX_BYTES = 1_000_000
MAX_SOURCES = 5_000  # files of a backend's package that count
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "XLA_FLAGS")
"""They affect whether a framework loads, and the GPUs that it sees."""
DRIVER = Path("/proc/driver/nvidia/version")


class _Answer(JsonObject):
    holds_for: str
    version: str
    devices: list[str]


def cache_file() -> Path | None:
    """Return the cache's file, which may not exist; None for a user without a home."""
    folder = user_cache()
    return None if folder is None else folder / "probes.json"


def probe_with_cache(names: Iterable[str] | None = None, *, fresh: bool = False) -> list[Availability]:
    """Return the result of `probe_all`, from the cache unless `fresh`.

    Files that are unreadable or writable by others are ignored, and an unwritable folder stays as it is.
    """
    wanted = list(available("backend") if names is None else names)
    now = {name: _holds_for(name) for name in wanted}
    cached = {} if fresh else _read()
    known = {name: answer for name, answer in cached.items() if now.get(name) == answer.holds_for}
    probed = {result.name: result for result in probe_all([name for name in wanted if name not in known])}
    sound = {name: result for name, result in probed.items() if result.problem is None and result.version is not None}
    if sound:
        new = {
            name: _Answer(holds_for=now[name], version=result.version or "", devices=[*result.devices]) for name, result in sound.items()
        }
        _write({**_read(), **new})
    return [probed[name] if name in probed else Availability(name, known[name].version, tuple(known[name].devices)) for name in wanted]


def _holds_for(name: str) -> str:
    module = find("backend", name).target.partition(":")[0]
    top = importlib.util.find_spec(module.partition(".")[0])
    folders = [] if top is None else top.submodule_search_locations or []
    sources = [str(top.origin)] if top is not None and top.origin else []
    sources += [file for folder in folders for file in _sources(folder)]
    state = {
        "python": [python(__name__)[0], sys.prefix, platform.python_version(), platform.release()],
        "crosstrain": importlib.metadata.version("crosstrain"),
        "modules": [[entry, _changed(entry)] for entry in sys.path if entry],
        "backend": [module, [[file, _changed(file)] for file in sources]],
        "gpus": [asdict(nvidia_hardware()), DRIVER.read_text(errors="replace") if DRIVER.exists() else None],
        "variables": [os.environ.get(variable) for variable in VARIABLES],
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sources(folder: str) -> list[str]:
    paths = (os.path.join(here, file) for here, _, files in os.walk(folder, followlinks=True) for file in files if file.endswith(".py"))
    return sorted(islice(paths, MAX_SOURCES))


def _changed(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def _read() -> dict[str, _Answer]:
    path = cache_file()
    if path is None:
        return {}
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return {}
        entries: Any = read_json(path, MAX_BYTES)
        return {str(name): _Answer.model_validate(answer) for name, answer in entries.items()}
    except (OSError, UnreadableError, ValidationError, AttributeError):
        return {}


def _write(answers: dict[str, _Answer]) -> None:
    path = cache_file()
    if path is None:
        return
    with suppress(OSError):  # without the cache it is only slower
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.touch(0o600)
            draft.write_text(json.dumps({name: answer.model_dump() for name, answer in answers.items()}), encoding="utf-8")
