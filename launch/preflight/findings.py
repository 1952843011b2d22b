"""Findings about a run's hosts, from their reports, with remedies."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...backends.loading import declared_capabilities
from ...core.job import Job
from ...core.plugins import find
from ...engine.protocol.messages import PROTOCOL
from ...engine.protocol.probe_messages import DataDigest, Problem
from ...monitor.gpu import VisibleGpu
from ..node.scratch import FIRST_PORT, LAST_PORT
from .interview import HostReport

MIXED = "others have one for each; runs with workers on CPUs and on GPUs are not comparable"
REMEDY = "--device cpu, fewer workers there (--procs-per-node 1,2), or more GPUs for its processes (CUDA_VISIBLE_DEVICES)"


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node: its machine, its workers, and the GPUs that they may use, None if unknown."""

    machine: str
    workers: int
    visible: Sequence[VisibleGpu] | None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The GPUs of each node's workers, in order; empty: none are visible, None: unchanged.

    `short` describes nodes with fewer GPUs than workers; `refused`: these prevent the run.
    """

    by_node: Sequence[Sequence[VisibleGpu] | None]
    short: Mapping[int, str] = field(default_factory=dict)
    refused: bool = False


def requested_device(job: Job) -> str:
    """Return a job's device: the CPU if its backend supports nothing else."""
    devices = declared_capabilities(find("backend", job.backend)).devices
    return job.device if "gpu" in devices else "cpu"


def visible_gpus_in(host: Mapping[str, Any]) -> Sequence[VisibleGpu] | None:
    """Return the GPUs for a node's processes, from its description; None if unknown."""
    listed = host.get("visible_gpus")
    return None if listed is None else [VisibleGpu(**gpu) for gpu in listed]


def plan_gpus(device: str, nodes: Sequence[NodeGpus]) -> GpuPlan:
    """Assign GPUs to the workers of `nodes`; no two workers of a machine share one.

    Device ``gpu`` is refused if a node has fewer GPUs than workers. ``auto`` uses GPUs if every worker gets one, CPUs if all nodes have too
    few, and is refused if only some have; nodes that see the same GPUs count as one.
    """
    if device == "cpu":
        return _on_cpus(nodes)
    handed = list(_handed_out(nodes))
    short = {
        number: _found(node, free)
        for number, (node, (mine, free)) in enumerate(zip(nodes, handed, strict=True))
        if node.visible is not None and len(mine) < node.workers
    }
    everywhere = {_identities(node) for node in nodes if node.visible is not None}
    if short and (device == "gpu" or {_identities(nodes[number]) for number in short} != everywhere):
        return GpuPlan((), short, refused=True)
    if short:
        return _on_cpus(nodes, short)
    return GpuPlan(tuple(None if node.visible is None else mine for node, (mine, _) in zip(nodes, handed, strict=True)))


def _on_cpus(nodes: Sequence[NodeGpus], short: Mapping[int, str] | None = None) -> GpuPlan:
    return GpuPlan(tuple(() if node.visible else None for node in nodes), short or {})


def _handed_out(nodes: Sequence[NodeGpus]) -> Iterator[tuple[Sequence[VisibleGpu], int]]:
    taken: set[tuple[str, str]] = set()
    for node in nodes:
        free = [gpu for gpu in node.visible or () if _identity(node, gpu) not in taken]
        mine = free[: node.workers]
        taken |= {_identity(node, gpu) for gpu in mine}
        yield mine, len(free)


def _identity(node: NodeGpus, gpu: VisibleGpu) -> tuple[str, str]:
    return node.machine, gpu.uuid or gpu.visible_as


def _identities(node: NodeGpus) -> tuple[str, frozenset[tuple[str, str]]]:
    return node.machine, frozenset(_identity(node, gpu) for gpu in node.visible or ())


def _found(node: NodeGpus, free: int) -> str:
    visible = len(node.visible or ())
    text = f"{counted(node.workers, 'worker')}, {counted(free, 'GPU')}"
    return text if free == visible else f"{text} ({visible} on this machine, which other nodes of the run have too)"


