"""``trainer sweep``: one run per point of a grid of settings, and their comparison."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ...core.console import json_text, note
from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.setting import NOTHING, Requirement
from ...core.settings.job_fields import idle_settings, requirement_flags
from ...core.settings.personal import resolve_personal
from ...core.settings.sources import resolve, shipped
from ...core.settings.sweeps import MAX_REPEATS, SWEEP_FILE, Grid, Point, read_axis, read_grid, value_text
from ...core.topics import Topic
from ...data.store import location
from ...launch.driver.resumption import LINK, TRUST_RUN, links_outside, refuse_foreign, trust_flag
from ...launch.launchers.environments import detect, step_tasks
from ...launch.launchers.registry import takes_option
from ...launch.sweep_folder import Entry, Request, SweepFolder, check_free, read_request
from ...launch.sweep_runner import point_arguments, run_points
from ...models.build import canonical_model, written_out
from ...records.store.jsonl import finite_json
from ...records.store.run_directory import RunReader, name_part
from ...report.analysis.conclusion import conclude
from ...report.analysis.sentences import as_text as conclusion_as_text
from ...report.analysis.sentences import closing_text, render_conclusion
from ...report.compare.comparison import compare_runs, setting_name
from ...report.compare.factors import BY_FIELD, Factor, natural
from ...report.compare.formats import as_text
from ...report.runs.columns import row
from ...report.runs.locate import find_sweep
from ...report.runs.run import Run, finished_run
from ..group import GroupedCommand, topic_option
from ..options import IntegerRange, given_options, job_options, name_settings, trust_option
from ..streams import output_is_a_copy


def points_conclusion(points: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return the conclusion of some points' runs as JSON, None for fewer than two."""
    settings = dict(points)
    if not settings:
        return None
    conclusion = conclude([finished_run(path) for path in settings], _axes(_swept_settings(settings)))
    return conclusion.to_json(render_conclusion(conclusion).sentences) if conclusion.is_conclusive else None


def points_text(
    points: Sequence[tuple[Path, Mapping[str, Any]]], *, repeats: bool, width: int | None, height: int = 0, tables: bool = True
) -> str:
    """Return a conclusion and, with `tables`, a row per point; with `repeats` seeds share a row."""
    settings = dict(points)
    by = [rule for rule in _swept_settings(settings) if not (repeats and rule.key == "seed")]
    axes = _axes(by)
    comparison = compare_runs([finished_run(path) for path in settings], fold=repeats, by=by, by_confounds=True)
    conclusion = conclude(comparison.runs, axes)
    words = render_conclusion(conclusion) if conclusion.is_conclusive else None
    text = "" if words is None else conclusion_as_text(words, width)
    if tables or words is None or len(comparison.entries) == 1:
        text += as_text(comparison, layout="rows", width=width)
        confounding = [fault.key for fault in comparison.comparability.faults if fault.confounds and fault.key in {rule.key for rule in by}]
        if confounding:
            text += f"\n`trainer compare --by {','.join(confounding)}` takes that for what is compared, and marks nothing for it."
    return text + ("" if words is None or text.count("\n") < height else closing_text(words, width))


def _swept_settings(settings: Mapping[Path, Mapping[str, Any]]) -> list[Factor]:
    return [_factor_of_setting(name, settings) for name in dict.fromkeys(name for values in settings.values() for name in values)]


def _axes(swept: Sequence[Factor]) -> list[Factor]:
    return [rule for rule in swept if rule.key != "seed"]


def _factor_of_setting(field: str, settings: Mapping[Path, Mapping[str, Any]]) -> Factor:

    def value(run: Run) -> Any:
        swept_value = settings[run.path].get(field)
        return tuple(swept_value) if isinstance(swept_value, list) else swept_value

    return Factor(setting_name(field), field, value, NOTHING, "", True, show=value_text, order=BY_FIELD.get(field, natural))


