"""The figures that `trainer explain` uses: a run's documents, and of a resumed run those of the segment that was calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...records.schema import Clock
from ...records.store.jsonl import DamagedRunError
from ...records.summary.node_usage import per_node
from ...records.summary.segments import nodes_of_last_segment, resumed_seconds, with_segments
from ..catalog.run import Run
from ..catalog.unfinished import as_recorded
from ..comparison.caveats import changed_text, restarts_text
from .links import Link, read_links
from .time_shares import Shares, Worker, calibrated_segment, read_shares, read_workers

__all__ = ["Evidence", "read_evidence"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on: the run's documents, and what was computed from them. `shares` is None without a calibration.

    It is a result, and no second form of a `Run`: the summary here is that of a run's last segment, which nothing else is to take for it.

    Of a calibrated run that was resumed the clock and the nodes of `summary`, the links, and what was counted are those of its last
    segment, which was calibrated; it began at `part_began_seconds` on the run clock, None for a run of one segment. Without a calibration
    all segments are added up. What other programs did is that of the whole run in both. `changed` says that it went on with other settings,
    `restarted` that it did after losses. `recorded_until`: it wrote no summary (yet), and this one is computed from its records up to this
    time on the run clock. `steps_mixed`: it did, and its step times are those of all segments together, which an older release wrote.
    """

    name: str
    summary: Mapping[str, Any]
    job: Mapping[str, Any]
    env: Sequence[Mapping[str, Any]]
    calibration: Mapping[str, Any] | None
    workers: Sequence[Worker]
    shares: Shares | None
    links: Sequence[Link]
    evaluations: int
    saved: int
    part_began_seconds: float | None
    changed: str | None
    restarted: str | None
    steps_mixed: bool
    state: str
    recorded_until: float | None


def read_evidence(run: Run) -> Evidence:
    """Return what a verdict on a run rests on. Raises UsageError where it has recorded no update (yet)."""
    run = as_recorded(run)
    summary, job, env = run.summary, run.job, run.nodes
    shares, workers, began, mixed = None, [], 0.0, False
    if (known := summary.get("time_shares")) is not None:
        mixed = known.get("part_began_seconds") is None and changed_text(run) is not None
        began = known.get("part_began_seconds") or 0.0
        summary = _of_last_segment(run, began) if began else summary
        workers = [] if mixed else read_workers(summary)
        _expect_figures_of_nodes(run, workers)
        shares = read_shares(summary, workers) if workers and summary["run_seconds"] else None
    return Evidence(
        run.own_name,
        summary,
        job,
        env,
        run.calibration,
        workers,
        shares,
        read_links(summary, job, env),
        evaluations=sum(record.time_seconds > began for record in run.evals),
        saved=sum(record.event == "checkpoint_saved" and record.time_seconds > began for record in run.events),
        part_began_seconds=began or None,
        changed=changed_text(run, "the verdict and the figures here are those of its last part") if began else changed_text(run),
        restarted=restarts_text(run),
        steps_mixed=mixed,
        state=run.state,
        recorded_until=run.recorded_until,
    )


def _expect_figures_of_nodes(run: Run, workers: Sequence[Worker]) -> None:
    """Raise DamagedRunError where workers were on a node that the summary has no figures of."""
    count = len(run.summary["per_node"])
    without = sorted({worker.node for worker in workers if worker.node >= count})
    if without:
        raise DamagedRunError(
            f"{run.path / 'summary.json'}: per_node has figures of {count} nodes, but time_shares has workers on node {without[0]}; "
            "they do not belong together."
        )


_OF_THE_WHOLE_RUN = ("foreign_cpu_cores_used", "cpu_cores_lost", "starved_fraction")


def _of_last_segment(run: Run, began: float) -> dict[str, Any]:
    """Return a summary of a resumed run with the clock and the nodes of its last segment, but what other programs did to the whole."""
    summary, nodes = run.summary, nodes_of_last_segment(run.job)
    segment = calibrated_segment({**summary, "nodes": nodes, "workers": summary["workers"] // summary["nodes"] * nodes})
    samples = (record for record in with_segments(run.samples(), resumed_seconds(run.job)) if record.part_began_seconds == began)
    spent = {name: segment[name] for name in ("init_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "total_seconds")}
    used = per_node(samples, len(summary["per_node"]), Clock(run_seconds=summary["run_seconds"], **spent))
    whole = [{name: node.get(name) for name in _OF_THE_WHOLE_RUN} for node in summary["per_node"]]
    return {**segment, "per_node": [{**own, **other} for own, other in zip(used, whole, strict=True)]}
