"""What a finished run says about the cost of its steps: the calibrated components, and the step itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ...core.errors import UsageError
from ...core.units import parse_bandwidth
from ...core.worker_layout import nodes_of_workers, workers_by_node
from ...records.store.jsonl import DamagedRunError
from ..catalog.batches import real_batch
from ..catalog.cpu_starvation import cpu_starvation
from ..catalog.divergence import diverged
from ..catalog.run import Run, labelled
from .cost_model import Exchange

__all__ = ["SAME", "Observed", "Worker", "observe", "observe_all"]

SAME = ("backend", "model", "data", "precision", "optimizer", "procs_per_node", "cores_per_node", "threads_per_task")
"""What runs that one model is fitted to have in common: a step of theirs is the same work on the same processors."""


_LENGTH_ALONE = frozenset({"steps", "epochs", "examples", "until"})
"""Settings that say how long a run trains, and change no step."""

_SHORTEST_SECONDS = 1e-12  # of a step; less is no step


@dataclass(frozen=True, slots=True)
class Worker:
    """Seconds of a worker's step.

    `own` is its work on a whole batch, `half_own` on half of it (None where a batch is one example). `communicate` is the exchange alone
    with its payload, `message` with a few bytes (None for a worker alone). `step` is what a step took in training. `kind` names the
    node's processor and its share of it. `direct`: exchange, message and step with the direct exchange, as tried after a native run.
    """

    node: int
    kind: str
    own: float
    half_own: float | None
    communicate: float | None
    message: float | None
    step: float
    direct: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What the cost model is fitted to: the costs of a run's steps, computed from its calibration. A result, and no second form of a `Run`.

    `bytes_per_second` is the limit of each node's link, None without one. `served_bytes` is what the nodes with a parameter server sent
    and received over theirs; None where that was not counted, or is not theirs alone. `server_cores` are those of node 0, which has one.
    `reported_examples_per_second` is the summary's, with the time between steps. `exchange` is how sync workers add up their gradients;
    `tried`: it is not the run's own, but was tried after it. `untried`: why the direct one was not. `compiled`: they computed compiled
    steps. `contended`: other programs had its cores.
    """

    name: str
    mode: str
    same: Mapping[str, Any]
    nodes: int
    procs_per_node: int
    ps: int
    batch_size: int
    half_batch_size: int
    global_batch_size: int
    batch_tokens: int | None
    payload_bytes: int
    bytes_per_second: float | None
    shared_cores: bool
    server_cores: float
    nodes_sharing_cores: int
    served_bytes: tuple[int, int] | None
    workers: tuple[Worker, ...]
    reported_examples_per_second: float | None = None
    exchange: Exchange = "native"
    tried: bool = False
    untried: str | None = None
    compiled: bool = False
    contended: bool = False

    def with_exchange(self, exchange: Exchange) -> Observed | None:
        """Return what the run says of sync steps with an exchange: its own, or one that was tried after it; None where it says nothing."""
        if exchange == self.exchange:
            return self
        if exchange != "direct" or any(worker.direct is None for worker in self.workers):
            return None
        workers = tuple(_with_direct(worker) for worker in self.workers)
        return replace(self, workers=workers, exchange=exchange, tried=True, reported_examples_per_second=None)

    @property
    def communicates(self) -> bool:
        """Whether messages were exchanged and calibrated."""
        return all(worker.communicate is not None and worker.message is not None for worker in self.workers)

    @property
    def slowest(self) -> float:
        """Seconds of own work on the slowest kind of node: others wait for it in sync mode.

        Workers on nodes of one kind do the same on the same; what differs between their calibrations is chance.
        """
        kinds = {worker.kind for worker in self.workers}
        return max(self.mean("own", [worker for worker in self.workers if worker.kind == kind]) for kind in kinds)

    def mean(self, figure: str, workers: Sequence[Worker] | None = None) -> float:
        """Return the mean of a figure that all of the workers have."""
        return fmean(getattr(worker, figure) for worker in (self.workers if workers is None else workers))

    @property
    def beside_server(self) -> list[Worker]:
        """Async: the workers on a node with a parameter server."""
        return [worker for worker in self.workers if worker.node < self.ps]

    @property
    def elsewhere(self) -> list[Worker]:
        """Async: the other workers."""
        return [worker for worker in self.workers if worker.node >= self.ps]

    @property
    def examples_per_second(self) -> float:
        """Of all workers together, while they train."""
        if self.mode == "sync":
            return self.global_batch_size / self.mean("step")
        return sum(self.batch_size / worker.step for worker in self.workers)