@click.command("sweep", cls=GroupedCommand, short_help="Run a parameter sweep and compare the results.")
@click.argument("config", required=False, metavar="[CONFIG]")
@topic_option(
    Topic.COMMON,
    "--grid",
    "grids",
    multiple=True,
    metavar="FIELD=VALUE,…",
    help="Values of a setting to sweep; several of these give all combinations. Replaces the axis of that name in the file. "
    "Separate values that contain commas by semicolons: 'cores_per_node=1,1;1,0.5'.",
)
@topic_option(
    Topic.COMMON, "--repeats", type=IntegerRange(1, MAX_REPEATS), metavar="N", help="Run each point with N seeds, from --seed on."
)
@topic_option(Topic.COMMON, "--name", "sweep_name", metavar="TEXT", help="Name of the sweep's folder; given again, the sweep resumes.")
@topic_option(
    Topic.CHECKPOINTS,
    "--resume",
    metavar="FOLDER|NAME",
    help="Resume the sweep in this folder, or of this name below runs, with its settings.",
)
@trust_option("With --resume: trust")
@topic_option(Topic.OUTPUT, "--dry-run", is_flag=True, help="Show the points and their commands, and exit.")
@topic_option(Topic.OUTPUT, "--tables", is_flag=True, help="Print the tables of all points at the end as well, not the conclusion alone.")
@topic_option(Topic.OUTPUT, "--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@topic_option(Topic.OUTPUT, "--quiet", is_flag=True, help="Print no progress on standard error.")
@job_options(without=("name",))
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    config: str | None,
    grids: tuple[str, ...],
    repeats: int | None,
    sweep_name: str | None,
    resume: str | None,
    trust_run: bool,
    dry_run: bool,
    tables: bool,
    as_json: bool,
    quiet: bool,
    **_options: Any,
) -> int:
    """Run a parameter sweep, one `trainer run` per point in sequence, and print the conclusion.

    CONFIG is a TOML file or the name of a shipped one; it may have its own grid in a table [sweep]. Every other setting of
    `trainer run` is accepted and applies to every point. All points are checked before the first one starts.

    A failed point is recorded, and the next one runs; the exit code is then 1. With the same --name again, or with --resume, successful
    points are kept, runs with a checkpoint resume from it, and the others run.
    """
    name_settings(dict.fromkeys(Job.model_fields, "flag"))
    flags = given_options(ctx)
    if trust_run and resume is None:
        raise UsageError(f"{TRUST_RUN}: belongs to --resume")
    if resume is not None:
        if config is not None or grids or repeats is not None or sweep_name is not None or flags:
            raise UsageError("--resume: takes CONFIG, grid and settings from the folder; give it alone")
        folder = _sweep_folder(resume)
        request = read_request(folder)
        for settings in ({LINK: next(links_outside(folder), None)}, *request.settings()):
            refuse_foreign(settings, folder, (), trusted=trust_run)
        points = request.plan(os.environ)
    else:
        flags.pop("out", None)
        flags = _write_out_names(flags)
        lasting = config if config is None or config in shipped() else os.path.realpath(config)
        request = Request(lasting, flags, make_grid(config, grids, repeats))
        points = request.plan(os.environ)
        out = Path(ctx.params["out"]) if ctx.params["out"] is not None else points[0].job.out
        folder = out / _folder_name(sweep_name, config, points[0].job)
    _refuse_elsewhere(points)
    _refuse_unknown(points)
    if not quiet:
        _note_idle(points, request)
        _note_unequal_budgets(points)
    if dry_run:
        check_free(folder)
        _print_plan(points, request, folder, as_json=as_json)
        return 0
    output_is_a_copy()
    with SweepFolder(folder, request, points, ["trainer", *(ctx.obj or ())]) as opened:
        finished = run_points(opened, note, quiet=quiet)
        _print_outcome(opened, tables=tables, as_json=as_json)
        return _verdict(opened, finished)


def _sweep_folder(text: str) -> Path:
    out = Path(os.environ.get("TRAINER_OUT") or "runs")
    folder = find_sweep(text, out)
    if folder is None:
        raise UsageError(f"sweep: {text!r} is not the folder of a sweep, nor the name of one in {str(out)!r} (neither has a {SWEEP_FILE}).")
    return folder


def _write_out_names(flags: Mapping[str, Any]) -> dict[str, Any]:
    lasting = dict(flags)
    for name in ("data_dir", "initial_weights"):
        if name in flags:
            lasting[name] = str(location.whole_path(Path(flags[name])))
    if ":" in flags.get("data", ""):
        lasting["data"] = location.resolve(flags["data"]).name
    if "model" in flags:
        lasting["model"] = canonical_model(flags["model"])
    return lasting


def make_grid(config: str | None, grids: Sequence[str], repeats: int | None) -> Grid:
    """Return the grid of the command line merged over that of the file."""
    axes: dict[str, Sequence[Any]] = {}
    for text in grids:
        name, values = read_axis(text)
        if name in axes:
            raise UsageError(f"--grid: {name} is given twice; write all its values in one")
        axes[name] = values
    typed = Grid(axes, (), repeats)
    return typed.merged_over(read_grid(config)) if config is not None else typed.checked()


def _folder_name(name: str | None, config: str | None, job: Job) -> str:
    if name is None:
        stem = Path(config).stem if config is not None else name_part(job.model)
        return f"{datetime.now():%Y%m%d-%H%M%S}-{stem}-sweep-{secrets.token_hex(2)}"
    resolve({"name": name}, {})  # the job's rules for a folder name
    return name


def _note_idle(points: Sequence[Point], request: Request) -> None:
    requirements: dict[str, list[Requirement]] = {}
    for point in points:
        for name, needed in idle_settings(point.job.model_dump()).items():
            if name in request.flags or name in point.settings:
                requirements.setdefault(name, []).append(needed)
    for name, without in requirements.items():
        note(f"{name}: does nothing in {len(without)} of {len(points)} points; it belongs to {requirement_flags(without[0])}")