def counted(count: int, what: str) -> str:
    """Return ``no GPU``, ``1 GPU``, ``2 GPUs`` and the like."""
    return f"{count or 'no'} {what}{'s' if count > 1 else ''}"


def described_gpus(host: Mapping[str, Any]) -> str:
    """Describe a host's GPUs: number, model, memory, driver, and usable ones if not all."""
    visible = host.get("visible_gpus")
    names = Counter(_named(gpu) for gpu in host.get("gpus") or ())
    if not names:
        return "not known" if visible is None else f"{counted(len(visible), 'NVIDIA GPU')}"
    listed = ", ".join(f"{count} × {name}" for name, count in names.items())
    driver = f", driver {host['gpu_driver']}" if host.get("gpu_driver") else ""
    if visible is None or len(visible) == names.total():
        return f"{listed}{driver}"
    return f"{listed}{driver}; its processes may use {len(visible) or 'none'} (CUDA_VISIBLE_DEVICES, MIG)"


def _named(gpu: Mapping[str, Any]) -> str:
    memory = gpu.get("memory_total_bytes")
    return f"{gpu.get('name') or 'GPU of an unknown model'}{'' if memory is None else f' ({memory / 2**30:.1f} GiB)'}"


MAX_CLOCK_SECONDS = 1.0  # records of all nodes share one time axis; smaller differences do not matter
MIN_MEMORY_BYTES = 2**30  # a worker with its framework takes at least half of it
OPEN_PORTS = (
    f"open the hosts' ports for each other ({FIRST_PORT} to {LAST_PORT}, and the system's range of free ones), or name addresses of a "
    "network that they share"
)
MORE_TIME = "give the hosts more time: --timeout of `trainer doctor`, --start-timeout of a run"


