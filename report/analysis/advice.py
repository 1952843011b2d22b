"""Recommendations: settings of `trainer run` with their expected effect.

An estimate is ``about`` if its whole basis was measured, ``at most`` or ``at least`` if something unmeasured could only lessen or add to
the effect, and missing if the figures do not bound the effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.job import saved_every
from ...core.units import Cadence
from ...records.text import number_text
from ..runs.run import diverged, real_batch
from .diagnosis import NEARLY_ALL, NOTABLE, Diagnosis
from .evidence import Worker, idle_fraction

_RETUNE = "{} doubles, so tune the learning rate again{} and check the quality"
FAR = 10.0  # from this speed-up on without decimals
MAX_HALF_BATCH_RATIO = 1.5  # half a batch cannot take longer than a whole one; noise makes it this factor at most


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting: the option as typed, and why."""

    option: str
    reason: str
    speedup: float | None  # in examples/s (for evaluation and checkpoints in run time), None if unknown
    bound: Literal["about", "at least", "at most"] | None
    caution: str | None = None  # side effects
    now: str | None = None  # value of this run

    @property
    def change(self) -> str:
        """The option, and the run's value: ``--batch-size 64 (now 32 per worker)``."""
        return f"{self.option} ({self.now})" if self.now else self.option

    @property
    def sentence(self) -> str:
        """The change with its reason, effect and side effects."""
        effect = "" if self.speedup is None else f" ({self.bound} {number_text(self.speedup, 2 if self.speedup < FAR else 0)} × as fast)"
        return f"{self.change}: {self.reason}{effect}{f'; {self.caution}' if self.caution else ''}"


def batch_dependent_seconds(diagnosis: Diagnosis, worker: Worker) -> float | None:
    """Return the seconds of a step that grow with its batch, if half a batch was calibrated."""
    entry, calibration = diagnosis.evidence.find_calibration(worker), diagnosis.evidence.calibration or {}
    half, whole = entry.get("half_compute_seconds"), entry.get("compute_seconds")
    if not half or not whole or half > MAX_HALF_BATCH_RATIO * whole:
        return None
    omitted = 1.0 - float(calibration["half_batch_size"]) / float(calibration["batch_size"])
    saved = 1.0 - float(half) / float(whole)
    return worker.data_seconds + worker.compute_seconds * min(1.0, max(0.0, saved / omitted))


