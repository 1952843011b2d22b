"""What is wrong where: compares what the hosts of a run say with each other and with this machine, and says what to do about it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...engine.protocol.messages import PROTOCOL
from ..node.port_reservation import FIRST_PORT, LAST_PORT
from .gpu_findings import AskedGpus, gpu_rows
from .interview import HostReport

__all__ = ["Finding", "Here", "findings", "table"]

MOST_CLOCK_SECONDS = 1.0
"""Records of all nodes stand on one time axis; by less than this they are not told apart."""

LEAST_MEMORY_BYTES = 2**30
"""A worker that has loaded its framework takes half of it or more."""

OPEN_PORTS = (
    f"open the hosts' ports for each other ({FIRST_PORT} to {LAST_PORT}, and the system's range of free ones), or name addresses of a "
    "network that they share"
)
MORE_TIME = "give the hosts more time: --timeout of `trainer doctor`, --start-timeout of a run"


@dataclass(frozen=True)
class Here:
    """What the driver's machine has: releases by package, digests of data and model, and where the originals of both are."""

    packages: Mapping[str, str | None]
    data_digest: str | None = None
    model_digest: str | None = None
    data_folder: Path | None = None
    model_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at on a host. ``bad``: the run cannot be; ``odd``: it can, and the user should know."""

    host: str
    state: Literal["ok", "odd", "bad"]
    what: str
    found: str
    remedy: str = ""
    unreached: bool = False
    """Nothing could be looked at there."""


def findings(
    reports: Sequence[HostReport],
    here: Here,
    module: str | None = None,
    gpus: AskedGpus | None = None,
    *,
    started_by: str,
    workers: Sequence[int] = (),
) -> list[Finding]:
    """Return what was found, host by host.

    `module` is the top-level module of the framework that is to train; empty where that is none, None where it may be any. `gpus` is what a
    run asks for of the hosts, in their order. `started_by` names what has started the probes. `workers` are how many processes each host is
    to have, in their order, where that is known.
    """
    answering = [report for report in reports if report.problem is None and report.described["protocol"] == PROTOCOL]
    machines = Counter(map(_machine, answering))
    of_gpus = iter(_gpus(reports, answering, gpus))
    names = {report.host for report in reports}
    found: list[Finding] = []
    for place, report in enumerate(reports):
        if report.problem is not None:
            remedy = _after_silence(report.host, started_by) if report.silent else ""
            found.append(Finding(report.host, "bad", started_by, report.problem, remedy, unreached=True))
            continue
        if report not in answering:
            spoken = f"protocol {report.described['protocol']}, here {PROTOCOL}"
            found.append(Finding(report.host, "bad", "crosstrain", spoken, "install the same release there"))
            continue
        found += _releases(report, answering[0], here, module)
        found += _machine_findings(report, machines, workers[place] if workers else 1)
        found += next(of_gpus)
        found += _content(report, here)
        found += _network(report, len(names) - 1)
    return found


def _after_silence(host: str, started_by: str) -> str:
    """Return what to try where a host says nothing."""
    commands = {"ssh": f"ssh {shlex.quote(host)} true", "srun": f"srun --overlap --nodes=1 --nodelist={shlex.quote(host)} true"}
    tried = f"see whether `{commands[started_by]}` ends at once here; if so, " if started_by in commands else ""
    return f"{tried}{MORE_TIME}"


def table(found: Sequence[Finding]) -> str:
    """Write the findings, a line each, with what to do below."""
    width = max((len(one.host) for one in found), default=0)
    what = max((len(one.what) for one in found), default=0)
    lines = []
    for one in found:
        mark = {"ok": "ok  ", "odd": "note", "bad": "FAIL"}[one.state]
        lines.append(f"{mark}  {one.host:<{width}}  {one.what:<{what}}  {one.found}")
        if one.remedy:
            lines.append(f"{'':<{width + what + 10}}→ {one.remedy}")
    return "\n".join(lines)


def _releases(report: HostReport, first: HostReport, here: Here, module: str | None) -> Iterator[Finding]:
    packages = report.described["host"]["packages"]
    own, ours = packages.get("crosstrain"), here.packages.get("crosstrain")
    if own != ours:
        yield Finding(
            report.host, "bad", "crosstrain", f"{own}, here {ours}", f"install the same release there: pip install crosstrain=={ours}"
        )
    else:
        yield Finding(report.host, "ok", "crosstrain", str(own))
    others = first.described["host"]["packages"]
    python, its = report.described["host"]["python"], first.described["host"]["python"]
    differs = python.rsplit(".", 1)[0] != its.rsplit(".", 1)[0]
    yield Finding(report.host, "odd" if differs else "ok", "Python", f"{python}{f', on {first.host} {its}' if differs else ''}")
    modules = sorted(packages.keys() - {"crosstrain", "numpy"}) if module is None else [module] if module else []
    for name in modules:
        yield from _framework(report, first, name, packages.get(name), others.get(name), needed=module is not None)


def _framework(report: HostReport, first: HostReport, name: str, own: str | None, its: str | None, *, needed: bool) -> Iterator[Finding]:
    if own is None:
        if needed:
            yield Finding(report.host, "bad", name, "not installed", "install it for the Python that the run uses there (--python)")
        elif its is not None:
            yield Finding(report.host, "odd", name, f"not installed, on {first.host} {its}")
    elif own != its and its is not None:
        yield Finding(
            report.host, "odd", name, f"{own}, on {first.host} {its}: another release may compute other numbers, at another speed"
        )
    else:
        yield Finding(report.host, "ok", name, own)


def _machine(report: HostReport) -> str:
    """Return what tells a host's machine from others, as a run does: its cores are shared whatever networks there are on it."""
    return str(report.described["identity"]["boot"])