def observe_all(runs: Sequence[Run]) -> list[Observed]:
    """Return what each run says, called so that it is told from the others; raises what `observe` raises."""
    return [observe(run) for run in labelled(runs)]


def observe(run: Run) -> Observed:
    """Return what a run says.

    Raises UsageError where it has no summary, lacks its calibration, lost its loss (`diverged`) or went on with other settings.
    """
    summary, job, calibration, path = run.summary, run.job, run.calibration, run.path
    if (since := diverged(summary)) is not None:
        raise UsageError(
            f"run: the loss of {str(path)!r} was not finite (NaN or infinite) {since}: its speed is not that of training, and nothing is "
            "predicted from it. Take another run."
        )
    if calibration is None or summary.get("time_shares") is None:
        raise UsageError(
            f"run: {str(path)!r} is not calibrated, and a prediction rests on that (it is {summary['state']}). A run is calibrated when it "
            "comes to its end, unless it was started with --no-calibrate: train a short one again."
        )
    if not run.nodes:
        raise UsageError(f"run: {str(path)!r} has no env.json, which says what its nodes are. Take another run.")
    by_node = workers_by_node(job["procs_per_node"], job["nodes"])
    if len(set(by_node)) > 1:
        numbers = ", ".join(map(str, by_node))
        raise UsageError(
            f"run: {str(path)!r} has nodes with different numbers of workers ({numbers}), and a prediction is for nodes that are alike. "
            "Take another run."
        )
    changed = {field for segment in job.get("segments", ())[1:] for field in segment.get("changed") or {}} - _LENGTH_ALONE
    if summary["resumed"] and changed:
        named = ", ".join(sorted(changed))
        raise UsageError(
            f"run: {str(path)!r} was resumed with other settings ({named}), so that its steps are not alike. Take another run."
        )
    _expect_agreement(run, calibration)
    steps = {worker["worker"]: worker["step_seconds"] for worker in summary["time_shares"]["workers"]}
    if (
        len(steps) != summary["workers"]
        or min((seconds or 0.0) for seconds in steps.values()) < _SHORTEST_SECONDS
        or {one["worker"] for one in calibration["workers"]} != set(steps)
    ):
        raise UsageError(f"run: {str(path)!r} is too short: a worker in it made no update, or was not there at its end. Train for longer.")
    server_cores = _cores(job, run.nodes[0], 0)
    return Observed(
        name=run.name,
        mode=job["mode"],
        same={name: job.get(name) for name in SAME} | _processors(job),
        nodes=job["nodes"],
        procs_per_node=by_node[0],
        ps=job["ps"],
        batch_size=calibration["batch_size"],
        half_batch_size=calibration["half_batch_size"] or calibration["batch_size"],
        global_batch_size=real_batch(job, summary["global_batch_size"]),
        batch_tokens=job.get("batch_tokens"),
        payload_bytes=calibration["payload_bytes"],
        bytes_per_second=None if job["bandwidth"] is None else parse_bandwidth(job["bandwidth"]) / 8,
        shared_cores=server_cores < by_node[0] * job["threads_per_task"][0] + 1,
        server_cores=server_cores,
        nodes_sharing_cores=summary["nodes_sharing_cores"] or 1,
        served_bytes=_served_bytes(job, summary["per_node"]),
        workers=tuple(
            _worker(figures, steps[figures["worker"]], calibration, _kind(job, run.nodes[figures["node"]], figures["node"]))
            for figures in calibration["workers"]
        ),
        reported_examples_per_second=summary["examples_per_second"],
        exchange=job.get("exchange") or "native",
        untried=calibration.get("direct_untried"),
        compiled=bool(summary.get("compiled")),
        contended=cpu_starvation(summary) is not None,
    )


