"""Looks at all hosts of a run at once, by a probe on each (`launch/preflight`), before the run begins or for ``trainer doctor``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...core.plugins import find
from ...core.process import python
from ..preflight.findings import Finding, Here, findings, table
from ..preflight.gpu_demand import asked_device
from ..preflight.gpu_findings import AskedGpus
from ..preflight.interview import Probe, interview
from .base import AgentStarter, StartedAgent, end_agents, how_it_ended

__all__ = ["HostChecks", "LooksAtHosts", "refuse", "remote_python"]

END_SECONDS = 2.0
"""How long a probe may take to end with its input."""


def remote_python(interpreter: Path | None, module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules on a node, with `interpreter`, by default one at the path of this one.

    It finds modules where this process does: a model under development lies on PYTHONPATH.
    """
    command = python(module, *arguments, interpreter=None if interpreter is None else str(interpreter))
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not folders:
        return command
    return ["env", f"PYTHONPATH={os.pathsep.join(os.path.abspath(folder) for folder in folders)}", *command]


@runtime_checkable
class LooksAtHosts(Protocol):
    """A launcher whose nodes are on hosts that can be looked at without a run."""

    def look(self, timeout_seconds: float) -> list[Finding]:
        """Return what there is to say of the hosts of its request within so many seconds, for any run; then only `close` is called."""
        ...


@dataclass
class HostChecks:
    """The probes on so many hosts, started by `starter` with the interpreter `python` there."""

    starter: AgentStarter
    hosts: int
    python: Path | None = None
    workers: Sequence[int] = ()
    """How many processes each host is to have, where there is no job that says so."""
    _started: list[StartedAgent] = field(default_factory=list)
    _interrupted: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start a probe on each host; a second call does nothing. Raises RunFailedError where that cannot be done."""
        if self._started:
            return
        command = remote_python(self.python, "crosstrain.launch.preflight.probe")
        try:
            self._started.extend(self.starter.start(host, command) for host in range(self.hosts))
        except OSError as error:
            raise RunFailedError(f"{self.starter.name} cannot start a probe: {error}") from error

    def findings(self, timeout_seconds: float, job: Job | None = None) -> list[Finding]:
        """Return what was found within so many seconds, for a job or, without one, for any. Raises InterruptedRunError."""
        self.start()
        backend = "" if job is None else job.backend
        probes = [
            Probe(one.host or f"node {number}", one.stream, _explanation(one), one.address) for number, one in enumerate(self._started)
        ]
        reports = interview(probes, backend, job, timeout_seconds, self._interrupted.is_set)
        if job is None:
            return findings(reports, _here(job), started_by=self.starter.name, workers=self.workers)
        gpus = AskedGpus(asked_device(job), job.workers_by_node)
        return findings(
            reports, _here(job), find("backend", job.backend).requires, gpus, started_by=self.starter.name, workers=job.workers_by_node
        )

    def interrupt(self) -> None:
        """Have `findings` raise InterruptedRunError soon; safe in a signal handler."""
        self._interrupted.set()

    def close(self) -> None:
        """End the probes; a second call does nothing."""
        end_agents([one.process for one in self._started], END_SECONDS)
        for one in self._started:
            one.stream.close()
        self._started.clear()

    def kill(self) -> None:
        """End what carries the channels; the probes end with it. Safe in a signal handler."""
        for one in self._started:
            one.process.terminate()


def refuse(found: Sequence[Finding]) -> None:
    """Raise an error with the table of what is wrong, where something is that no run can begin with.

    It is a UsageError where the user can put it right, RunFailedError where a host does not answer.
    """
    bad = [one for one in found if one.state == "bad"]
    if not bad:
        return
    hosts = list(dict.fromkeys(one.host for one in bad))
    text = f"{len(hosts)} of {len({one.host for one in found})} hosts cannot take part in this run:\n{table(bad)}"
    raise RunFailedError(text) if any(one.unreached for one in bad) else UsageError(text)


def _here(job: Job | None) -> Here:
    from ...monitor.host import PACKAGES, installed_versions

    packages = installed_versions(PACKAGES)
    if job is None:
        return Here(packages)
    from ...data.store.resolve import resolve
    from ...data.store.stored_dataset import open_dataset
    from ..preflight.model_source import model_source, package_path

    folder = resolve(job.data, job.data_dir).data_dir
    data, source = open_dataset(job.data, job.data_dir).digest, model_source(job.model)
    if source is None:
        return Here(packages, data, data_folder=folder)
    return Here(packages, data, source.digest, folder, package_path(source.package))


def _explanation(one: StartedAgent) -> Callable[[], str]:
    return lambda: how_it_ended(one.process, one.explain) or "has ended its output, and does not end"