def _larger_batch(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend twice the batch, which halves the fixed cost of an example, but no idle time."""
    evidence = diagnosis.evidence
    if evidence.shares is None:
        return
    slowest = evidence.shares.slowest
    sync = evidence.summary["mode"] == "sync"
    update = 2 * evidence.summary["global_batch_size" if sync else "batch_size"]
    if real_batch(evidence.job, update) < update:  # at most all training examples
        return
    grown = [batch_dependent_seconds(diagnosis, worker) for worker in ([slowest] if sync else evidence.workers)]
    known = [value for value in grown if value is not None]
    if not known:
        return
    before = sum(worker.step_seconds for worker in evidence.workers) / len(evidence.workers)
    idle = idle_fraction(evidence.summary)
    steps = 2 * before / (before + sum(known) / len(known))
    speedup = 1.0 / (idle + (1.0 - idle) / steps)
    exchanging = evidence.shares.step["network"] > 0
    halves = f"halves the {'communication' if exchanging else 'fixed cost of a step'} per"
    if (tokens := evidence.job.get("batch_tokens")) is not None:  # --scale-lr requires batches of a fixed number of examples
        caution = _RETUNE.format("the batch", "")
        yield Advice(f"--batch-tokens {2 * tokens}", f"{halves} token", speedup, "about", caution, f"now {tokens}")
        return
    option = "--batch-size" if evidence.job.get("global_batch_size") is None else "--global-batch-size"
    per_task = evidence.summary["batch_size"] // int(evidence.job.get("accumulate") or 1)
    whole = evidence.summary["global_batch_size"]
    now = per_task if option == "--batch-size" else whole
    caution = _RETUNE.format("the global batch" if sync else "the batch of an update", " (--scale-lr)")
    unit = " per worker" if option == "--batch-size" else ""
    yield Advice(f"{option} {2 * now}", f"{halves} example", speedup, "about", caution, f"now {now}{unit}")


_SYNC_CAUTION = "updates are then made together, so tune the learning rate again and check the quality"


def _network_advice(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend against slow communication."""
    yield from _larger_batch(diagnosis)
    direct = None if diagnosis.exchange_costs is None else diagnosis.exchange_costs.direct_exchange_speedup_estimate
    if direct is not None:
        yield Advice("--exchange direct", "a step with it was tried after the run", direct, "about")
    yield from _one_worker(diagnosis)
    if len(set(diagnosis.evidence.job.get("cores_per_node") or ())) > 1:
        yield from _slow_node(diagnosis)  # the slowest node determines the time of an exchange
    if diagnosis.network_cause == "link":
        yield from _wider_link(diagnosis)
        if diagnosis.evidence.summary["mode"] == "async":
            yield from _spread_servers(diagnosis)


def _one_worker(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend the fastest worker alone, without communication."""
    # If the workers shared its cores, it is faster alone; overhead beyond its own work and the calibrated exchange stays. Computation grows
    # to the global batch as from half a batch to a whole one. A lower bound is reduced by the calibration's spread.
    evidence = diagnosis.evidence
    summary, workers = evidence.summary, evidence.workers
    count = summary["workers"]
    if count == 1 or summary["nodes"] not in (1, count):
        return
    quickest = min(workers, key=lambda worker: worker.work_seconds)
    all_rate = sum(1.0 / worker.step_seconds for worker in workers)
    exchange = evidence.find_calibration(quickest).get("communicate_seconds")
    overhead = 0.0 if exchange is None else max(0.0, quickest.communicate_seconds - exchange)
    if evidence.job.get("global_batch_size") is None:
        single_rate = 1.0 / (quickest.work_seconds + overhead)
        caution = None if summary["mode"] == "async" else "the global batch is then one worker's"
    else:
        more, caution = batch_dependent_seconds(diagnosis, quickest), None
        if more is None:
            return
        single_rate = count / (quickest.work_seconds + overhead + (count - 1) * more)
    shared = summary["nodes"] == 1 or (summary["nodes_sharing_cores"] or 1) > 1
    place = "one task" if summary["nodes"] == 1 else "one node"
    reason = f"{place} alone: no communication{', and no sharing of cores' * shared}"
    option = "--procs-per-node 1" if summary["nodes"] == 1 else _only_nodes(diagnosis, [quickest.node])
    mode = " --mode sync" if summary["mode"] == "async" else ""
    if shared or mode:
        yield Advice(f"{option}{mode}", reason, single_rate / all_rate / (1.0 + quickest.spread), "at least", caution)
    else:
        yield Advice(option, reason, single_rate / all_rate, "about", caution)


def _only_nodes(diagnosis: Diagnosis, remaining: Sequence[int]) -> str:
    limits = diagnosis.evidence.job.get("cores_per_node") or []
    option = f"--nodes {len(remaining)}"
    return option if len(limits) <= 1 else f"{option} --cores-per-node {','.join(f'{limits[node]:g}' for node in remaining)}"


def _wider_link(diagnosis: Diagnosis) -> Iterator[Advice]:
    link, evidence = diagnosis.evidence.busiest_link, diagnosis.evidence
    if link is None or link.limit_source != "bandwidth" or evidence.shares is None:
        return
    doubled = bandwidth = evidence.job["bandwidth"].strip()
    if (amount := re.match(r"[\d.]+", bandwidth)) is not None:
        plain = f"{2 * float(amount[0]):f}".rstrip("0").rstrip(".")  # no unit may follow an exponent
        doubled = f"{plain}{bandwidth[amount.end() :].strip()}"
    saved = evidence.shares.step["network"] / 2
    yield Advice(f"--bandwidth {doubled}", "the bytes pass in half the time", 1.0 / (1.0 - saved), "at most")


def _spread_servers(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend another parameter server, or all-reduce, by what the links could carry."""
    # With n nodes and p servers on p of them, a server's node carries (n − 1) / p of the parameters for its clients and (p − 1) / p for its
    # own worker in each direction; a ring of w workers carries 2 (w − 1) / w of them. The workers' own work bounds both.
    evidence, link = diagnosis.evidence, diagnosis.evidence.busiest_link
    if evidence.calibration is None or link is None or link.limit_bytes_per_second is None:
        return
    nodes, workers, servers = (evidence.summary[name] for name in ("nodes", "workers", "parameter_servers"))
    whole = link.limit_bytes_per_second / evidence.calibration["payload_bytes"]
    now = sum(1.0 / worker.step_seconds for worker in evidence.workers)
    work_rate = sum(1.0 / worker.work_seconds for worker in evidence.workers)
    if servers < nodes:
        updates = min(work_rate, whole * nodes / ((nodes - 1) / (servers + 1) + servers / (servers + 1)))
        yield Advice(f"--ps {servers + 1}", "the parameters' way is then shared by more links", updates / now, "at most")
    if workers > 1:
        updates = min(work_rate, whole * workers / (2 * (workers - 1) / workers))
        yield Advice("--mode sync", "a ring of all-reduce burdens all links alike", updates / now, "at most", _SYNC_CAUTION)


def _peers_advice(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend against a slow node, and in sync mode against communication that waits for it."""
    yield from _slow_node(diagnosis)
    if diagnosis.evidence.summary["mode"] == "sync" and diagnosis.step_fractions["network"] >= NOTABLE:
        yield from _larger_batch(diagnosis)
        yield from _one_worker(diagnosis)


def _slow_node(diagnosis: Diagnosis) -> Iterator[Advice]:
    yield from _even_cores(diagnosis)
    evidence = diagnosis.evidence
    if evidence.shares is None or evidence.summary["mode"] == "async":
        return
    nodes, step = evidence.summary["nodes"], evidence.shares.step
    if nodes > 1 and diagnosis.slow_node is not None and evidence.job.get("global_batch_size") is None:
        speedup = (nodes - 1) / nodes / (1.0 - step["peers"])
        what = f"without node {diagnosis.slow_node}, the others wait for nobody"
        option = _only_nodes(diagnosis, [node for node in range(nodes) if node != diagnosis.slow_node])
        yield Advice(option, what, speedup, "at least", "the global batch is then smaller")
    reason, caution = "each node continues at its own pace", "updates are then made one by one on parameters that others change meanwhile"
    if step["network"] < NOTABLE:
        gain = sum(worker.step_seconds / worker.work_seconds for worker in evidence.workers) / len(evidence.workers)
        yield Advice("--mode async", reason, gain, "at most", caution)
    else:
        unknown = f"{reason}; what an exchange with a parameter server takes, this run does not tell"
        yield Advice("--mode async", unknown, None, None, caution)


def _even_cores(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Recommend the same cores, evenly shared, which changes computation, but no waiting."""
    # A node computed for the fraction of its cores that it used; all of the time if it had none to spare. In sync mode the node with the
    # fewest cores decides; in async mode own work depends on the worker's node and communication on the servers'.
    evidence = diagnosis.evidence
    cores, used = evidence.job.get("cores_per_node"), [view.cpu_fraction for view in diagnosis.nodes]
    if not cores or len(set(cores)) == 1 or None in used:
        return
    even = sum(cores) / len(cores)
    computing = [1.0 if (fraction or 0.0) > NEARLY_ALL else fraction or 0.0 for fraction in used]
    longer = [1.0 + busy * (mine / even - 1.0) for mine, busy in zip(cores, computing, strict=True)]
    now = [worker.step_seconds for worker in evidence.workers]
    if evidence.summary["mode"] == "sync":
        work_seconds = max(worker.work_seconds * cores[worker.node] / even for worker in evidence.workers)
        speedup = max(now) / max(work_seconds, max(now) * longer[cores.index(min(cores))])
    else:
        serving = max(longer[: evidence.summary["parameter_servers"]])
        then = [worker.work_seconds * longer[worker.node] + worker.communicate_seconds * serving for worker in evidence.workers]
        speedup = sum(1.0 / seconds for seconds in then) / sum(1.0 / seconds for seconds in now)
    yield Advice(f"--cores-per-node {even:g}", "the same cores, shared evenly", speedup, "about")


MIN_SPEEDUP = 1.1  # minimum speed-up of a recommendation


def advise(diagnosis: Diagnosis) -> list[Advice]:
    """Return recommendations, the largest certain effect first; none if the loss diverged."""
    by_option: dict[str, Advice] = {}
    if diverged(diagnosis.evidence.summary) is not None:
        return []
    for component in diagnosis.candidates:
        every = _STEP_ADVICE[component](diagnosis) if component in _STEP_ADVICE else _around_training(diagnosis, component)
        for advice in every:
            if advice.speedup is None or advice.speedup >= MIN_SPEEDUP:
                by_option.setdefault(advice.option, advice)
    return sorted(by_option.values(), key=lambda advice: (advice.speedup is None, advice.bound == "at most", -(advice.speedup or 0.0)))


def _compute_advice(diagnosis: Diagnosis) -> Iterator[Advice]:
    yield from _larger_batch(diagnosis)
    yield from _more_cores(diagnosis)
    evidence = diagnosis.evidence
    if evidence.summary["precision"] == "fp32":
        share = evidence.shares.step["compute"] if evidence.shares else 0.0
        reason = f"speeds up computation only ({share:.0%} of a worker's step); {_bf16_needs(diagnosis)}"
        yield Advice("--precision bf16", reason, None, None, "convolutions and matrix products then have 8 significant bits")


_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # Linux's flags of bfloat16 products: two of x86, one of Arm


def _bf16_needs(diagnosis: Diagnosis) -> str:
    evidence = diagnosis.evidence
    if evidence.summary["device_used"] == "gpu":
        return "by how much depends on the GPU"
    recorded = [frozenset(node.get("cpu_flags") or ()) for node in evidence.env]
    if recorded and all(recorded):
        known = [flag for flag in _BF16_FLAGS if all(flag in flags for flags in recorded)]
        return f"the CPUs have bf16 instructions ({', '.join(known)})" if known else "slower here: the CPUs have no bf16 instructions"
    models = sorted({str(node["cpu_model"]) for node in evidence.env if node.get("cpu_model")})
    named = f" of {' and '.join(models)}" if models else ""
    return f"slower on CPUs without bf16 instructions ({' or '.join(_BF16_FLAGS)} in /proc/cpuinfo); the run did not record those{named}"


def _data_advice(diagnosis: Diagnosis) -> Iterator[Advice]:
    evidence = diagnosis.evidence
    if evidence.shares is not None and evidence.job.get("augment", "none") != "none":
        speedup = 1.0 / max(0.01, 1.0 - evidence.shares.step["data"])
        reason = "images are then used as they are, and normalised once where they fit into memory"
        yield Advice("--augment none", reason, speedup, "at most", "the model then learns from fewer images")
    yield from _more_cores(diagnosis)


def _more_cores(diagnosis: Diagnosis) -> Iterator[Advice]:
    evidence, shares = diagnosis.evidence, diagnosis.evidence.shares
    if shares is None:
        return
    work = shares.step["compute"] + shares.step["data"] + shares.step["peers"]
    cores = evidence.job.get("cores_per_node")
    busiest_cpu = max((view.cpu_fraction or 0.0 for view in diagnosis.nodes), default=0.0)
    if cores and len(set(cores)) == 1 and busiest_cpu > NEARLY_ALL and evidence.env:
        spare = (evidence.env[0]["cores_logical"] or 0) / evidence.summary["nodes"] / cores[0]
        if spare > 1:
            yield Advice(f"--cores-per-node {cores[0] * spare:g}", f"each node uses {busiest_cpu:.0%} of what it may", spare, "at most")
    threads, first = evidence.job.get("threads"), diagnosis.nodes[0]
    free = int((first.cores_available or 0.0) * evidence.summary["nodes"] / evidence.summary["workers"])
    if threads is not None and (evidence.summary["nodes_sharing_cores"] or 1) == 1 and first.limit == "CPU" and free > threads:
        speedup = 1.0 / (1.0 - work * (1.0 - threads / free))
        yield Advice(f"--threads {free}", f"each task computes with {threads} of the {free} cores it has", speedup, "at most")


def _around_training(diagnosis: Diagnosis, component: str) -> Iterator[Advice]:
    evidence, summary, job = diagnosis.evidence, diagnosis.evidence.summary, diagnosis.evidence.job
    if component == "evaluating":
        yield from _less_often("--eval-every", job["eval_every"], evidence.evaluations, summary["eval_seconds"], diagnosis)
    elif component == "saving":
        if (cadence := saved_every(job["checkpoint_every"], job.get("max_restarts", 0))) is not None:
            saved = summary["checkpoints"]["saved"]
            yield from _less_often("--checkpoint-every", cadence, saved, summary["checkpoint_seconds"], diagnosis)
    elif component == "translating":
        if (beam := job.get("beam", 1)) > 1:
            spent = f"{summary['translate_seconds']:.2f} s in all; greedy search follows one"
            caution = "its scores compare with those of runs that search greedily at the end, and with no others"
            yield Advice("--beam 1", f"at the end {beam} hypotheses of each test sentence were followed, {spent}", None, None, caution)
    elif component == "profiling":
        if (profiled := diagnosis.run_fractions["profiling"]) < 1:
            yield Advice("leave --profile out", "tracing steps takes time", 1 / (1 - profiled), "about")
    elif (steps_per_call := job.get("steps_per_call")) is not None and summary["run_seconds"]:  # idle, other
        share = sum(diagnosis.run_fractions.get(name, 0.0) for name in ("idle", "other"))
        reason = f"with {steps_per_call} steps a call, much of the time passes between calls"
        yield Advice("leave --steps-per-call out", reason, 1.0 / max(0.01, 1.0 - share), "at most")


def _less_often(option: str, cadence: str, times: int, seconds: float, diagnosis: Diagnosis) -> Iterator[Advice]:
    run_seconds = diagnosis.evidence.summary["run_seconds"]
    every = Cadence.parse(cadence)
    saved = seconds * (times // 2 / times) if times else 0.0
    if every.unit == "end" or not saved or run_seconds <= saved:
        return
    unit = {"epochs": "epochs", "steps": "steps", "seconds": "s"}[every.unit]
    doubled = f"{option} {2 * every.amount:g}{unit}"
    reason = f"{times // 2} of the {times} times, {saved:.2f} s in all, would not take place"
    yield Advice(doubled, reason, run_seconds / (run_seconds - saved), "about")


_STEP_ADVICE: Mapping[str, Callable[[Diagnosis], Iterator[Advice]]] = {
    "network": _network_advice,
    "peers": _peers_advice,
    "compute": _compute_advice,
    "data": _data_advice,
}
