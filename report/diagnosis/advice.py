"""What would help? Settings of `trainer run`, each with the effect that this run's figures lead to expect.

Every estimate changes one thing and keeps the rest as it was measured. A figure is called ``about`` where all that it rests on was
measured, and ``at most`` or ``at least`` where something was not and could only lessen or add to the effect. Where the run's figures do
not bound the effect of a change, there is no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ...core.job import saved_every
from ...core.units import Cadence
from ..catalog.divergence import diverged
from .batch_size_advice import Advice, larger_batch
from .cluster_advice import network, peers
from .verdict import NEARLY_ALL, Explanation

__all__ = ["advise"]

WORTH_SAYING = 1.1
"""Least speed-up for which a setting is named."""


def advise(explanation: Explanation) -> list[Advice]:
    """Return what would help against each candidate of the verdict, the largest certain effect first; empty where nothing is known to.

    Of a run that ended without training nothing is advised: a setting that makes it quicker would make nothing better.
    """
    found: dict[str, Advice] = {}
    if diverged(explanation.evidence.summary) is not None:
        return []
    for component in explanation.candidates:
        for advice in _BY_COMPONENT[component](explanation):
            if advice.speedup is None or advice.speedup >= WORTH_SAYING:
                found.setdefault(advice.option, advice)
    return sorted(found.values(), key=lambda advice: (advice.speedup is None, advice.bound == "at most", -(advice.speedup or 0.0)))


# Computing and data ---------------------------------------------------------------------------------------------------


def _compute(explanation: Explanation) -> Iterator[Advice]:
    yield from larger_batch(explanation)
    yield from _more_cores(explanation)
    evidence = explanation.evidence
    if evidence.summary["precision"] == "fp32":
        share = evidence.shares.step["compute"] if evidence.shares else 0.0
        reason = f"speeds up computation only ({share:.0%} of a worker's step); {_bf16_needs(explanation)}"
        yield Advice("--precision bf16", reason, None, None, "convolutions and matrix products then have 8 significant bits")


_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""As Linux names instructions for products in bfloat16: of x86 the first two, of Arm the last."""


def _bf16_needs(explanation: Explanation) -> str:
    """Say what the effect of bf16 depends on: the GPU, or whether all processors have instructions for it, where that is recorded."""
    evidence = explanation.evidence
    if evidence.summary["device_used"] == "gpu":
        return "by how much depends on the GPU"
    recorded = [frozenset(node.get("cpu_flags") or ()) for node in evidence.env]
    if recorded and all(recorded):
        known = [flag for flag in _BF16_FLAGS if all(flag in flags for flags in recorded)]
        return f"the CPUs have bf16 instructions ({', '.join(known)})" if known else "slower here: the CPUs have no bf16 instructions"
    models = sorted({str(node["cpu_model"]) for node in evidence.env if node.get("cpu_model")})
    named = f" of {' and '.join(models)}" if models else ""
    return f"slower on CPUs without bf16 instructions ({' or '.join(_BF16_FLAGS)} in /proc/cpuinfo); the run did not record those{named}"


def _data(explanation: Explanation) -> Iterator[Advice]:
    evidence = explanation.evidence
    if evidence.shares is not None and evidence.job.get("augment", "none") != "none":
        speedup = 1.0 / max(0.01, 1.0 - evidence.shares.step["data"])
        reason = "images are then used as they are, and normalised once where they fit into memory"
        yield Advice("--augment none", reason, speedup, "at most", "the model then learns from fewer images")
    yield from _more_cores(explanation)


