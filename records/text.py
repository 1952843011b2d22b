"""Format of figures: units spelled out, few digits, decimal prefixes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..core.job import Job
from ..metrics import MetricInfo
from ..metrics.base import PERCENTAGES
from .node_usage import rate_between
from .store.schema import EvalRecord, SystemRecord

UNKNOWN = "-"  # not observed
_PREFIXES = ("", "k", "M", "G", "T", "P")


def number_text(value: float | str | None, digits: int = 4) -> str:
    """Return a figure with `digits` decimals, or three digits if tiny or huge; UNKNOWN for None."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"{value:.3g}" if 0 < abs(value) < 10 ** (1 - digits) or abs(value) >= _HUGE else f"{value:,.{digits}f}"


def figure_text(name: str, value: float | str | None, digits: int = 4) -> str:
    """Return a loss or metric (percentages with two decimals).

    `name` may be as in ``best_eval_bleu``.
    """
    if name.removeprefix("best_").removeprefix("eval_").removeprefix("end_") not in PERCENTAGES or isinstance(value, str):
        return number_text(value, digits)
    return number_text(value if value is None or not math.isfinite(value) else round(value, 2), 2)


_HUGE = 1e7  # as the loss of a diverged run


def count_text(value: float | None) -> str:
    """Return a whole number with separators: ``12,345``."""
    return UNKNOWN if value is None else f"{round(value):,}"


def rate_text(value: float | None, unit: str = "/s") -> str:
    """Return events per second: ``12,345/s``, and with decimals below 100: ``3.42/s``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def bytes_text(value: float | None, per_second: bool = False, like: float | None = None) -> str:
    """Return bytes with a decimal prefix, that of `like` if given: ``12.3 MB``, ``980 B/s``."""
    if value is None:
        return UNKNOWN
    power, size = 0, abs(value if like is None else like)
    while size >= 999.5 and power < len(_PREFIXES) - 1:
        value, size, power = value / 1000, size / 1000, power + 1
    digits = 0 if power == 0 or value >= 99.95 else 1
    text = f"{value:.2g}" if power and 0 < abs(value) < 0.95 else f"{value:.{digits}f}"
    return f"{text} {_PREFIXES[power]}B{'/s' if per_second else ''}"


def seconds_text(seconds: float | None) -> str:
    """Return a short time with three digits; UNKNOWN for None.

    Such as ``1.23 s``, ``12.3 ms``, ``50 µs``.
    """
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds * 1e9:.3g} ns"


def saving_text(checkpoints: Mapping[str, Any]) -> str:
    """Return the average cost of a summary's ``checkpoints``.

    Pause and time of writing, if known.
    """
    stall, write = ((checkpoints.get(name) or {}).get("mean") for name in ("stall_seconds", "write_seconds"))
    stalled = "" if stall is None else f"; each paused training for {seconds_text(stall)}"
    written = "" if write is None else f"; writing one took {seconds_text(write)}, in the background or after training"
    failed = f", {checkpoints['failed']:,} FAILED" if checkpoints.get("failed") else ""
    return f"{checkpoints['saved']:,} saved{failed}{stalled}{written}"


def memory_basis(pss: bool) -> str:
    """Return the meaning of a node's memory figures; `pss`: it has a sample of PSS."""
    divided = "; PSS divides it among them, and is sampled rarely, so it is no peak" if pss else ""
    return f"RSS counts shared memory in every process{divided}."


