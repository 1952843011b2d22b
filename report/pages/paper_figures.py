"""Parts of a paper's table: texts as LaTeX, and columns of figures with one unit."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.console import one_line
from ...core.setting import LEARNING, LOSS, SPEED, TARGET
from ...metrics.base import PERCENTAGES
from ...records.text import UNKNOWN, statistic
from ..compare.cells import named_node, node_lines
from ..compare.comparison import Comparison
from ..compare.ratios import Estimate, estimate
from ..compare.rows import Row
from ..runs.columns import TIMED_FIGURES, Column, column, metric_columns, row
from ..runs.cpu_starvation import timed_runs
from ..runs.run import number

MAX_CHARACTERS = 400  # of one text; names of run directories have at most 255 bytes
_MAX_WORD = 16  # breakable texts may be broken within a word after so many characters
_MAX_LABEL = 60
_SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\ttfamily\char34}",  # \textquotedbl is not in the default encoding
    "`": r"{\ttfamily\char96}",
    "[": "{[}",  # at the end of a row it would begin an option, as would a star
    "]": "{]}",
    "*": "{*}",
    "†": r"$\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "→": r"$\rightarrow$",
    "·": r"$\cdot$",
    "°": r"$^{\circ}$",
    "µ": r"$\mu$",
    "…": r"\ldots{}",
    "–": "--",
    "—": "---",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{NO-BREAK SPACE}": r"\nobreakspace{}",
    "§": r"\S{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
}

_ACCENTS: Mapping[str, str] = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING MACRON}": "=",
    "\N{COMBINING BREVE}": "u",
    "\N{COMBINING DOT ABOVE}": ".",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING RING ABOVE}": "r",
    "\N{COMBINING DOUBLE ACUTE ACCENT}": "H",
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING CEDILLA}": "c",
    "\N{COMBINING DOT BELOW}": "d",
}
_BELOW = frozenset({"\N{COMBINING CEDILLA}", "\N{COMBINING DOT BELOW}"})
_GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"}
    | {"mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"}
)
_LIGATES = frozenset("-',")  # two in a row would become another character


def latex_text(text: str, breakable: bool = False, most: int = MAX_CHARACTERS) -> str:
    """Return untrusted text as one line of LaTeX, cut after `most` characters."""
    # A `breakable` text may be broken within words. Characters missing in the default fonts become their number, as ``U+4E2D``.
    line = one_line(text)
    parts, before, word = [], "", 0
    for character in line[:most]:
        if character in _LIGATES and character == before:
            parts.append("{}")
        parts.append(_latex_character(character))
        word = 0 if character == " " else word + 1
        if breakable and word and (character in "-_/.,:;=+" or word % _MAX_WORD == 0):
            parts.append(r"\allowbreak{}")
        before = character
    return "".join(parts) + (r"\ldots{}" if len(line) > most else "")


def _latex_character(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    if " " <= character <= "~":
        return character
    parts = unicodedata.normalize("NFD", character)
    letter, accents = parts[0], parts[1:]
    if accents and letter.isascii() and letter.isalpha() and all(accent in _ACCENTS for accent in accents):
        latex = {"i": r"\i{}", "j": r"\j{}"}.get(letter, letter) if accents[0] not in _BELOW else letter
        for accent in accents:
            latex = f"\\{_ACCENTS[accent]}{{{latex}}}"
        return latex
    return _greek(character) or f"U+{ord(character):04X}"


def _greek(character: str) -> str | None:
    match = re.fullmatch("GREEK SMALL LETTER ([A-Z]+)", unicodedata.name(character, "").replace("LAMDA", "LAMBDA"))
    return f"$\\{match[1].lower()}$" if match is not None and match[1].lower() in _GREEK else None


def comment(text: str) -> str:
    """Return untrusted text as a comment of one line."""
    return f"% {one_line(text)}"


def label(text: str) -> str:
    """Return a LaTeX label from untrusted text: small letters, digits and hyphens, or ``runs``."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:_MAX_LABEL].strip("-") or "runs"


_SIGNIFICANT = 3
_MAX_DECIMALS = 6
_HUGE = 1e7  # larger figures, such as a diverged loss, have a power of ten


def decimals(values: Iterable[float]) -> int:
    """Return the decimals that show three digits of the smallest figure other than 0."""
    known = [abs(value) for value in values if value and math.isfinite(value)]
    if not known:
        return 0
    return min(max(0, _SIGNIFICANT - 1 - math.floor(math.log10(min(known)))), _MAX_DECIMALS)