@dataclass(frozen=True)
class Here:
    """The driver's machine: versions by package, and digests and paths of data and model."""

    packages: Mapping[str, str | None]
    data_digest: str | None = None
    model_digest: str | None = None
    data_folder: Path | None = None
    model_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a host. ``bad`` prevents the run, ``odd`` warns. `unreached`: no answer."""

    host: str
    state: Literal["ok", "odd", "bad"]
    what: str
    found: str
    remedy: str = ""
    unreached: bool = False


def findings(
    reports: Sequence[HostReport],
    here: Here,
    module: str | None = None,
    device: str | None = None,
    *,
    started_by: str,
    workers: Sequence[int] = (),
) -> list[Finding]:
    """Return the findings, host by host.

    `module` is the framework's top-level module; empty for none, None for any. `device` is the run's, None without a run, and `workers` the
    processes of each host in order, if known. `started_by` names the starter of the probes.
    """
    answering = [report for report in reports if report.problem is None and report.described["protocol"] == PROTOCOL]
    machines = Counter(map(_machine, answering))
    counts = [count for report, count in zip(reports, workers, strict=True) if report in answering] if workers else []
    about_gpus = iter(gpu_findings(answering, device, counts))
    names = {report.host for report in reports}
    results: list[Finding] = []
    for place, report in enumerate(reports):
        if report.problem is not None:
            remedy = _remedy_of_silence(report.host, started_by) if report.silent else ""
            results.append(Finding(report.host, "bad", started_by, report.problem, remedy, unreached=True))
            continue
        if report not in answering:
            protocols = f"protocol {report.described['protocol']}, here {PROTOCOL}"
            results.append(Finding(report.host, "bad", "crosstrain", protocols, "install the same release there"))
            continue
        results += _releases(report, answering[0], here, module)
        results += _machine_findings(report, machines, workers[place] if workers else 1)
        results += next(about_gpus)
        results += _content(report, here)
        results += _network(report, len(names) - 1)
    return results


def _remedy_of_silence(host: str, started_by: str) -> str:
    commands = {"ssh": f"ssh {shlex.quote(host)} true", "srun": f"srun --overlap --nodes=1 --nodelist={shlex.quote(host)} true"}
    trial = f"see whether `{commands[started_by]}` ends at once here; if so, " if started_by in commands else ""
    return f"{trial}{MORE_TIME}"


def table(listed: Sequence[Finding]) -> str:
    """Return a table of the findings with remedies below."""
    host_width = max((len(finding.host) for finding in listed), default=0)
    what_width = max((len(finding.what) for finding in listed), default=0)
    lines = []
    for finding in listed:
        mark = {"ok": "ok  ", "odd": "note", "bad": "FAIL"}[finding.state]
        lines.append(f"{mark}  {finding.host:<{host_width}}  {finding.what:<{what_width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<{host_width + what_width + 10}}→ {finding.remedy}")
    return "\n".join(lines)


def _releases(report: HostReport, first: HostReport, here: Here, module: str | None) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    packages = report.described["host"]["packages"]
    installed, ours = packages.get("crosstrain"), here.packages.get("crosstrain")
    if installed != ours:
        yield finding("bad", "crosstrain", f"{installed}, here {ours}", f"install the same release there: pip install crosstrain=={ours}")
    else:
        yield finding("ok", "crosstrain", str(installed))
    reference = first.described["host"]["packages"]
    python, its = report.described["host"]["python"], first.described["host"]["python"]
    differs = python.rsplit(".", 1)[0] != its.rsplit(".", 1)[0]
    yield finding("odd" if differs else "ok", "Python", f"{python}{f', on {first.host} {its}' if differs else ''}")
    modules = sorted(packages.keys() - {"crosstrain", "numpy"}) if module is None else [module] if module else []
    for name in modules:
        yield from _framework(report, first, name, packages.get(name), reference.get(name), needed=module is not None)


def _framework(
    report: HostReport, first: HostReport, name: str, installed: str | None, its: str | None, *, needed: bool
) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    if installed is None:
        if needed:
            yield finding("bad", name, "not installed", "install it for the Python that the run uses there (--python)")
        elif its is not None:
            yield finding("odd", name, f"not installed, on {first.host} {its}")
    elif installed != its and its is not None:
        yield finding("odd", name, f"{installed}, on {first.host} {its}: another release may compute other numbers, at another speed")
    else:
        yield finding("ok", name, installed)


def _machine(report: HostReport) -> str:
    """Return a host's machine, whose cores are shared also by hosts with networks of their own."""
    return str(report.described["identity"]["boot"])


def _machine_findings(report: HostReport, machines: Mapping[str, int], workers: int) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    host = report.described["host"]
    cores, memory = host["cores_available"], host["memory_limit_bytes"] or host["memory_total_bytes"]
    seen = f"{'?' if cores is None else f'{cores:g}'} cores, {memory / 2**30:.1f} GiB"
    if machines[_machine(report)] > 1:
        yield finding("odd", "machine", f"{seen}; another of these hosts is the same machine, and shares its cores")
    elif cores is not None and workers > max(cores, 1):
        yield finding("odd", "machine", f"{seen}, which {workers} workers share (HOST:{workers} is a number of processes)")
    elif memory < MIN_MEMORY_BYTES:
        yield finding("odd", "machine", f"{seen}; a worker may need more memory")
    else:
        yield finding("ok", "machine", seen)
    ahead, error = report.ahead_seconds, report.error_seconds
    clock = f"{abs(ahead):.3f} s {'ahead' if ahead >= 0 else 'behind'} (± {error:.3f})"
    if abs(ahead) - error > MAX_CLOCK_SECONDS:
        yield finding("odd", "clock", f"{clock}: its times of day are not this machine's", "let the hosts set their clocks (NTP)")
    else:
        yield finding("ok", "clock", clock)


