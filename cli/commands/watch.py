"""``trainer watch``: live progress of a run, read from its directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.live import Live
from rich.text import Text

from ...core.console import json_text, note, one_line
from ...core.errors import UsageError
from ...core.terminal_pictures import Drawing
from ...engine.progress import terminal
from ...records.store.jsonl import finite_json
from ...records.store.run_directory import RunReader
from ...records.store.schema import SCHEMA, EvalRecord
from ...report.compare.run_tables import one_run, to_text
from ...report.pages.watched_run import (
    News,
    WatchedRun,
    figures_line,
    is_in_summary,
    last_evaluation,
    news_line,
    node_lines,
    picture,
    state_line,
    title,
)
from ...report.runs.locate import UnreadableFolderError, find_run
from ...report.runs.run import Run
from ..interrupts import INTERRUPTED, RememberedInterrupts
from ..options import NumberRange, out_option
from ..run_request import warn_of_lost_updates
from ..streams import echo_wrapped

POLL_SECONDS = 0.25  # longest time between two looks at the files
DRAW_SECONDS = 0.5
LINE_SECONDS = 2.0  # default of --interval: time between two pictures, or between two groups of lines


@click.command()
@click.argument("run", metavar="RUN")
@out_option("Folder in which to look for RUN by name.")
@click.option(
    "--interval",
    type=NumberRange(min=0.05),
    metavar="SECONDS",
    help=f"Time between two pictures or groups of lines [default: {DRAW_SECONDS:g} on a terminal, {LINE_SECONDS:g} elsewhere].",
)
@click.option(
    "--wait",
    "wait_seconds",
    type=NumberRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a run that does not exist yet.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Write JSON lines to standard output: one document per interval, the last one with the summary."
)
def watch(run: str, out: Path, interval: float | None, wait_seconds: float, as_json: bool) -> int:
    """Show live progress of a run, or its final status.

    Shows loss, speed, time left, evaluations and nodes. RUN is a directory or a name. It only reads the run's files, so it can start and
    stop at any time; Ctrl-C ends only the display. When the run ends, its summary goes to standard output. Exits 0 if the run succeeded, 1
    if it failed, was interrupted or died.
    """
    path = _await_run(run, out, wait_seconds)
    watched = WatchedRun(RunReader(path))
    try:
        with RememberedInterrupts() as interrupts:
            if as_json:
                _follow(watched, _json_lines(), interval or LINE_SECONDS, interrupts.check)
            elif terminal(sys.stderr):
                _draw(watched, interval or DRAW_SECONDS, interrupts.check)
            else:
                _follow(watched, _PlainLines().show, interval or LINE_SECONDS, interrupts.check)
    except KeyboardInterrupt:
        note(f"no longer watching {watched.reader.name}, which is {watched.state}")
        return INTERRUPTED
    finally:
        watched.close()
    summary = watched.reader.summary()
    if summary is not None and not as_json:
        echo_wrapped(to_text(one_run(summary, watched.reader.job(), watched.reader.path)) + "\n")
        click.echo(f"run directory: {one_line(str(path))}")
    warn_of_lost_updates([Run(path)])
    return 0 if watched.state == "succeeded" else 1


def _await_run(text: str, out: Path, wait_seconds: float) -> Path:
    deadline = time.monotonic() + wait_seconds
    is_noted = False
    while True:
        try:
            return find_run(text, out)
        except UnreadableFolderError:
            raise
        except UsageError:
            if time.monotonic() >= deadline or any(map(_is_no_run, (Path(text), out / text))):
                raise
        if not is_noted:
            note(f"there is no run {text!r} yet; waiting {wait_seconds:g} s for it (--wait)")
            is_noted = True
        time.sleep(POLL_SECONDS)


def _is_no_run(path: Path) -> bool:
    try:
        return any(path.iterdir()) and not (path / "steps.jsonl").exists()  # in this order, as a run may begin in between
    except NotADirectoryError:
        return True
    except (OSError, ValueError):  # not found, or an impossible name
        return False


Show = Callable[[WatchedRun, list[News], bool], None]  # the flag: the interval is over


def _follow(watched: WatchedRun, show: Show, interval: float, check: Callable[[], None]) -> None:
    next_due = time.monotonic()
    while True:
        check()
        news = watched.poll()
        due = watched.ended or time.monotonic() >= next_due
        show(watched, news, due)
        if watched.ended:
            return
        if due:
            next_due = time.monotonic() + interval
        time.sleep(min(POLL_SECONDS, max(0.0, next_due - time.monotonic())))


class _PlainLines:
    def __init__(self) -> None:
        self._shown_lines: dict[str, str] = {}
        self._state: str | None = None

    def show(self, run: WatchedRun, news: list[News], due: bool) -> None:
        self._show_line("title", title(run))
        if due or run.state != self._state:
            self._state = run.state
            self._show_line("state", state_line(run))
        for record in news:
            note(news_line(record, run.metrics))
            if isinstance(record, EvalRecord):
                self._shown_lines["evaluation"] = last_evaluation(record, run.metrics)
        figures = figures_line(run)
        if due and figures is not None and not is_in_summary(run):
            if run.evaluation is not None:
                self._show_line("evaluation", last_evaluation(run.evaluation, run.metrics))
            if self._show_line("figures", figures):
                for line in node_lines(run):
                    note(line)

    def _show_line(self, what: str, line: str) -> bool:
        new = self._shown_lines.get(what) != line
        if new:
            self._shown_lines[what] = line
            note(line)
        return new


def _json_lines() -> Show:
    waiting: list[News] = []

    def show(run: WatchedRun, news: list[News], due: bool) -> None:
        waiting.extend(news)
        if due:
            end = {"summary": run.reader.summary()} if run.ended else {}
            click.echo(json_text(finite_json({"schema": SCHEMA, **run.snapshot(waiting), **end})))
            sys.stdout.flush()
            waiting.clear()

    return show


def _draw(watched: WatchedRun, interval: float, check: Callable[[], None]) -> None:
    console = Drawing(sys.stderr)
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def show(run: WatchedRun, news: list[News], due: bool) -> None:
            for record in news:
                console.print(Text(news_line(record, run.metrics)))
            if due:
                live.update(picture(run), refresh=True)

        _follow(watched, show, interval, check)
