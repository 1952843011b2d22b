"""Logistic regression, small on purpose: the overhead of a step is measured. Pure data."""

from __future__ import annotations

from ..contestants import Contestant, Ours, Peer, Row

FASTEST_ALONE: tuple[str, ...] = ("--compile", "on")
"""Options with which one process of TensorFlow takes most steps: what is held against a loop that XLA compiles."""

CONTESTANTS: dict[str, Contestant] = {
    "tf": Ours("tf, one process", "tf", "sync", 1, 60_000),
    "tf, fastest": Ours("tf, one process", "tf", "sync", 1, 60_000, FASTEST_ALONE),
    "tf fused loop": Peer("tf, one process", "logreg/tf_fused.py", "tf", 60_000),
    "tf fused loop, XLA": Peer("tf, one process", "logreg/tf_fused.py", "tf", 60_000, variant="xla"),
    "model.fit": Peer("tf, one process", "logreg/tf_fit.py", "tf", 24_000),
    "torch": Ours("torch, one process", "torch", "sync", 1, 60_000),
    "torch loop": Peer("torch, one process", "logreg/torch_loop.py", "torch", 36_000),
    "Lightning": Peer("torch, one process", "logreg/torch_lightning.py", "torch", 12_000),
    "Accelerate": Peer("torch, one process", "logreg/torch_accelerate.py", "torch", 12_000),
    "tf sync ×3": Ours("tf, three workers", "tf", "sync", 3, 4_000),
    "MWMS per step": Peer("tf, three workers", "logreg/tf_mwms_per_step.py", "tf sync ×3", 3_000, "tf_config", 3),
    "tf async ×3": Ours("tf, three workers", "tf", "async", 3, 12_000),
    "coordinator per step": Peer(
        "tf, three workers", "logreg/tf_coordinator.py", "tf async ×3", 3_000, "tf_config", 3, ("chief", "ps"), losses="level"
    ),
    "torch sync ×3": Ours("torch, three workers", "torch", "sync", 3, 4_000),
    "DDP loop": Peer("torch, three workers", "logreg/torch_ddp.py", "torch sync ×3", 4_000, "torchrun", 3),
    "torch sync ×3, unwatched": Ours("torch, three workers", "torch", "sync", 3, 4_000, ("--no-monitor",)),
    "torch async ×3": Ours("torch, three workers", "torch", "async", 3, 48_000),
    "gloo parameter server": Peer(
        "torch, three workers", "logreg/torch_gloo_ps.py", "torch async ×3", 6_000, "variables", 3, ("ps",), losses="level"
    ),
    "tf, watched": Ours("tf, monitoring", "tf", "sync", 1, 240_000),
    "tf, unwatched": Ours("tf, monitoring", "tf", "sync", 1, 240_000, ("--no-monitor",)),
}

ROWS: dict[str, Row] = {
    "tf-fit": Row("tf", "model.fit", "steps_per_second", 3.0),
    "tf-fused": Row("tf", "tf fused loop", "steps_per_second", 0.97),
    "tf-fused-xla": Row("tf, fastest", "tf fused loop, XLA", "steps_per_second", 1.0),
    "torch-loop": Row("torch", "torch loop", "steps_per_second", 0.97),
    "torch-lightning": Row("torch", "Lightning", "steps_per_second", 3.0),
    "torch-accelerate": Row("torch", "Accelerate", "steps_per_second", 2.5),
    "tf-sync-3": Row("tf sync ×3", "MWMS per step", "steps_per_second", 1.3),
    "torch-sync-3": Row("torch sync ×3", "DDP loop", "steps_per_second", 0.97),
    "tf-async-3": Row("tf async ×3", "coordinator per step", "steps_per_second", 3.0),
    "torch-async-3": Row("torch async ×3", "gloo parameter server", "steps_per_second", 1.5),
    "tf-async-over-sync": Row("tf async ×3", "tf sync ×3", "examples_per_second"),
    "torch-async-over-sync": Row("torch async ×3", "torch sync ×3", "examples_per_second"),
    "monitor-tf-1": Row("tf, watched", "tf, unwatched", "steps_per_second", 0.98),
    "monitor-torch-3": Row("torch sync ×3", "torch sync ×3, unwatched", "steps_per_second", 0.98),
    "monitor-cpu-tf-1": Row("tf, watched", None, "monitor_cores", 0.01, "at_most"),
    "monitor-cpu-torch-3": Row("torch sync ×3", None, "monitor_cores", 0.01, "at_most"),
    "start-tf-1": Row("tf", "tf fused loop", "first_step_seconds", 1.25, "at_most"),
    "start-torch-1": Row("torch", "torch loop", "first_step_seconds", 1.25, "at_most"),
    "start-tf-3": Row("tf sync ×3", "MWMS per step", "first_step_seconds", 1.25, "at_most"),
    "start-torch-3": Row("torch sync ×3", "DDP loop", "first_step_seconds", 1.25, "at_most"),
}