def _expect_agreement(run: Run, calibration: Mapping[str, Any]) -> None:
    """Raise DamagedRunError where the documents of a run tell of different numbers of nodes or workers."""
    nodes, by_node = run.job["nodes"], workers_by_node(run.job["procs_per_node"], run.job["nodes"])
    places = nodes_of_workers(by_node)
    workers = len(places)
    counts = {"summary.json": run.summary["nodes"], "env.json": len(run.nodes), "summary.json's per_node": len(run.summary["per_node"])}
    wrong = {name: f"{count} nodes" for name, count in counts.items() if count != nodes}
    numbers = {one["worker"]: one["node"] for one in calibration["workers"]}
    if len(numbers) < len(calibration["workers"]) or any(worker >= workers or node != places[worker] for worker, node in numbers.items()):
        wrong["calibration.json"] = "other workers, or other nodes for them"
    if len(run.job.get("threads_per_task", ())) != nodes:
        wrong["its threads_per_task"] = "another number of nodes"
    if wrong:
        found = ", ".join(f"{name} has {text}" for name, text in wrong.items())
        raise DamagedRunError(f"{run.path}: job.json has {nodes} nodes with {workers} workers, but {found}; they do not belong together.")


def _processors(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cores of the nodes, each once, and the threads of a task on the last node, which has workers alone."""
    return {"cores_per_node": sorted(set(job["cores_per_node"] or ())), "threads_per_task": job["threads_per_task"][-1]}


def _cores(job: Mapping[str, Any], host: Mapping[str, Any], node: int) -> float:
    """Return the cores of a node."""
    limits = job["cores_per_node"]
    return float(host["cores_available"] if limits is None else limits[node if len(limits) > 1 else 0])


def _kind(job: Mapping[str, Any], host: Mapping[str, Any], node: int) -> str:
    """Return what a node computes with, in words that are equal for nodes that are alike."""
    return f"{_cores(job, host, node):g} cores of {host['cpu_model']}"


def _worker(figures: Mapping[str, Any], step: float, calibration: Mapping[str, Any], kind: str) -> Worker:
    half = figures["half_compute_seconds"]
    share = calibration["half_batch_size"] / calibration["batch_size"] if half is not None else 0.0
    return Worker(
        node=figures["node"],
        kind=kind,
        own=figures["data_seconds"] + figures["compute_seconds"],
        half_own=None if half is None else figures["data_seconds"] * share + half,
        communicate=figures["communicate_seconds"],
        message=figures["message_seconds"],
        step=step,
        direct=_tried(figures),
    )


def _tried(figures: Mapping[str, Any]) -> tuple[float, float, float] | None:
    exchange, message, step = (figures.get(name) for name in ("direct_seconds", "direct_message_seconds", "direct_step_seconds"))
    return None if exchange is None or message is None or step is None else (exchange, message, step)


def _with_direct(worker: Worker) -> Worker:
    assert worker.direct is not None, "asked for only where it was tried"
    communicate, message, step = worker.direct
    return replace(worker, communicate=communicate, message=message, step=step)


def _served_bytes(job: Mapping[str, Any], per_node: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return (sent, received). With several parameter servers their nodes' links also carry what the workers beside them exchange."""
    counts = [per_node[0][f"network_{way}_bytes"] for way in ("sent", "received")]
    if job["mode"] == "sync" or job["nodes"] == 1 or job["ps"] > 1 or None in counts:
        return None
    return counts[0], counts[1]
