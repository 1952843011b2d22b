"""The hosts of a run's nodes, from ``--hosts`` or ``--hostfile``, and their probes.

A list has hosts separated by commas, each with an optional ``:COUNT`` of processes (``mpirun --host``) and ranges in brackets
(``node[01-03,7]``, as in Slurm). A file has such a list per line, with an optional ``slots=COUNT`` (Open MPI); a repeated host has that
many processes (``PBS_NODEFILE``, ``SLURM_HOSTFILE``).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.bounded_json import UnreadableError, decode_text, open_regular
from ...core.errors import RunFailedError, UsageError
from ...core.job import MAX_NODES, Job
from ...core.plugins import find
from ...core.process import python
from ..preflight.findings import Finding, Here, findings, requested_device, table
from ..preflight.interview import Probe, interview
from .base import AgentStarter, StartedAgent, end_agents, how_it_ended

MAX_BYTES = 1 << 20  # size limit of a hostfile: 256 bytes for each of the most nodes of a run
MAX_ENTRIES = 1 << 17  # entries of a hostfile, which may name a host once per core: more than its size allows with names of eight letters
MAX_CHARACTERS = 512  # length limit of USER@HOST; DNS names have at most half of it
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_]|::)[A-Za-z0-9_.:%-]*")  # no leading dash, as of an option
_BRACKETED_ADDRESS = re.compile(r"(?:[^\[\]@]*@)?\[[0-9A-Fa-f.]*:")
_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host, optionally with a user and a number of processes."""

    name: str
    processes: int | None = None


def parse_hosts(text: str, where: str = "--hosts") -> list[Host]:
    """Return the hosts in order. Raises UsageError, headed by `where`, if invalid or repeated."""
    return _checked(_hosts_of_list(text, where), where)


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Return a file's hosts in order; processes of repeated hosts add up. Raises UsageError."""
    where = f"--hostfile {os.fspath(path)!r}"
    try:
        with open_regular(Path(path)) as file:
            data = file.read(MAX_BYTES + 1)
        text = decode_text(data)
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}.") from error
    except UnreadableError as error:
        raise UsageError(f"{where}: {error}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is no text.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{where}: is larger than {MAX_BYTES >> 20} MiB; a run has at most {MAX_NODES:,} nodes.")
    lines = enumerate(text.split("\n"), 1)
    hosts = (host for number, line in lines for host in _hosts_of_line(line.partition("#")[0], f"{where}, line {number}"))
    return _checked(hosts, where, repeats=True)


def _hosts_of_list(text: str, where: str) -> Iterator[Host]:
    return (host for item in _items(text, where) for host in _hosts_of(item, where))


def _hosts_of_line(line: str, where: str) -> Iterator[Host]:
    first, *options = line.split() or [""]
    if not first:
        return
    slots = None
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key.lower() not in ("slots", "max_slots", "max-slots"):
            raise UsageError(f"{where}: got {option!r} after the host; allowed: slots=COUNT.")
        if not _COUNT.fullmatch(value):
            raise UsageError(f"{where}: got {option!r}; allowed: a whole number of processes, from 1 to 9999.")
        if key.lower() == "slots" and slots is not None:
            raise UsageError(f"{where}: says slots= twice.")
        if key.lower() == "slots":
            slots = int(value)
    for host in _hosts_of_list(first, where):
        yield host if slots is None else Host(host.name, slots)


def _items(text: str, where: str) -> Iterator[str]:
    if not text.strip():
        raise UsageError(f"{where}: got no host; give at least one, such as node0,node1.")
    before = ","
    for match in re.finditer(r"(?:\[[^\[\]]*\]|[^,\[\]]++)+|[,\[\]]|$", text):
        item = match[0] or ","  # the end
        if item == "," == before:
            raise UsageError(f"{where}: got {text[:120]!r}, in which an entry is empty; leave it out.")
        before = item
        if item in "[]":
            raise UsageError(f"{where}: got {text[:120]!r}, in which a bracket has no other; write ranges as node[01-03,7].")
        if item != ",":
            yield item.strip()


def _hosts_of(item: str, where: str) -> Iterator[Host]:
    if _BRACKETED_ADDRESS.match(item):
        raise UsageError(
            f"{where}: got {item[:120]!r}; IPv6 addresses are written without brackets, such as fe80::1, and --procs-per-node or a "
            "hostfile's line (fe80::1 slots=2) says how many processes they have."
        )
    name, colon, count = item.rpartition(":")
    processes = None
    if colon and ":" not in name:  # an IPv6 address has several
        if not _COUNT.fullmatch(count):
            raise UsageError(f"{where}: got {item[:120]!r}; after the colon belongs a number of processes, from 1 to 9999.")
        item, processes = name, int(count)
    for host in _expanded(item, where):
        if len(host) > MAX_CHARACTERS or not _NAME.fullmatch(host):
            raise UsageError(f"{where}: got {host[:120]!r}; allowed: names or addresses of hosts with commas between, such as node0,node1.")
        yield Host(host, processes)


def _expanded(item: str, where: str) -> Iterator[str]:
    """Yield the names of ranges, in order: ``a[08-10]`` is a08, a09 and a10."""
    parts = re.split(r"\[([^\[\]]*)\]", item)
    choices: list[list[str]] = []
    total = 1
    for place, part in enumerate(parts):
        choices.append([part] if place % 2 == 0 else _numbers(part, item, where))
        total *= len(choices[-1])
        if total > MAX_NODES:
            raise UsageError(f"{where}: got {item[:120]!r}, which are {total:,} hosts or more; a run has at most {MAX_NODES:,} nodes.")
    yield from map("".join, product(*choices))


