"""A comparison in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..records.store.lockstep_results import Comparison, Finding, LayerRow, Side
from .rounding import UNIT

MAX_NAME = 16  # of a side, in the head of a table
MAX_ROWS = 12  # of the table of layers
PERCENT = 0.01
_WHERE = {
    "weights": "in their weights",
    "data": "in the data",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "buffers": "in the buffers",
    "clipping": "in gradient clipping",
    "optimiser": "in the optimiser",
    "exchange": "in the sum of the workers' gradients",
}


def _where(finding: Finding) -> str:
    return "in their initial weights" if finding.part == "weights" and not finding.update else _WHERE[finding.part]


def sentence(comparison: Comparison) -> str:
    """Return what was found, in one sentence or two."""
    names = f"{shown(comparison.first)} and {shown(comparison.second)}"
    finding = comparison.begins
    if finding is None:
        return f"{names} do not part beyond rounding up to update {comparison.upto + 1}. {_growth_text(comparison)}".rstrip()
    where = _where(finding) + (f" of {finding.layer}" if finding.layer else "")
    return f"{names} part at update {finding.update + 1}, {where}: {_amount(finding)}{_cause(finding)}{_further(finding)}"


def shown(side: Side) -> str:
    """Return a side's name and what it runs on."""
    workers = f", {side.workers} workers" if side.workers > 1 else ""
    precision = f", {side.precision}" if side.precision != "fp32" else ""
    return f"{side.name} ({side.backend}{workers}{precision})"


def _amount(finding: Finding) -> str:
    if finding.part == "weights":
        return f"{finding.tensor} differs by {finding.error:.2g} of its norm"
    if not finding.error:
        return "the settings differ"
    what = {
        "data": f"the column {finding.tensor}" if finding.tensor else "the batch",
        "loss": "given the same logits, it",
        "clipping": "the norm of the gradients",
        "optimiser": f"given its own gradients, {finding.tensor.removeprefix('parameters/')}" if finding.tensor else "the gradients",
        "exchange": "the gradients",
    }.get(finding.part, f"given the same input, its {finding.tensor}" if finding.tensor else "the gradients")
    if what == "the gradients":
        side = f" on {finding.side}" if finding.side else ""
        return f"the gradients{side} differ by {finding.error:.2g} of their norm, and rounding explains {finding.explained:.1g}"
    if not finding.side and math.isfinite(finding.error):
        explained = f", and rounding explains {finding.explained:.1g}" if finding.explained else ""
        return f"{what} differs by {finding.error:.2g} of its norm{explained}"
    side = f" on {finding.side}" if finding.side else ""
    if not math.isfinite(finding.error):
        return f"{what}{side} has another shape or is not finite"
    of = "its norm" if finding.part in ("data", "optimiser", "clipping") else "the size of its terms"
    explained = f", and rounding explains {finding.explained:.1g}" if finding.explained else ""
    return f"{what}{side} is off by {finding.error:.2g} of {of}{explained}"


def _cause(finding: Finding) -> str:
    return f". {finding.cause[0].upper()}{finding.cause[1:]}." if finding.cause else "."


def _further(finding: Finding) -> str:
    layers = "layer has" if finding.further == 1 else "layers have"
    return f" {finding.further} further {layers} a fault in this part." if finding.further and finding.layer else ""


def _growth_text(comparison: Comparison) -> str:
    growth = comparison.growth
    if growth is None:
        return ""
    if growth < 1.005:
        return "A difference in the last bits of the weights does not grow from update to update."
    updates = math.ceil(math.log(PERCENT / UNIT) / math.log(growth))
    return (
        f"A difference in the last bits of the weights grows {growth:.3g} times an update: it is 1 % after about {updates:,} updates, from"
        " which on no two implementations stay together."
    )


def text(comparison: Comparison) -> str:
    """Return the sentence, the tables, and what was compared."""
    if comparison.recorded:
        return _text_of_recordings(comparison)
    parts = [sentence(comparison), ""]
    further = [finding for finding in comparison.findings if finding is not comparison.begins]
    if further:
        parts += ["Also found:", *map(_line, further), ""]
    if rows := list(_layer_lines(comparison)):
        parts += [*rows, ""]
    parts += [*_probe_lines(comparison), ""]
    parts += [f"Expected: {line}" for line in comparison.expected]
    parts.append(
        f"Compared: {comparison.tensors:,} tensors of {_updates(len(comparison.probes))} of {comparison.model} on {comparison.data},"
        f" in {comparison.seconds:.0f} s."
    )
    parts += [f"Not exercised: {line}." for line in comparison.not_exercised]
    return "\n".join(parts) + "\n"