def number_latex(value: float, digits: int) -> str:
    """Return a figure as LaTeX; with a power of ten if huge, or if rounded to 0."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else rf"${'-' if value < 0 else ''}\infty$"
    if abs(value) >= _HUGE or (value and abs(value) < 0.5 * 10.0**-digits):
        mantissa, _, power = f"{value:.2e}".partition("e")
        return rf"${mantissa}\times10^{{{int(power)}}}$"
    text = f"{value:,.{digits}f}"
    return f"$-${text[1:]}" if text.startswith("-") else text


_MARK = r"\makebox[0pt][l]{$^\dagger$}"  # of zero width, so that figures stay aligned
PLUS_MINUS = r"$\pm$"
_DECIMALS_OF_METRICS = 4
_DECIMALS_OF_PERCENTAGES = 2
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A LaTeX cell: `figure`, and `behind` it ± half the interval or a count; or words."""

    figure: str
    behind: str = ""
    spans: bool = False


@dataclass(frozen=True, slots=True)
class PaperColumn:
    """A column of a paper's table: LaTeX header with unit, cells, and kind of figure.

    `words`: the cells are text; `group`: one of `core.setting.GROUPS`.
    """

    header: str
    cells: tuple[Cell, ...]
    words: bool = False
    group: str | None = None

    @property
    def has_behind(self) -> bool:
        """Whether any cell has a part behind its figure."""
        return any(cell.behind for cell in self.cells)


def default_columns(comparison: Comparison) -> list[Column]:
    """Return the default columns: metrics or loss, the time to target if any, examples/s."""
    # Final metrics of translations replace those during training. Runs on synthetic data have no quality.
    synthetic = all(run.summary.get("synthetic") for run in comparison.runs)
    metrics = metric_columns(comparison.runs)
    at_the_end = {metric.key.removeprefix("end_") for metric in metrics if metric.key.startswith("end_")}
    learnt = [metric for metric in metrics if metric.key.removeprefix("eval_") not in at_the_end] or [column("loss")]
    target = [column("time_to_target")] if any(entry.converged is not None for entry in comparison.entries) else []
    return [*([] if synthetic else learnt), *target, column("examples_per_second")]


def figure_columns(comparison: Comparison, columns: Sequence[Column]) -> list[PaperColumn]:
    """Return the columns of figures that any row has; those of nodes have a column per node."""
    known = {id(run): row(run.summary) for entry in comparison.entries for run in entry.runs}
    paper_columns = []
    for source in columns:
        if source.of_node:
            for node, label in node_lines(comparison.entries):
                of_node = {place: _node_value(flat.get(source.key) or [], node) for place, flat in known.items()}
                paper_columns.append(_column(comparison, source, of_node, named_node(node, label, source.header)))
        else:
            paper_columns.append(_column(comparison, source, {place: flat.get(source.key) for place, flat in known.items()}, source.header))
    return [source for source in paper_columns if any(cell.figure != UNKNOWN for cell in source.cells)]


def _node_value(values: Sequence[Any], node: int | str) -> Any:
    return statistic(node, values) if isinstance(node, str) else values[node] if node < len(values) else None


def _column(comparison: Comparison, source: Column, figures: Mapping[int, Any], header: str) -> PaperColumn:
    marked = [source.group in marks for marks in comparison.marks]
    counting = [timed_runs(entry.runs) if source.key in TIMED_FIGURES else entry.runs for entry in comparison.entries]
    values = [[figures[id(run)] for run in runs] for runs in counting]
    if any(
        value is not None and (isinstance(value, bool | list) or number(value) is None) for run_values in values for value in run_values
    ):
        words = tuple(Cell(_words(run_values) + (_MARK if mark else "")) for run_values, mark in zip(values, marked, strict=True))
        return PaperColumn(latex_text(header), words, words=True, group=source.group)
    estimates = [estimate([number(value) for value in run_values]) for run_values in values]
    factor, unit = _unit(source.key, [mean_estimate.mean for mean_estimate in estimates if mean_estimate is not None])
    scaled = [None if mean_estimate is None else mean_estimate.scaled(factor) for mean_estimate in estimates]
    digits = _digits(source, [mean_estimate for mean_estimate in scaled if mean_estimate is not None])
    cells = [
        _cell(source, entry, mean_estimate, digits, marked=mark)
        for entry, mean_estimate, mark in zip(comparison.entries, scaled, marked, strict=True)
    ]
    return PaperColumn(latex_text(f"{header} ({unit})" if unit else header), tuple(cells), group=source.group)