def duration_text(seconds: float | None) -> str:
    """Return a duration: ``0.34 s``, ``12.3 s``, ``2 min 05 s``, ``3 h 07 min``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


MAX_NODES_SHOWN = 16  # tables and charts summarise more nodes
# The median is that of an actual node.
STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {"lowest": min, "median": statistics.median_low, "highest": max}
T = TypeVar("T")


def lines_of(nodes: int) -> list[int | str]:
    """Return the lines for so many nodes: their numbers, or the names of `STATISTICS`."""
    return [*range(nodes)] if nodes <= MAX_NODES_SHOWN else [*STATISTICS]


def statistic(name: str, values: Collection[float | None]) -> float | None:
    """Return one of `STATISTICS` over known values; None without any."""
    known = [value for value in values if value is not None]
    return STATISTICS[name](known) if known else None


def ends_of(items: Sequence[T], figure: Callable[[T], float | None]) -> tuple[list[T], bool]:
    """Return items of all nodes, or of many the lowest and highest, in order.

    Also whether any are missing.
    """
    if len(items) <= MAX_NODES_SHOWN:
        return [*items], False
    known = sorted((value, number) for number, item in enumerate(items) if (value := figure(item)) is not None)
    half = MAX_NODES_SHOWN // 2
    picked = {number for _, number in (*known[:half], *known[-half:])} or {*range(MAX_NODES_SHOWN)}
    return [items[number] for number in sorted(picked)], True


MIN_TRAINED = 0.05  # fraction of sampled time needed for a training rate, given the accuracy of pauses


@dataclass(slots=True)
class TrainingState:
    """Latest state of the training."""

    title: str = ""
    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    steps_per_second: float | None = None
    time_left_seconds: float | None = None
    epoch: float = 0

    def begin(self, job: Job, total_steps: int | None) -> None:
        """Start with a run."""
        nodes = f"{job.nodes} node{'s' if job.nodes > 1 else ''}"
        self.title = f"{job.model} on {job.data}, {job.backend} {job.mode}, {nodes}, {job.workers} worker{'s' if job.workers > 1 else ''}"
        self.total_steps = total_steps

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Keep an update, as `Progress.update`."""
        self.step, self.loss, self.epoch = step, loss, epoch
        self.steps_per_second, self.time_left_seconds = steps_per_second, time_left_seconds

    def end(self) -> None:
        """Note that the training has ended, perhaps early."""
        self.time_left_seconds = None

    def line(self) -> str:
        """Return the state in one line."""
        total = f"/{self.total_steps:,}" if self.total_steps is not None else ""
        left = f"  {duration_text(self.time_left_seconds)} left" if self.time_left_seconds else ""
        speed = f"  {rate_text(self.steps_per_second, ' steps/s')}" if self.steps_per_second is not None else ""
        return f"step {self.step:,}{total}  epoch {int(self.epoch) + 1}  last loss {number_text(self.loss)}{speed}{left}"


def evaluation_text(record: EvalRecord, metrics: Iterable[MetricInfo]) -> str:
    """Return an evaluation in one line, with the labels of `metrics`."""
    labels = {info.name: info.label for info in metrics}
    shown = "".join(f"  {labels.get(name, name)} {figure_text(name, value)}" for name, value in record.metrics.items())
    return f"evaluated after step {record.step:,}  epoch {record.epoch:.4g}  {record.split} loss {number_text(record.loss)}{shown}"


class NodeSamples:
    """Last sample of each node, and traffic since the previous one.

    With `until_shown` since `shown`.
    """

    def __init__(self, *, until_shown: bool = False) -> None:
        self._until_shown = until_shown
        self._pauses: list[tuple[float, float]] = []
        self._paused_since = math.inf
        self._of = " of training" if until_shown else ""
        self.samples: dict[int, tuple[SystemRecord | None, SystemRecord]] = {}  # by node: an earlier one, if any, and the last

    def add(self, record: SystemRecord) -> None:
        """Add a sample."""
        since, last = self.samples.get(record.node, (None, None))
        if not self._until_shown or since is None or rate_between(last, record, "network_sent_bytes") is None:
            since = last
        self.samples[record.node] = (since, record)

    def shown(self) -> None:
        """Restart traffic from the last samples."""
        self.samples = {node: (None, last) for node, (_, last) in self.samples.items()}
        first = min((last.time_seconds for _, last in self.samples.values()), default=0.0)
        self._pauses = [pause for pause in self._pauses if pause[1] > first]

    def paused(self, start: float, end: float) -> None:
        """Note a training pause from `start` to `end` on the run clock."""
        self._pauses.append((start, end))

    def pausing(self, since: float = math.inf) -> None:
        """Note that training pauses since that run time; by default it does not."""
        self._paused_since = since

    def rows(self, nodes: int | None = None) -> list[Mapping[str, str]]:
        """Return the texts of each node in node order, or of many together; `nodes`: current number."""
        samples = self.samples.copy()  # other threads may draw it
        node_figures = [
            _figures(*samples[node], [*self._pauses, (self._paused_since, math.inf)])
            for node in sorted(samples)
            if nodes is None or node < nodes
        ]
        lines = lines_of(len(node_figures))
        if lines == [*range(len(node_figures))]:
            return [_row(str(figures["node"]), figures, self._of) for figures in node_figures]
        known = {key: [figures[key] for figures in node_figures] for key in node_figures[0]}
        return [
            _row(f"{name} of {len(node_figures):,}", {key: statistic(str(name), values) for key, values in known.items()}, self._of)
            for name in lines
        ]


