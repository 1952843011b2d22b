"""Who runs, and which two of them make a row of the table. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .figures import Figure

__all__ = ["BATCH_SIZE", "CONTESTANTS", "PEERS", "ROWS", "Contestant", "Ours", "Peer", "Row"]

PEERS = Path(__file__).parent / "peers"
BATCH_SIZE = 10
"""Examples a worker and step."""


@dataclass(frozen=True)
class Ours:
    """A run of the product: `trainer run` with these options, and otherwise its defaults.

    `steps` come after the warm-up. Contestants of one `scene` take turns.
    """

    scene: str
    backend: Literal["tf", "torch"]
    mode: Literal["sync", "async"]
    nodes: int
    steps: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    """A script in peers/, and how it is started.

    `alone`: as it is; `tf_config`: a process a task, told by TF_CONFIG; `torchrun`: a torchrun a node; `variables`: a process a rank,
    told by torchrun's variables (torchrun cannot give one node two ranks and the others one). `servers` counts the processes on node 0
    besides the workers: a coordinator, a parameter server. `variant` is handed to the script. `like` is the contestant whose threads it
    gets and whose losses it has to find; `same_order` says whether update by update, or only as a level.
    """

    scene: str
    script: str
    like: str
    steps: int
    start: Literal["alone", "tf_config", "torchrun", "variables"] = "alone"
    workers: int = 1
    servers: tuple[str, ...] = ()
    same_order: bool = True
    variant: str = ""

    @property
    def path(self) -> Path:
        """The script."""
        return PEERS / self.script


Contestant = Ours | Peer


@dataclass(frozen=True)
class Row:
    """One line of the table: `figure` of `ours` against that of `peer` (or alone). `target` bounds the ratio (or the figure)."""

    ours: str
    peer: str | None
    figure: Figure
    target: float | None = None
    bound: Literal["at_least", "at_most"] = "at_least"


CONTESTANTS: dict[str, Contestant] = {
    "tf": Ours("tf, one process", "tf", "sync", 1, 60_000),
    "tf fused loop": Peer("tf, one process", "tf_fused.py", "tf", 60_000),
    "tf fused loop, XLA": Peer("tf, one process", "tf_fused.py", "tf", 60_000, variant="xla"),
    "model.fit": Peer("tf, one process", "tf_fit.py", "tf", 24_000),
    "torch": Ours("torch, one process", "torch", "sync", 1, 60_000),
    "torch loop": Peer("torch, one process", "torch_loop.py", "torch", 36_000),
    "Lightning": Peer("torch, one process", "torch_lightning.py", "torch", 12_000),
    "Accelerate": Peer("torch, one process", "torch_accelerate.py", "torch", 12_000),
    "tf sync ×3": Ours("tf, three workers", "tf", "sync", 3, 4_000),
    "MWMS per step": Peer("tf, three workers", "tf_mwms_per_step.py", "tf sync ×3", 3_000, "tf_config", 3),
    "tf async ×3": Ours("tf, three workers", "tf", "async", 3, 12_000),
    "coordinator per step": Peer(
        "tf, three workers", "tf_coordinator.py", "tf async ×3", 3_000, "tf_config", 3, ("chief", "ps"), same_order=False
    ),
    "torch sync ×3": Ours("torch, three workers", "torch", "sync", 3, 4_000),
    "DDP loop": Peer("torch, three workers", "torch_ddp.py", "torch sync ×3", 4_000, "torchrun", 3),
    "torch sync ×3, unwatched": Ours("torch, three workers", "torch", "sync", 3, 4_000, ("--no-monitor",)),
    "torch async ×3": Ours("torch, three workers", "torch", "async", 3, 48_000),
    "gloo parameter server": Peer(
        "torch, three workers", "torch_gloo_ps.py", "torch async ×3", 6_000, "variables", 3, ("ps",), same_order=False
    ),
    "tf, watched": Ours("tf, monitoring", "tf", "sync", 1, 240_000),
    "tf, unwatched": Ours("tf, monitoring", "tf", "sync", 1, 240_000, ("--no-monitor",)),
}

ROWS: dict[str, Row] = {
    "tf-fit": Row("tf", "model.fit", "steps_per_second", 3.0),
    "tf-fused": Row("tf", "tf fused loop", "steps_per_second", 0.97),
    "tf-fused-xla": Row("tf", "tf fused loop, XLA", "steps_per_second"),
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