def gpu_findings(reports: Sequence[HostReport], device: str | None, workers: Sequence[int]) -> list[list[Finding]]:
    """Return the findings about the GPUs of hosts that answer; none if GPUs are irrelevant.

    `device` is the run's (``auto``, ``cpu``, ``gpu``), None without a run, and `workers` the number on each host.
    """
    hosts = [report.described["host"] for report in reports]
    plan = GpuPlan(())
    if device is not None:
        nodes = [
            NodeGpus(_machine(report), *node)
            for report, node in zip(reports, zip(workers, map(visible_gpus_in, hosts), strict=True), strict=True)
        ]
        plan = plan_gpus(device, nodes)
    if device != "gpu" and not any(host.get("gpus") or host.get("visible_gpus") or host.get("gpu_problem") for host in hosts):
        return [[] for _ in hosts]
    return [list(_gpus(report, plan.short.get(number), plan, device)) for number, report in enumerate(reports)]


def _gpus(report: HostReport, short: str | None, plan: GpuPlan, device: str | None) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    host, described = report.described["host"], described_gpus(report.described["host"])
    if host.get("gpu_problem"):
        yield finding("odd", "GPUs", host["gpu_problem"])
    if short is None:
        yield finding("ok", "GPUs", described)
    elif not plan.refused:
        yield finding("odd" if host.get("visible_gpus") else "ok", "GPUs", f"{short}: computing on CPUs")
    else:
        mixed = f"; {MIXED}" if device == "auto" else ""
        yield finding("bad", "GPUs", f"{short} ({described}){mixed}", REMEDY)


def _content(report: HostReport, here: Here) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    if report.data is not None:
        yield _data(report.host, report.data, here)
    if report.model is not None and (here.model_digest is not None or isinstance(report.model, Problem)):
        if isinstance(report.model, Problem):
            remedy = _copy_model(report.host, here) or "install it there, with what it imports"
            yield finding("bad", "model", report.model.text, remedy)
        elif report.model.digest != here.model_digest:
            yield finding("bad", "model", "its package's Python files are not those that are here", _copy_model(report.host, here))
        else:
            same = f"can be imported; the Python files of {report.model.package} are those that are here"
            yield finding("ok", "model", same)


def _copy_model(host: str, here: Here) -> str:
    path = here.model_path
    if path is None:
        return ""
    end = "/" if path.is_dir() else ""
    return f"rsync -a --mkpath {shlex.quote(f'{path}{end}')} {shlex.quote(f'{host}:{path}{end}')} (and install there what it imports)"


def _data(host: str, answer: DataDigest | Problem, here: Here) -> Finding:
    folder = here.data_folder
    copy = "" if folder is None else f"rsync -a --mkpath {shlex.quote(f'{folder}/')} {shlex.quote(f'{host}:{folder}/')}"
    if isinstance(answer, Problem):
        return Finding(host, "bad", "data", answer.text, copy)
    if answer.digest != here.data_digest:
        return Finding(host, "bad", "data", "not the same examples as here", copy or "prepare them again: trainer data prepare --again")
    return Finding(host, "ok", "data", "the same as here")


def _network(report: HostReport, host_count: int) -> Iterator[Finding]:
    finding = partial(Finding, report.host)
    address = report.described.get("address")
    if address is None:
        yield finding("bad", "network", "does not say under which address the others reach it")
        return
    interfaces = report.described["host"]["interfaces"]
    name = next((name for name, interface in interfaces.items() if address in interface["addresses"]), None)
    where = f"{address} on {name}" if name is not None else address
    if report.unreachable:
        listed = "; ".join(f"{peer}: {why}" for peer, why in report.unreachable.items())
        yield finding("bad", "network", f"{where}; does not reach {listed}", OPEN_PORTS)
    elif not host_count:
        yield finding("ok", "network", where)
    elif report.unreachable is None:
        yield finding("odd", "network", f"{where}; did not try the others within the time", MORE_TIME)
    elif report.tried == host_count:
        yield finding("ok", "network", f"{where}; reaches the others")
    else:
        reached = f"reaches {report.tried} of {host_count} others" if report.tried else "reaches nobody yet"
        yield finding("odd", "network", f"{where}; {reached}, as no more could be tried")