def _numbers(text: str, item: str, where: str) -> list[str]:
    """Return the numbers of ranges as text: ``08-10,3`` is 08, 09, 10 and 3."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        count = int(last) - int(first) + 1
        if count < 1 or len(numbers) + count > MAX_NODES:
            raise UsageError(
                f"{where}: got {part[:120]!r} in {item[:120]!r}; allowed: a number, or a range such as 01-03, of at most {MAX_NODES:,}."
            )
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _checked(hosts: Iterable[Host], where: str, *, repeats: bool = False) -> list[Host]:
    by_name: dict[str, Host] = {}
    for number, host in enumerate(hosts):
        if number == MAX_ENTRIES:
            raise UsageError(f"{where}: names hosts more than {MAX_ENTRIES:,} times; write {host.name} slots=COUNT for several processes.")
        if host.name in by_name and repeats:
            by_name[host.name] = Host(host.name, (by_name[host.name].processes or 1) + (host.processes or 1))
            continue
        if host.name in by_name:
            raise UsageError(f"{where}: names {host.name!r} twice; several processes on one host are {host.name}:2, or --procs-per-node 2.")
        if len(by_name) == MAX_NODES:
            raise UsageError(f"{where}: names more than {MAX_NODES:,} hosts; a run has at most {MAX_NODES:,} nodes.")
        by_name[host.name] = host
    if not by_name:
        raise UsageError(f"{where}: names no host; give at least one, such as node0.")
    return list(by_name.values())


END_SECONDS = 2.0  # time limit for a probe to end with its input


def remote_python(interpreter: Path | None, module: str, *arguments: str) -> list[str]:
    """Return the command of one of our modules on a node, with this process's PYTHONPATH."""
    command = python(module, *arguments, interpreter=None if interpreter is None else str(interpreter))
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not folders:
        return command
    return ["env", f"PYTHONPATH={os.pathsep.join(os.path.abspath(folder) for folder in folders)}", *command]


@runtime_checkable
class LooksAtHosts(Protocol):
    """A launcher whose hosts can be checked without a run."""

    def look(self, timeout_seconds: float) -> list[Finding]:
        """Return findings about the hosts for any run; only `close` may follow."""


@dataclass
class HostChecks:
    """The probes of this many hosts, started by `starter` with the interpreter `python`."""

    starter: AgentStarter
    hosts: int
    python: Path | None = None
    workers: Sequence[int] = ()  # processes of each host, without a job
    _started: list[StartedAgent] = field(default_factory=list)
    _interrupted: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start a probe on each host; idempotent. Raises RunFailedError."""
        if self._started:
            return
        command = remote_python(self.python, "crosstrain.launch.preflight.probe")
        try:
            self._started.extend(self.starter.start(host, command) for host in range(self.hosts))
        except OSError as error:
            raise RunFailedError(f"{self.starter.name} cannot start a probe: {error}") from error

    def findings(self, timeout_seconds: float, job: Job | None = None) -> list[Finding]:
        """Return the findings for a job, or for any, within this time. Raises InterruptedRunError."""
        self.start()
        backend = "" if job is None else job.backend
        probes = [
            Probe(agent.host or f"node {number}", agent.stream, partial(_describe_end, agent), agent.address)
            for number, agent in enumerate(self._started)
        ]
        reports = interview(probes, backend, job, timeout_seconds, self._interrupted.is_set)
        started_by = self.starter.name
        if job is None:
            return findings(reports, _here(job), started_by=started_by, workers=self.workers)
        module, device = find("backend", job.backend).requires, requested_device(job)
        return findings(reports, _here(job), module, device, started_by=started_by, workers=job.workers_by_node)

    def interrupt(self) -> None:
        """Make `findings` raise InterruptedRunError soon; safe in a signal handler."""
        self._interrupted.set()

    def close(self) -> None:
        """End the probes; idempotent."""
        end_agents([agent.process for agent in self._started], END_SECONDS)
        for agent in self._started:
            agent.stream.close()
        self._started.clear()

    def kill(self) -> None:
        """End the carriers of the probes' channels; safe in a signal handler."""
        for agent in self._started:
            agent.process.terminate()


def refuse(results: Sequence[Finding]) -> None:
    """Raise a table of bad findings: RunFailedError if a host does not answer, else UsageError."""
    bad = [finding for finding in results if finding.state == "bad"]
    if not bad:
        return
    hosts = {finding.host for finding in bad}
    text = f"{len(hosts)} of {len({finding.host for finding in results})} hosts cannot take part in this run:\n{table(bad)}"
    raise RunFailedError(text) if any(finding.unreached for finding in bad) else UsageError(text)


def _here(job: Job | None) -> Here:
    from ...monitor.host import PACKAGES, installed_versions

    packages = installed_versions(PACKAGES)
    if job is None:
        return Here(packages)
    from ...data.store.location import resolve
    from ...data.store.stored_dataset import open_dataset
    from ..preflight.model_source import model_source, package_path

    folder = resolve(job.data, job.data_dir).data_dir
    data, source = open_dataset(job.data, job.data_dir).digest, model_source(job.model)
    if source is None:
        return Here(packages, data, data_folder=folder)
    return Here(packages, data, source.digest, folder, package_path(source.package))


def _describe_end(agent: StartedAgent) -> str:
    return how_it_ended(agent.process, agent.explain) or "has ended its output, and does not end"