def _words(values: Sequence[Any]) -> str:
    return latex_text(", ".join(dict.fromkeys(UNKNOWN if value is None else str(value) for value in values)))


def _unit(key: str, means: Sequence[float]) -> tuple[float, str]:
    largest = max((abs(mean) for mean in means), default=0.0)
    if "_bytes" in key:
        size, unit = next(((size, unit) for size, unit in reversed(_BYTES) if largest < 1000 * size), _BYTES[0])
        return 1 / size, f"{unit}/s" if key.endswith("_second") else unit
    if "_seconds" in key:
        return (1000.0, "ms") if 0 < largest < 1 else (1.0, "s")
    return (100.0, "%") if "_fraction" in key else (1.0, "")


def _digits(source: Column, estimates: Sequence[Estimate]) -> int:
    if source.group == LOSS or (source.group in LEARNING and source.group != TARGET):
        percentages = source.key.removeprefix("best_").removeprefix("eval_").removeprefix("end_") in PERCENTAGES
        return _DECIMALS_OF_PERCENTAGES if percentages else _DECIMALS_OF_METRICS
    counted = all(mean_estimate.mean.is_integer() and not mean_estimate.half_width for mean_estimate in estimates)
    return 0 if counted else decimals(mean_estimate.mean for mean_estimate in estimates)


def _cell(source: Column, entry: Row, mean_estimate: Estimate | None, digits: int, *, marked: bool) -> Cell:
    to_target = source.key == "time_to_target_seconds" and entry.converged is not None
    if to_target and entry.converged == 0:
        return Cell("not reached", spans=True)
    if mean_estimate is None:
        return Cell(UNKNOWN)
    mark = _MARK if marked else ""
    figure = number_latex(mean_estimate.mean, digits)
    if to_target and not entry.all_converged:
        count = "" if mean_estimate.values == entry.converged else f", $n={mean_estimate.values}$"
        return Cell(figure, f"({entry.converged} of {len(entry.runs)}{count}){mark}")
    count = rf" ($n={mean_estimate.values}$)" if mean_estimate.values < len(entry.runs) else ""
    if mean_estimate.half_width is None:
        return Cell(figure + mark, count.strip())
    return Cell(figure, f"{PLUS_MINUS} {_half_width(mean_estimate.half_width, digits)}{mark}{count}")


def _half_width(value: float, digits: int) -> str:
    smallest = 10.0**-digits
    return f"\\textless{{}}{smallest:.{digits}f}" if 0 < value < smallest / 2 else number_latex(value, digits)


def scaling_columns(comparison: Comparison) -> list[PaperColumn]:
    """Return speed-up and parallel efficiency of rows grouped by nodes, by kind of scaling."""
    columns = []
    speeds = [estimate([number(run.summary["examples_per_second"]) for run in timed_runs(entry.runs)]) for entry in comparison.entries]
    kinds = list(dict.fromkeys(series.kind for series in comparison.scaling or ()))
    for kind in kinds:
        speedups = [Cell(UNKNOWN)] * len(speeds)
        efficiencies = [*speedups]
        for series in (scaling for scaling in comparison.scaling or () if scaling.kind == kind):
            base = series.points[0]
            for point in series.points:
                speed, first = speeds[point.entry], speeds[base.entry]
                if speed is None or first is None or not first.mean:
                    continue
                mark = _MARK if SPEED in comparison.comparability.confounded(base.entry, point.entry) else ""
                times = speed.mean / first.mean
                speedups[point.entry] = Cell(f"{number_latex(times, 2)}{mark}")
                if point.efficiency is not None:
                    efficiencies[point.entry] = Cell(f"{number_latex(100 * times * base.nodes / point.nodes, 0)}{mark}")
        which = f"{kind} " if len(kinds) > 1 else ""
        columns.append(PaperColumn(latex_text(f"{which}speed-up"), tuple(speedups), group=SPEED))
        columns.append(PaperColumn(latex_text(f"{which}efficiency (%)"), tuple(efficiencies), group=SPEED))
    return columns