def _text_of_recordings(comparison: Comparison) -> str:
    first, second = comparison.first.name, comparison.second.name
    parts = [sentence(comparison), ""]
    further = [finding for finding in comparison.findings if finding is not comparison.begins]
    if further:
        parts += ["Also found:", *map(_line, further), ""]
    if comparison.settings:
        table = [["layer", "setting", first, second]]
        table += [[row.first_layer, row.setting, row.first, row.second] for row in comparison.settings[:MAX_ROWS]]
        parts += ["Settings that differ:", *_aligned(table), ""]
    last = comparison.probes[-1].update
    rows = [row for row in comparison.layers if row.update == last]
    shown_rows = rows if len(rows) <= MAX_ROWS else sorted(rows, key=lambda row: -row.second)[:MAX_ROWS]
    if shown_rows:
        table = [["layer", "kind", "difference", ""]]
        table += [[row.layer, row.operation, f"{row.second:.1e}", "" if row.is_explained else "begins here"] for row in shown_rows]
        parts += [f"Results of layers at update {last + 1}, relative to their norm; each inherits what came before:", *_aligned(table), ""]
    table = [
        ["update", "loss", "gradients"],
        *(
            [f"{row.update + 1:,}", *("-" if math.isnan(value) else f"{value:.1e}" for value in (row.loss, row.gradients))]
            for row in comparison.probes
        ),
    ]
    parts += [*_aligned(table), ""]
    parts += [f"Expected: {line}." for line in comparison.expected]
    parts.append(f"Compared: {comparison.tensors:,} tensors of {_updates(len(comparison.probes))}.")
    parts += [f"Not compared: {line}." for line in comparison.not_exercised]
    return "\n".join(parts) + "\n"


def _updates(count: int) -> str:
    return "1 update" if count == 1 else f"{count} updates"


def _line(finding: Finding) -> str:
    return f"  update {finding.update + 1}, {line_of_layer(finding)}"


def line_of_layer(finding: Finding) -> str:
    """Return a finding in words, without its update."""
    layer = f" of {finding.layer}" if finding.layer else ""
    return f"{_where(finding)}{layer}: {_amount(finding)}{_cause(finding)}"


def _layer_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a table: the largest error of each layer's results, forward and backward."""
    layers = comparison.rows_by_layer
    if not layers:
        return
    names = [comparison.first.name, comparison.second.name]
    if max(map(len, names)) > MAX_NAME:
        names = ["first", "second"]
    table = [["layer", "operation", *(f"{way}, {name}" for way in ("forward", "backward") for name in names), ""]]
    shown_layers = list(layers.items())
    bad = [entry for entry in shown_layers if not all(row.is_explained for row in entry[1])]
    ordered = sorted(shown_layers, key=lambda entry: -max(max(row.first, row.second) for row in entry[1]))
    for name, rows in (bad or ordered)[:MAX_ROWS]:
        ways = [[row for row in rows if _forward(row) is way] for way in (True, False)]
        figures = [f"{max((getattr(row, side) for row in way), default=0.0):.1e}" for way in ways for side in ("first", "second")]
        table.append([name, rows[0].operation, *figures, "" if all(row.is_explained for row in rows) else "differs"])
    update = shown_layers[0][1][0].update
    yield f"Errors of layers at update {update + 1}, each by itself, against float64, relative to the size of a result's terms:"
    yield from _aligned(table)
    if (left := len(layers) - len(table) + 1) > 0:
        yield f"  and {left} further layers, whose errors rounding explains" if len(bad) <= MAX_ROWS else f"  and {left} further layers"


def _forward(row: LayerRow) -> bool:
    return row.tensor.startswith(("output", "buffer"))


def _probe_lines(comparison: Comparison) -> Iterator[str]:
    table = [["update", "loss", "gradients", "loss, last bits", "gradients, last bits"]]
    for row in comparison.probes:
        table.append([f"{row.update + 1:,}", *(f"{value:.1e}" for value in (row.loss, row.gradients, row.moved_loss, row.moved_gradients))])
    moved = f"how far the last bits of its weights move {comparison.first.name}"
    yield f"Updates from equal states: how far apart the two are, and {moved}:"
    yield from _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
