"""Synchronous steps of three workers by either exchange, hand-written loops and async mode.

Pure data.
Logistic regression and the small CNN, whose runs by the frameworks' collectives other tables have; and AlexNet on links of 1 Gbit/s.
"""

from __future__ import annotations

from dataclasses import replace

from ..contestants import Contestant, Ours, Peer, Reference, Row
from . import images, logreg
from .images import ALEXNET, BACKENDS, WITHOUT_STATE, Backend
from .translation import LINK, LINK_BYTES_PER_SECOND, NODES

DIRECT = ("--exchange", "direct")

LOGREG_STEPS = 12_000
"""Three times as many updates as by the frameworks' collectives take about as long."""

ALEXNET_PARAMETERS = 61_100_840
"""Parameters that an update exchanges, 4 bytes each."""

RING = Reference(
    2 * (NODES - 1) / NODES * 4 * ALEXNET_PARAMETERS / LINK_BYTES_PER_SECOND, "2 (n − 1) / n of the bytes at the speed of the link"
)

ALEXNET_BATCH = replace(ALEXNET, batch_size=16, warmup=2, fewest_steps=4)
"""So small that sending takes longer than computing, also where three workers share two cores."""

ALEXNET_OPTIONS = (*WITHOUT_STATE, "--steps-per-call", "1", "--bandwidth", LINK)


def _direct(name: str, table: dict[str, Contestant], steps: int | None = None) -> Ours:
    """Return a run of another table with the direct exchange, and optionally other steps."""
    native = table[name]
    assert isinstance(native, Ours)
    return replace(native, steps=steps or native.steps, options=(*native.options, *DIRECT))


def _contestants(backend: Backend) -> dict[str, Contestant]:
    native = Ours(f"{backend}, AlexNet, three nodes", backend, "sync", NODES, 6, ALEXNET_OPTIONS, ALEXNET_BATCH)
    return {
        f"{backend} direct ×3": _direct(f"{backend} sync ×3", logreg.CONTESTANTS, steps=LOGREG_STEPS),
        f"{backend} CNN direct ×3": _direct(f"{backend} CNN ×3", images.CONTESTANTS),
        f"{backend} AlexNet ×3": native,
        f"{backend} AlexNet direct ×3": replace(native, options=(*ALEXNET_OPTIONS, *DIRECT)),
    }


CONTESTANTS: dict[str, Contestant] = {name: contestant for backend in BACKENDS for name, contestant in _contestants(backend).items()}


def _rows(backend: Backend) -> dict[str, Row]:
    direct, cnn, alexnet = f"{backend} direct ×3", f"{backend} CNN direct ×3", f"{backend} AlexNet direct ×3"
    by_hand = {"tf": "MWMS per step", "torch": "DDP loop"}[backend]
    assert isinstance(logreg.CONTESTANTS[by_hand], Peer)
    return {
        f"{backend}-direct-3": Row(direct, by_hand, "steps_per_second", 5.0),
        f"{backend}-direct-over-native": Row(direct, f"{backend} sync ×3", "steps_per_second", 3.0),
        f"{backend}-async-over-direct": Row(f"{backend} async ×3", direct, "examples_per_second"),
        f"cnn-{backend}-direct-over-native": Row(cnn, f"{backend} CNN ×3", "steps_per_second", 1.3),
        f"alexnet-{backend}-direct-over-native": Row(alexnet, f"{backend} AlexNet ×3", "steps_per_second", 1.0),
        f"alexnet-{backend}-direct-exchange": Row(alexnet, RING, "exchange_seconds", 1.15, "at_most"),
        f"alexnet-{backend}-native-exchange": Row(f"{backend} AlexNet ×3", RING, "exchange_seconds"),
    }


SHARED = ("tf-sync-3", "torch-sync-3", "tf-async-over-sync", "torch-async-over-sync", "tf-fused-xla")
"""Rows of logistic regression that belong to the same question."""

ROWS: dict[str, Row] = {
    **{name: row for backend in BACKENDS for name, row in _rows(backend).items()},
    **{name: logreg.ROWS[name] for name in SHARED},
}