def _note_unequal_budgets(points: Sequence[Point]) -> None:
    amounts_by_mode: dict[str, set[int]] = {}
    for job in (point.job for point in points if point.job.batch_tokens is None):
        if job.steps is not None:
            amounts_by_mode.setdefault(job.mode, set()).add(job.steps * job.update_batch)
    every = set().union(*amounts_by_mode.values())
    if len(amounts_by_mode) > 1 and len(every) > 1:
        texts = {mode: " or ".join(f"{amount:,}" for amount in sorted(amounts)) for mode, amounts in amounts_by_mode.items()}
        note(
            f"--steps: so many updates are {texts['sync']} examples in sync mode, as each is of all workers' batches, and {texts['async']} "
            f"in async mode, as each is of one worker's; --examples {max(every)} gives every point as many"
        )


def _refuse_elsewhere(points: Sequence[Point]) -> None:
    rendezvous, rank = os.environ.get("TRAINER_RENDEZVOUS"), os.environ.get("TRAINER_NODE_RANK")
    follows = any(point.job.launcher == "auto" for point in points)
    if rendezvous or rank or (follows and detect(os.environ, None, None, None)):
        raise UsageError("sweep: starts runs on nodes of its own; it goes neither with torchrun, TF_CONFIG nor a rendezvous")
    for option in resolve_personal(("hosts", "hostfile"), {}, os.environ).values():
        if any(takes_option(point.job.launcher, option.option.name) for point in points):
            remedy = "give --launcher local" if option.is_from_file else f"unset {option.option.variable}, or give --launcher local"
            raise UsageError(f"sweep: starts runs on nodes of this machine, and {option.key} names hosts for them; {remedy}")
        if not option.is_from_file:
            note(f"{option.option.variable}: the sweep has its nodes elsewhere, and nothing uses it")
    if follows and (tasks := step_tasks(os.environ)) > 1:
        raise UsageError(
            f"sweep: Slurm started {tasks} of these processes in one step, and each would do all of it; type: srun --ntasks 1 …"
        )


def _refuse_unknown(points: Sequence[Point]) -> None:
    known: set[tuple[Any, ...]] = set()
    for number, point in enumerate(points, start=1):
        job = point.job
        if (names := (job.model, job.data, job.data_dir, job.vocabulary)) not in known:
            try:
                written_out(job)
            except UsageError as error:
                raise UsageError(f"point {number} of {len(points)} ({point.text}): {error}") from error
            known.add(names)


def _print_plan(points: Sequence[Point], request: Request, folder: Path, *, as_json: bool) -> None:
    commands = [["trainer", *point_arguments(Entry(point), request, folder)] for point in points]
    if as_json:
        rows = [{"name": point.name, "settings": point.settings, "command": typed} for point, typed in zip(points, commands, strict=True)]
        click.echo(json_text({"path": str(folder), "points": rows}, indent=1))
        return
    click.echo("\n".join(shlex.join(command) for command in commands))


def _print_outcome(sweep: SweepFolder, *, tables: bool, as_json: bool) -> None:
    summaries = [RunReader(sweep.run_path(entry)).summary() if entry.state == "succeeded" else None for entry in sweep.entries]
    done = [(sweep.run_path(entry), entry.point.settings) for entry in sweep.entries if entry.state == "succeeded"]
    if not as_json:
        width, height = shutil.get_terminal_size() if sys.stdout.isatty() else (None, 0)
        repeats = sweep.request.grid.repeats is not None
        text = points_text(done, repeats=repeats, width=width, height=height, tables=tables) if done else "no point succeeded"
        click.echo(text.rstrip("\n"))
        click.echo(f"sweep: {sweep.path}")
        if len(done) > 1 and not tables:
            click.echo(f"tables: trainer compare {shlex.quote(str(sweep.path))}")
        return
    rows = [
        {
            "name": entry.point.name,
            "settings": entry.point.settings,
            "state": entry.state,
            "cause": entry.cause,
            "path": str(sweep.run_path(entry)),
            "summary": None if summary is None else row(summary),
        }
        for entry, summary in zip(sweep.entries, summaries, strict=True)
    ]
    document = {"path": str(sweep.path), "conclusion": points_conclusion(done), "points": rows}
    click.echo(json_text(finite_json(document), indent=1))


def _verdict(sweep: SweepFolder, finished: bool) -> int:
    remedy = f"To go on: trainer sweep --resume {shlex.quote(str(sweep.path))}{trust_flag(*sweep.request.settings())}"
    missing = [entry for entry in sweep.entries if entry.state != "succeeded"]
    if not finished:
        raise InterruptedRunError(f"interrupted by the user; {len(missing)} of {len(sweep.entries)} points are missing. {remedy}")
    if missing:
        causes = "; ".join(f"{entry.point.name} ({entry.cause})" for entry in missing)
        raise RunFailedError(f"{len(missing)} of {len(sweep.entries)} points did not succeed: {causes}. {remedy}")
    return 0
