"""Files of calibrated runs made from a known model, which a fit has to recover."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from run_samples import sync_run

from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.analysis.cost_model import Compute, Link, Ring, Server, ring_step, server_rounds

COMPUTE = Compute(0.03, 0.0025)
RING = Ring(hop_seconds=0.001, seconds_per_byte=8e-9, hidden_fraction=0.25)
SERVER = Server(0.002, 6e-9, 0.003, 4e-9, pulls_per_update=2.0, slowdown=2.5)
PAYLOAD = 1_000_000
BATCH = 32


def calibrated_run(out: Path, **changes: Any) -> Path:
    """Make a finished run of two nodes that the model describes exactly.

    `changes` are fields of the job, or of the calibration. `direct`: the costs of the direct exchange,
    which was tried after it, or why it was not.
    """
    direct = changes.pop("direct", None)
    fields = {"nodes": 2, "mode": "sync", "batch_size": BATCH, "bandwidth": "100mbit", "cores_per_node": (0.4,), "procs_per_node": 1}
    job = {**fields, **{name: value for name, value in changes.items() if name not in ("payload_bytes", "ring", "server", "compute")}}
    payload, compute = changes.get("payload_bytes", PAYLOAD), changes.get("compute", COMPUTE)
    path = sync_run(out, **{name: value for name, value in job.items() if value is not None})
    described = RunReader(path).job()
    rate = None if job["bandwidth"] is None else float(job["bandwidth"].removesuffix("mbit")) * 1e6 / 8
    workers = job["nodes"] * job["procs_per_node"]
    full_batch, half = compute.seconds(job["batch_size"]), compute.seconds(job["batch_size"] // 2)
    if job["mode"] == "sync":
        figures = _ring(changes.get("ring", RING), Link(rate), workers, job["nodes"], payload, full_batch)
    else:
        figures = _server(changes.get("server", SERVER), Link(rate), job, payload, full_batch)
    calibration = [
        {
            "worker": worker,
            "node": worker // job["procs_per_node"],
            "data_seconds": 0.001 * full_batch,
            "compute_seconds": 0.999 * full_batch,
            "half_compute_seconds": half - 0.0005 * full_batch if job["batch_size"] > 1 else None,
            "communicate_seconds": exchange if workers > 1 else None,
            "message_seconds": message if workers > 1 else None,
        }
        for worker, (message, exchange, _) in enumerate(figures)
    ]
    if isinstance(direct, Ring):
        tried = _ring(direct, Link(rate), workers, job["nodes"], payload, full_batch)
        for worker, (message, exchange, step) in zip(calibration, tried, strict=True):
            worker |= {"direct_seconds": exchange, "direct_message_seconds": message, "direct_step_seconds": step}
    shares = [{"worker": worker, "node": worker, "step_seconds": step} for worker, (_, _, step) in enumerate(figures)]
    document = {"schema": 1, "seconds": 1.0, "payload_bytes": payload, "batch_size": job["batch_size"], "workers": calibration}
    document["direct_untried"] = direct if isinstance(direct, str) else None
    document["half_batch_size"] = max(1, job["batch_size"] // 2)
    write(path, "calibration.json", document)
    summary = RunReader(path).summary() or {}
    summary["per_node"][0] |= {"network_sent_bytes": 2000, "network_received_bytes": 1000}
    write(path, "summary.json", {**summary, "nodes_sharing_cores": 1, "time_shares": {"workers": shares}})
    write(path, "job.json", {**described, "threads_per_task": [1] * job["nodes"]})
    write(path, "env.json", {"schema": 1, "nodes": [{"cores_available": 2.0, "cpu_model": "m"}] * job["nodes"]})
    return path


def write(path: Path, name: str, document: dict[str, Any]) -> None:
    """Write a document of a run directory."""
    (path / name).write_text(json.dumps(document), encoding="utf-8")


def _ring(ring: Ring, link: Link, workers: int, nodes: int, payload: int, full_batch: float) -> list[tuple[float, float, float]]:
    if workers == 1:
        return [(0.0, 0.0, full_batch)]
    plain = Ring(ring.hop_seconds, ring.seconds_per_byte, exchange=ring.exchange)
    message, exchange = (ring_step(0.0, size, workers, nodes, plain, link).seconds for size in (0, payload))
    return [(message, exchange, ring_step(full_batch, payload, workers, nodes, ring, link).seconds)] * workers


def _server(server: Server, link: Link, job: dict[str, Any], payload: int, full_batch: float) -> list[tuple[float, float, float]]:
    cases = ((0.0, 0), (0.0, payload), (full_batch, payload))
    server_costs = [replace(server, pulls_per_update=1.0)] * 2 + [server]
    rounds = [
        server_rounds(busy, size, job["procs_per_node"], job["nodes"], 1, costs, link)
        for (busy, size), costs in zip(cases, server_costs, strict=True)
    ]
    near, far = ([sum(case[place].values()) for case in rounds] for place in (0, 1))
    count = job["procs_per_node"]
    return [(near[0], near[1], near[2])] * count + [(far[0], far[1], far[2])] * (count * (job["nodes"] - 1))
