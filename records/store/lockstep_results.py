"""What a comparison finds, as data."""

from __future__ import annotations

from typing import Annotated

import msgspec

Update = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

PARTS = ("weights", "data", "forward", "loss", "backward", "buffers", "clipping", "optimiser", "exchange")
"""The parts of an update, in the order in which they are reported."""


class Finding(msgspec.Struct):
    """A place at which the trainings part.

    `update` counts from 0; `layer` is "" for a part without layers. `side` is the one whose result is off, "" where that is not known.
    `error` is relative, `explained` what rounding explains of it. `further` layers have the same fault.
    """

    update: Update
    part: str
    layer: str = ""
    tensor: str = ""
    side: str = ""
    error: float = 0.0
    explained: float = 0.0
    cause: str = ""
    further: int = 0


class LayerRow(msgspec.Struct):
    """The errors of a layer's result on both sides, relative to its magnitude in float64."""

    update: Update
    layer: str
    operation: str
    tensor: str
    first: float
    second: float
    is_explained: bool


class ProbeRow(msgspec.Struct):
    """An update from equal states: relative differences between the sides.

    `moved_…`: those that changed last bits of the weights make on the first side. NaN: not compared.
    """

    update: Update
    loss: float
    gradients: float
    moved_loss: float
    moved_gradients: float


class Side(msgspec.Struct):
    """A training that was compared."""

    name: str
    backend: str
    precision: str
    workers: int
    settings: dict[str, object] = {}


class SettingRow(msgspec.Struct):
    """A setting of a recorded layer, loss or optimiser that differs."""

    first_layer: str
    second_layer: str
    setting: str
    first: str
    second: str


class Comparison(msgspec.Struct):
    """The result of a comparison."""

    first: Side
    second: Side
    model: str
    data: str
    upto: int
    findings: list[Finding]
    layers: list[LayerRow]
    probes: list[ProbeRow]
    tensors: int
    not_exercised: list[str] = []
    expected: list[str] = []
    growth: float | None = None
    seconds: float = 0.0
    settings: list[SettingRow] = []
    recorded: bool = False
    sentence: str = ""

    @property
    def rows_by_layer(self) -> dict[str, list[LayerRow]]:
        """The rows of the last update whose layers were computed, by layer in order."""
        last = max((row.update for row in self.layers), default=None)
        rows: dict[str, list[LayerRow]] = {}
        for row in self.layers:
            if row.update == last:
                rows.setdefault(row.layer, []).append(row)
        return rows

    @property
    def begins(self) -> Finding | None:
        """The first finding: of the earliest update, in the order of its parts."""
        return min(self.findings, key=lambda finding: (finding.update, PARTS.index(finding.part)), default=None)
