"""Definitions of contestants and rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .figures import Figure
from .workload import LOGREG, Work

PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Ours:
    """A run of the product: `trainer run` with these options, and otherwise its defaults.

    `steps` come after the warm-up. Contestants of one `scene` take turns. With `checkpoint_seconds` it saves that often, and a run in whose
    measured window no checkpoint was saved gives no figures. `gpu`: it sees the GPUs. With a `script` it is not a run but that script of
    peers/, which calls the product's own functions: for what a run does not show by itself.
    """

    scene: str
    backend: Literal["tf", "torch"]
    mode: Literal["sync", "async"]
    nodes: int
    steps: int
    options: tuple[str, ...] = ()
    work: Work = LOGREG
    checkpoint_seconds: float | None = None
    gpu: bool = False
    script: str = ""
    variant: str = ""

    @property
    def scripted(self) -> Peer:
        """The script, as a peer of itself."""
        return Peer(self.scene, self.script, "", self.steps, variant=self.variant)


@dataclass(frozen=True)
class Peer:
    """A script in a folder of peers/, and how it is started.

    `alone`: as it is; `tf_config`: a process a task, under TF_CONFIG; `torchrun`: a torchrun a node; `variables`: a process a rank,
    under torchrun's variables (torchrun cannot give one node two ranks and the others one). `servers` counts the processes on node 0
    on top of the workers: a coordinator, a parameter server. `variant` is handed to the script. `like` is the contestant whose work and
    threads it gets and whose losses it has to find: of each update, or only as a level where the order of updates or the framework's own
    dropout differs, or not at all (something that does not train). `most_repeats`: it takes no more turns than that, where its distance to
    ours is so large that more would add nothing.
    """

    scene: str
    script: str
    like: str
    steps: int
    start: Literal["alone", "tf_config", "torchrun", "variables"] = "alone"
    workers: int = 1
    servers: tuple[str, ...] = ()
    losses: Literal["each", "level", "none"] = "each"
    variant: str = ""
    gpu: bool = False
    most_repeats: int | None = None

    @property
    def path(self) -> Path:
        """The script."""
        return PEERS / self.script


Contestant = Ours | Peer


@dataclass(frozen=True)
class Reference:
    """A figure that is not measured here, and whose it is."""

    value: float
    source: str


@dataclass(frozen=True)
class Row:
    """One row of the table: `figure` of `ours` against `peer`, a `reference` or nothing.

    `target` bounds what is compared.
    `relation`: the ratio ours ÷ peer; or by how many copies of the saved state ours exceeds the peer, for figures in bytes.
    """

    ours: str
    peer: str | Reference | None
    figure: Figure
    target: float | None = None
    bound: Literal["at_least", "at_most"] = "at_least"
    relation: Literal["ratio", "copies"] = "ratio"

    @property
    def contestants(self) -> tuple[str, ...]:
        """Contestants of this row, ours first."""
        return (self.ours, self.peer) if isinstance(self.peer, str) else (self.ours,)
