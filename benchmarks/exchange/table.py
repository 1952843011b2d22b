"""Table and plot of all-reduce seconds by size, for the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.core.units import bandwidth_text
from crosstrain.report.pages.figure import COLOURS, INK

from ..experiments.page import fill
from .bounds import Line, all_reduce_bound, fit

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARKERS = "osD^v"


@dataclass(frozen=True)
class Series:
    """Seconds of an all-reduce by size over `ranks`, for each implementation.

    `network` is measured with plain sockets.
    """

    ranks: int
    sizes_bytes: Sequence[int]
    network: Line
    seconds: Mapping[str, Sequence[float]]

    @property
    def bounds(self) -> list[float]:
        """The least seconds for each size."""
        return [all_reduce_bound(self.ranks, size, self.network) for size in self.sizes_bytes]


def markdown(series: Series) -> str:
    """Return the table: a line a size, then each exchange's own α and β."""
    names = list(series.seconds)
    lines = [f"| vector | {' | '.join(names)} | bound |", "|---:|" + "---:|" * (len(names) + 1)]
    for place, (size, bound) in enumerate(zip(series.sizes_bytes, series.bounds, strict=True)):
        cells = [f"{time_text(series.seconds[name][place])} ({series.seconds[name][place] / bound:.1f})" for name in names]
        lines.append(f"| {size_text(size)} | {' | '.join(cells)} | {time_text(bound)} |")
    if len(series.sizes_bytes) > 1:
        fitted = [fit(series.sizes_bytes, series.seconds[name]) for name in names]
        factor = 2 * (series.ranks - 1) / series.ranks
        for title, texts, bound_text in (
            ("α", [time_text(line.latency_seconds) for line in fitted], time_text(series.network.latency_seconds)),
            ("β", [_rate(line.bytes_per_second * factor) for line in fitted], _rate(series.network.bytes_per_second)),
        ):
            lines.append(f"| {title} | {' | '.join(texts)} | {bound_text} |")
    return "\n".join(lines)


def draw(panels: Mapping[str, Series], path: Path) -> None:
    """Draw seconds over bytes on logarithmic axes as SVG, a panel for each network.

    The same figures make the same bytes.
    """
    import matplotlib  # as late as this, since it takes seconds to import
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "crosstrain", "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
        for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for number, (name, seconds) in enumerate(series.seconds.items()):
                axes.plot(series.sizes_bytes, seconds, color=COLOURS[number], marker=MARKERS[number], markersize=3.5, label=name)
            axes.plot(series.sizes_bytes, series.bounds, color=INK, linestyle="--", label="bound")
            axes.set(xscale="log", yscale="log", xlabel="bytes of the vector", ylabel="seconds of an all-reduce", title=title)
            axes.set_xscale("log", base=2)
            axes.set_xticks(series.sizes_bytes, [size_text(size) for size in series.sizes_bytes], rotation=45)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "crosstrain: benchmarks.exchange"})


def write_page(series: Series, text: str, facts: Mapping[str, Any], bits_per_second: float | None, repeats: int) -> None:
    """Write the table and its plot into docs/benchmarks.md between the markers.

    Raises ValueError without the markers.
    """
    kind = "no-limit" if bits_per_second is None else bandwidth_text(bits_per_second)
    links = "links as fast as the machine copies" if bits_per_second is None else f"links of {bandwidth_text(bits_per_second)}"
    name = f"all-reduce-{kind}"
    picture = DOCS / "figures" / f"{name}.svg"
    draw({f"{series.ranks} nodes, {links}": series}, picture)
    note = f"{machine_text(facts, series.ranks)}, {links}; medians of {repeats} repeats."
    page = DOCS / "benchmarks.md"
    filled = fill(page.read_text(encoding="utf-8"), name, f"{note}\n\n{text}\n\n![{name}](figures/{picture.name})")
    page.write_text(filled, encoding="utf-8")


def machine_text(facts: Mapping[str, Any], ranks: int) -> str:
    """Return where this was measured, in a line for a table."""
    nodes = "virtual nodes" if facts["network"] == "isolated" else "nodes on loopback"
    versions = ", ".join(f"{package} {facts['versions'][package]}" for package in ("torch", "tensorflow"))
    return f"{ranks} {nodes} on {facts['cores_available']:g} cores of {facts['cpu_model']}, Linux {facts['kernel']}, {versions}"


def size_text(size_bytes: int) -> str:
    """Return a size in the largest unit that there is one of: 64 KiB."""
    for unit, factor in (("TiB", 1 << 40), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def time_text(seconds: float) -> str:
    """Return a time with three digits that count: 31.4 µs, 2.61 ms, 1.50 s."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def _rate(bytes_per_second: float) -> str:
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= factor:
            return f"{_digits(bytes_per_second / factor)} {unit}"
    return f"{_digits(bytes_per_second / 1e3)} kB/s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