def _machine_findings(report: HostReport, machines: Mapping[str, int], workers: int) -> Iterator[Finding]:
    host = report.described["host"]
    cores, memory = host["cores_available"], host["memory_limit_bytes"] or host["memory_total_bytes"]
    seen = f"{'?' if cores is None else f'{cores:g}'} cores, {memory / 2**30:.1f} GiB"
    if machines[_machine(report)] > 1:
        yield Finding(report.host, "odd", "machine", f"{seen}; another of these hosts is the same machine, and shares its cores")
    elif cores is not None and workers > max(cores, 1):
        yield Finding(report.host, "odd", "machine", f"{seen}, which {workers} workers share (HOST:{workers} is a number of processes)")
    elif memory < LEAST_MEMORY_BYTES:
        yield Finding(report.host, "odd", "machine", f"{seen}; a worker may need more memory")
    else:
        yield Finding(report.host, "ok", "machine", seen)
    ahead, error = report.ahead_seconds, report.error_seconds
    clock = f"{abs(ahead):.3f} s {'ahead' if ahead >= 0 else 'behind'} (± {error:.3f})"
    if abs(ahead) - error > MOST_CLOCK_SECONDS:
        yield Finding(
            report.host, "odd", "clock", f"{clock}: its times of day are not this machine's", "let the hosts set their clocks (NTP)"
        )
    else:
        yield Finding(report.host, "ok", "clock", clock)


def _gpus(reports: Sequence[HostReport], answering: Sequence[HostReport], asked: AskedGpus | None) -> list[list[Finding]]:
    """Return what there is to say of the GPUs of each host that answers."""
    workers = [count for report, count in zip(reports, asked.workers, strict=True) if report in answering] if asked else []
    hosts = [(report.described["identity"]["boot"], report.described["host"]) for report in answering]
    rows = gpu_rows(hosts, AskedGpus(asked.device, workers) if asked else None)
    return [
        [Finding(report.host, row.state, "GPUs", row.found, row.remedy) for row in own] for report, own in zip(answering, rows, strict=True)
    ]


def _content(report: HostReport, here: Here) -> Iterator[Finding]:
    if report.data is not None:
        yield _data(report.host, report.data.fields, here)
    if report.model is not None and (here.model_digest is not None or report.model.kind != "found"):
        problem = report.model.get("text")
        if problem is not None:
            yield Finding(report.host, "bad", "model", problem, _copy_model(report.host, here) or "install it there, with what it imports")
        elif report.model["digest"] != here.model_digest:
            yield Finding(
                report.host, "bad", "model", "its package's Python files are not those that are here", _copy_model(report.host, here)
            )
        else:
            same = f"can be imported; the Python files of {report.model['package']} are those that are here"
            yield Finding(report.host, "ok", "model", same)


def _copy_model(host: str, here: Here) -> str:
    """Return the line that copies the model's package to the same path; empty where it is not known where that is."""
    place = here.model_path
    if place is None:
        return ""
    end = "/" if place.is_dir() else ""
    return f"rsync -a --mkpath {shlex.quote(f'{place}{end}')} {shlex.quote(f'{host}:{place}{end}')} (and install there what it imports)"


def _data(host: str, answer: Mapping[str, Any], here: Here) -> Finding:
    folder = here.data_folder
    copy = "" if folder is None else f"rsync -a --mkpath {shlex.quote(f'{folder}/')} {shlex.quote(f'{host}:{folder}/')}"
    problem = answer.get("text")
    if problem is not None:
        return Finding(host, "bad", "data", problem, copy)
    if answer["digest"] != here.data_digest:
        return Finding(host, "bad", "data", "not the same examples as here", copy or "prepare them again: trainer data prepare --again")
    return Finding(host, "ok", "data", "the same as here")


def _network(report: HostReport, others: int) -> Iterator[Finding]:
    """Say where a host is, and whether it reaches so many others."""
    address = report.described.get("address")
    if address is None:
        yield Finding(report.host, "bad", "network", "does not say under which address the others reach it")
        return
    name = next((name for name, one in report.described["host"]["interfaces"].items() if address in one["addresses"]), None)
    where = f"{address} on {name}" if name is not None else address
    if report.unreachable:
        listed = "; ".join(f"{peer}: {why}" for peer, why in report.unreachable.items())
        yield Finding(report.host, "bad", "network", f"{where}; does not reach {listed}", OPEN_PORTS)
    elif not others:
        yield Finding(report.host, "ok", "network", where)
    elif report.unreachable is None:
        yield Finding(report.host, "odd", "network", f"{where}; did not try the others within the time", MORE_TIME)
    elif report.tried == others:
        yield Finding(report.host, "ok", "network", f"{where}; reaches the others")
    else:
        reached = f"reaches {report.tried} of {others} others" if report.tried else "reaches nobody yet"
        yield Finding(report.host, "odd", "network", f"{where}; {reached}, as no more could be tried")
