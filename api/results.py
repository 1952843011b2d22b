"""Results of runs: figures, records, weights and plots."""

from __future__ import annotations

import html
import importlib
import io
import os
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..checkpoint import list_checkpoints, read_checkpoint
from ..core.errors import UsageError
from ..report.analysis.conclusion import Conclusion, conclude
from ..report.analysis.sentences import as_text as conclusion_as_text
from ..report.analysis.sentences import render_conclusion
from ..report.compare.comparison import compare_runs
from ..report.compare.formats import as_text
from ..report.compare.run_tables import one_run, to_text
from ..report.pages.export import table_of
from ..report.pages.figure import Picture
from ..report.pages.matplotlib_renderer import drawn
from ..report.pages.pictures import pictures
from ..report.runs.locate import find_run
from ..report.runs.run import Run, finished_run

_PARAMETER = "parameters/"


class Plot:
    """A plot of runs, shown in a notebook."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    @property
    def figure(self) -> Figure:
        """The plot as matplotlib's figure."""
        with drawn(self._picture) as (figure, _):
            return figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plot; the name's ending says in which format."""
        with drawn(self._picture) as (figure, _):
            figure.savefig(path, dpi=150)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        with drawn(self._picture) as (figure, _):
            figure.savefig(file, format="png", dpi=100)
        return file.getvalue()


class Result:
    """A finished run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a run directory. Raises UsageError where there is none, or no figures."""
        self.path = Path(path)
        self._run = finished_run(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def job(self) -> Mapping[str, Any]:
        """The job's settings, as ``job.json`` has them."""
        return self._run.job

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures of ``summary.json``, such as `eval` and `examples_per_second`."""
        return self._run.summary

    @cached_property
    def steps(self) -> Any:
        """A row for each update: loss, learning rate, time in seconds.

        A DataFrame where pandas is installed, otherwise arrays by column; so are `evaluations` and `system`.
        """
        return _frame("steps", self._run)

    @cached_property
    def evaluations(self) -> Any:
        """A row for each evaluation."""
        return _frame("evals", self._run)

    @cached_property
    def system(self) -> Any:
        """A row for each sample of a node's CPU, memory, network and GPUs."""
        return _frame("system", self._run)

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the parameters of the newest checkpoint by name, float32.

        Raises UsageError without one.
        """
        checkpoints = list_checkpoints(self.path)
        if not checkpoints:
            raise UsageError(f"checkpoint: {self.name!r} has none: save_final=True writes one at the end, checkpoint_every before it")
        arrays = read_checkpoint(checkpoints[0]).arrays
        return {name.removeprefix(_PARAMETER): array for name, array in arrays.items() if name.startswith(_PARAMETER)}

    def plot(self, *names: str) -> Plot | list[Plot]:
        """Return the plots of these names, such as ``loss``; all without one."""
        return _plots([self._run], names)

    def __repr__(self) -> str:
        return f"Result({str(self.path)!r})"

    def __str__(self) -> str:
        return to_text(one_run(self.summary, self.job, self.path))

    def _repr_html_(self) -> str:
        evaluation = self.summary.get("eval") or {}
        shown = {
            name: f"{value:.4g}" if isinstance(value, float) else f"{value:,}" for name, value in evaluation.items() if _is_number(value)
        }
        figures = ", ".join(f"{name} {text}" for name, text in shown.items())
        return f"<p><b>{html.escape(self.name)}</b>: {html.escape(figures)}</p>{_preformatted(str(self))}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _preformatted(text: str, style: str = "white-space: pre; overflow-x: auto") -> str:
    """Return lines as HTML whose columns stay aligned, also where a page changes the font."""
    return f'<pre style="font-family: monospace; {style}">{html.escape(text)}</pre>'


class Compared:
    """A comparison of runs: first the conclusion, then tables."""

    def __init__(self, results: list[Result], runs: list[Run]) -> None:
        self.results, self._runs = results, runs
        self._comparison = compare_runs(runs, fold=True, by=[])
        self._concluded: Conclusion = conclude(self._comparison.runs)

    @property
    def conclusion(self) -> str:
        """What differs, how much and how surely; "" where nothing can be concluded."""
        return conclusion_as_text(render_conclusion(self._concluded), None) if self._concluded.is_conclusive else ""

    @property
    def tables(self) -> str:
        """All figures side by side."""
        return as_text(self._comparison)

    def to_json(self) -> dict[str, Any]:
        """Return figures and conclusion, as ``trainer compare --json`` prints them."""
        sentences = render_conclusion(self._concluded).sentences if self._concluded.is_conclusive else None
        return {"conclusion": None if sentences is None else self._concluded.to_json(sentences), **self._comparison.to_json()}

    def plot(self, *names: str) -> Plot | list[Plot]:
        """Return the plots of these names over all runs; all without one."""
        return _plots(self._runs, names)

    def __str__(self) -> str:
        return self.conclusion + self.tables

    def _repr_html_(self) -> str:
        return _preformatted(self.conclusion, "white-space: pre-wrap; word-break: normal; font-weight: bold") + _preformatted(self.tables)

    def __repr__(self) -> str:
        return f"Compared({', '.join(result.name for result in self.results)})"


def load(run: str | os.PathLike[str], out: str | os.PathLike[str] = "runs") -> Result:
    """Open a run by its directory, or by its name in `out`. Raises UsageError."""
    return Result(find_run(os.fspath(run), Path(out)))


def compare(*runs: Result | str | os.PathLike[str], out: str | os.PathLike[str] = "runs") -> Compared:
    """Compare finished runs; ratios are relative to the first. Raises UsageError."""
    results = [run if isinstance(run, Result) else load(run, out) for run in runs]
    if not results:
        raise UsageError("compare: give two runs or more")
    return Compared(results, [finished_run(result.path) for result in results])


def _frame(what: str, run: Run) -> Any:
    table = table_of(what, [run])
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    named = {column.name: values for column, values in zip(table.columns, columns, strict=True)}
    if find_spec("pandas"):
        pandas: Any = importlib.import_module("pandas")
        return pandas.DataFrame(named)
    kinds = {"integer": np.float64, "number": np.float64, "text": np.str_}
    return {name: np.array(values, kinds.get(column.kind)) for column, (name, values) in zip(table.columns, named.items(), strict=True)}


def _plots(runs: list[Run], names: tuple[str, ...]) -> Plot | list[Plot]:
    known = {picture.name: picture for picture in pictures(runs)}
    for name in names:
        if name not in known:
            raise UsageError.of("plot", name, ", ".join(known), known)
    plots = [Plot(known[name]) for name in names or known]
    return plots[0] if len(names) == 1 else plots