def _more_cores(explanation: Explanation) -> Iterator[Advice]:
    """Cores that the machine has and the nodes may not use, or that a task may use and was told not to.

    What threads the product chose by itself stands: for small steps one is quicker than several.
    """
    evidence, shares = explanation.evidence, explanation.evidence.shares
    if shares is None:
        return
    work = shares.step["compute"] + shares.step["data"] + shares.step["peers"]
    cores = evidence.job.get("cores_per_node")
    busiest_cpu = max((view.cpu_fraction or 0.0 for view in explanation.nodes), default=0.0)
    if cores and len(set(cores)) == 1 and busiest_cpu > NEARLY_ALL and evidence.env:
        spare = (evidence.env[0]["cores_logical"] or 0) / evidence.summary["nodes"] / cores[0]
        if spare > 1:
            yield Advice(f"--cores-per-node {cores[0] * spare:g}", f"each node uses {busiest_cpu:.0%} of what it may", spare, "at most")
    threads, first = evidence.job.get("threads"), explanation.nodes[0]
    free = int((first.cores_available or 0.0) * evidence.summary["nodes"] / evidence.summary["workers"])
    if threads is not None and (evidence.summary["nodes_sharing_cores"] or 1) == 1 and first.limit == "CPU" and free > threads:
        speedup = 1.0 / (1.0 - work * (1.0 - threads / free))
        yield Advice(f"--threads {free}", f"each task computes with {threads} of the {free} cores it has", speedup, "at most")


# Beside training ------------------------------------------------------------------------------------------------------


def _evaluating(explanation: Explanation) -> Iterator[Advice]:
    evidence = explanation.evidence
    yield from _less_often("--eval-every", evidence.job["eval_every"], evidence.evaluations, evidence.summary["eval_seconds"], explanation)


def _translating(explanation: Explanation) -> Iterator[Advice]:
    """The search at the end with fewer hypotheses; how much of its time that saves, no figure of the run tells."""
    evidence = explanation.evidence
    beam = evidence.job.get("beam", 1)
    if beam > 1:
        seconds = evidence.summary["translate_seconds"]
        reason = f"at the end {beam} hypotheses of each test sentence were followed, {seconds:.2f} s in all; greedy search follows one"
        yield Advice(
            "--beam 1", reason, None, None, "its scores compare with those of runs that search greedily at the end, and with no others"
        )


def _saving(explanation: Explanation) -> Iterator[Advice]:
    evidence = explanation.evidence
    cadence = saved_every(evidence.job["checkpoint_every"], evidence.job.get("max_restarts", 0))
    if cadence is not None:
        saved = evidence.summary["checkpoints"]["saved"]
        yield from _less_often("--checkpoint-every", cadence, saved, evidence.summary["checkpoint_seconds"], explanation)


def _less_often(option: str, cadence: str, times: int, seconds: float, explanation: Explanation) -> Iterator[Advice]:
    """Twice the distance: of what took place so many `times`, half would not; the one at the end stays."""
    run_seconds = explanation.evidence.summary["run_seconds"]
    every = Cadence.parse(cadence)
    saved = seconds * (times // 2 / times) if times else 0.0
    if every.unit == "end" or not saved or run_seconds <= saved:
        return
    unit = {"epochs": "epochs", "steps": "steps", "seconds": "s"}[every.unit]
    doubled = f"{option} {2 * every.amount:g}{unit}"
    reason = f"{times // 2} of the {times} times, {saved:.2f} s in all, would not take place"
    yield Advice(doubled, reason, run_seconds / (run_seconds - saved), "about")


def _profiling(explanation: Explanation) -> Iterator[Advice]:
    profiled = explanation.run_fractions["profiling"]
    if profiled < 1:
        yield Advice("leave --profile out", "tracing steps takes time", 1 / (1 - profiled), "about")


def _other(explanation: Explanation) -> Iterator[Advice]:
    evidence = explanation.evidence
    given = evidence.job.get("steps_per_call")
    if given is not None and evidence.summary["run_seconds"]:
        share = sum(explanation.run_fractions.get(name, 0.0) for name in ("idle", "other"))
        reason = f"with {given} steps a call, much of the time passes between calls"
        yield Advice("leave --steps-per-call out", reason, 1.0 / max(0.01, 1.0 - share), "at most")


_BY_COMPONENT: Mapping[str, Callable[[Explanation], Iterator[Advice]]] = {
    "network": network,
    "peers": peers,
    "compute": _compute,
    "data": _data,
    "idle": _other,
    "evaluating": _evaluating,
    "translating": _translating,
    "saving": _saving,
    "profiling": _profiling,
    "other": _other,
}