def node_text(row: Mapping[str, str]) -> str:
    """Return a row of `NodeSamples` in one line."""
    named = f"node {row['node']}" if row["node"].isdigit() else f"{row['node']} nodes"
    return "  ".join([named, *(f"{name} {text}" for name, text in row.items() if name != "node")])


def _figures(before: SystemRecord | None, record: SystemRecord, pauses: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    rates = [rate_between(before, record, f"network_{way}_bytes") for way in ("sent", "received")]
    seconds = trained = 0.0
    if before is not None:
        first, last = before.time_seconds, record.time_seconds
        seconds = last - first
        trained, until = seconds, first
        for start, end in sorted(pauses):  # may overlap
            trained -= max(0.0, min(end, last) - max(start, until))
            until = max(until, end)
    sent, received = (None if rate is None or trained < MIN_TRAINED * seconds else rate * seconds / trained for rate in rates)
    return {
        "node": record.node,
        "cores": record.cpu_cores_used,
        "available": record.cores_available,
        "memory": record.memory_rss_bytes,
        "sent": sent,
        "received": received,
        "over": None if sent is received is None else trained,
    }


def _row(label: str, figures: Mapping[str, float | None], of: str) -> Mapping[str, str]:
    cores, available = figures["cores"], figures["available"]
    return {
        "node": label,
        "CPU": UNKNOWN if cores is None else f"{cores:.2f}" + (f" of {available:g} cores" if available else " cores"),
        "memory": bytes_text(figures["memory"]),
        "sent": bytes_text(figures["sent"], per_second=True),
        "received": bytes_text(figures["received"], per_second=True),
        "over": UNKNOWN if figures["over"] is None else f"{duration_text(figures['over'])}{of}",
    }


_COMMIT_DIGITS = 12  # unique in any known repository (git shows 7 or more)
# Flags in /proc/cpuinfo (x86 and Arm) that decide the speed of matrix products.
_VECTOR_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm", "sme"),
)


def code_text(code: Mapping[str, Any] | None) -> str | None:
    """Return the code's description from ``env.json``, or None.

    ``(perhaps changed)``: unknown whether tracked files differed.
    """
    if code is None:
        return None
    release, package, typed_in = (code.get("packages") or {}).get("crosstrain"), code.get("crosstrain"), code.get("typed_in")
    if release is None and package is None and typed_in is None:
        return None
    crosstrain = f"crosstrain{f' {release}' if release else ''}{f' at commit {_commit(package)}' if package else ''}"
    return f"{crosstrain}, typed in a work tree at commit {_commit(typed_in)}" if typed_in else crosstrain


def _commit(tree: Mapping[str, Any]) -> str:
    changed = {True: " (changed)", None: " (perhaps changed)"}.get(tree.get("changed"), "")
    return f"{tree['commit'][:_COMMIT_DIGITS]}{changed}"


def instructions_text(flags: Sequence[str] | None) -> str | None:
    """Return a processor's vector and matrix instructions by its flags; None if unknown."""
    known = frozenset(flags or ())
    return " ".join(flag for flag in _VECTOR_FLAGS if flag in known) or None
