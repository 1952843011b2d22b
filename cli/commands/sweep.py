"""``trainer sweep``: one job at many settings, a run for each, and their figures side by side."""

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

from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.settings.config_files import shipped
from ...core.settings.ineffective import Requirement, idle_settings
from ...core.settings.personal import resolve_personal
from ...core.settings.sources import resolve
from ...core.settings.sweeps import MOST_REPEATS, SWEEP_FILE, Grid, Point, read_axis, read_grid
from ...core.topics import Topic
from ...core.untrusted.console import json_text, note
from ...launch.environments.detect import detect
from ...launch.environments.slurm_step import step_tasks
from ...launch.launchers.registry import takes_option
from ...launch.resume.trust import LINK, TRUST_RUN, links_outside, refuse_foreign, trust_flag
from ...launch.sweeps.folder import Entry, Request, SweepFolder, check_free, read_request
from ...launch.sweeps.runner import point_arguments, run_points
from ...records.store.jsonl import finite_json
from ...records.store.run_directory import RunReader, name_part
from ...report.catalog.locate import find_sweep
from ...report.catalog.summary_rows import row
from ..grouped_help import GroupedCommand, topic_option
from ..options import IntegerRange, given_options, job_options_without, name_settings, trust_option
from ..streams import output_is_a_copy
from .sweep_table import points_conclusion, points_text

__all__ = ["make_grid", "sweep"]


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
    Topic.COMMON, "--repeats", type=IntegerRange(1, MOST_REPEATS), metavar="N", help="Run each point with N seeds, from --seed on."
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
@job_options_without(("name",))
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
        flags = _lasting_names(flags)
        request = Request(_lasting(config), flags, make_grid(config, grids, repeats))
        points = request.plan(os.environ)
        out = Path(ctx.params["out"]) if ctx.params["out"] is not None else points[0].job.out
        folder = out / _folder_name(sweep_name, config, points[0].job)
    _refuse_elsewhere(points)
    _refuse_unknown(points)
    if not quiet:
        _tell_idle(points, request)
        _tell_unequal(points)
    if dry_run:
        check_free(folder)
        _print_plan(points, request, folder, as_json=as_json)
        return 0
    output_is_a_copy()
    with SweepFolder(folder, request, points, ["trainer", *(ctx.obj or ())]) as opened:
        finished = run_points(opened, note, quiet=quiet)
        _print_outcome(opened, tables=tables, as_json=as_json)
        return _verdict(opened, finished)


def _sweep_folder(given: str) -> Path:
    """Return the folder of a sweep: a path, or a name below the folder of runs (TRAINER_OUT, by default ``runs``)."""
    out = Path(os.environ.get("TRAINER_OUT") or "runs")
    found = find_sweep(given, out)
    if found is None:
        raise UsageError(
            f"sweep: {given!r} is not the folder of a sweep, nor the name of one in {str(out)!r} (neither has a {SWEEP_FILE})."
        )
    return found


def _lasting(config: str | None) -> str | None:
    """Return a shipped configuration by name, any other by its full path, so that the sweep can go on from elsewhere."""
    return config if config is None or config in shipped() else os.path.realpath(config)


def _lasting_names(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Name the model, the data and its folder so that the sweep can go on from elsewhere."""
    from ...data.store.resolve import resolve as resolve_data
    from ...data.store.resolve import whole_path
    from ...models.build import canonical_model

    found = dict(flags)
    if "data_dir" in flags:
        found["data_dir"] = str(whole_path(Path(flags["data_dir"])))
    if ":" in flags.get("data", ""):
        found["data"] = resolve_data(flags["data"]).name
    if "model" in flags:
        found["model"] = canonical_model(flags["model"])
    return found


def make_grid(config: str | None, grids: Sequence[str], repeats: int | None) -> Grid:
    """Lay the grid of the command line over that of the file."""
    axes: dict[str, Sequence[Any]] = {}
    for text in grids:
        name, values = read_axis(text)
        if name in axes:
            raise UsageError(f"--grid: {name} is given twice; write all its values in one")
        axes[name] = values
    own = Grid(axes, (), repeats)
    return own.over(read_grid(config)) if config is not None else own.checked()


def _folder_name(given: str | None, config: str | None, job: Job) -> str:
    if given is None:
        stem = Path(config).stem if config is not None else name_part(job.model)
        return f"{datetime.now():%Y%m%d-%H%M%S}-{stem}-sweep-{secrets.token_hex(2)}"
    resolve({"name": given}, {})  # the rules for a folder's name are the job's
    return given


def _tell_idle(points: Sequence[Point], request: Request) -> None:
    """Say which settings of the command line and the grid do nothing, and in how many points; those of a file are told by each run."""
    found: dict[str, list[Requirement]] = {}
    for point in points:
        for name, needed in idle_settings(point.job.model_dump()).items():
            if name in request.flags or name in point.settings:
                found.setdefault(name, []).append(needed)
    for name, without in found.items():
        note(f"{name}: does nothing in {len(without)} of {len(points)} points; it belongs to {without[0].flags()}")


def _tell_unequal(points: Sequence[Point]) -> None:
    """Say where so many updates are other amounts of work in either mode: of the global batch, or of one worker's."""
    found: dict[str, set[int]] = {}
    for job in (point.job for point in points if point.job.batch_tokens is None):
        if job.steps is not None:
            found.setdefault(job.mode, set()).add(job.steps * (job.global_batch if job.mode == "sync" else job.per_worker_batch))
    every = set().union(*found.values())
    if len(found) > 1 and len(every) > 1:
        told = {mode: " or ".join(f"{amount:,}" for amount in sorted(amounts)) for mode, amounts in found.items()}
        note(
            f"--steps: so many updates are {told['sync']} examples in sync mode, as each is of all workers' batches, and {told['async']} "
            f"in async mode, as each is of one worker's; --examples {max(every)} gives every point as many"
        )


def _refuse_elsewhere(points: Sequence[Point]) -> None:
    """A sweep starts its nodes itself; where torchrun, TF_CONFIG or a rendezvous decides about them, it cannot."""
    rendezvous, rank = os.environ.get("TRAINER_RENDEZVOUS"), os.environ.get("TRAINER_NODE_RANK")
    follows = any(point.job.launcher == "auto" for point in points)
    if rendezvous or rank or (follows and detect(os.environ, None, None, None)):
        raise UsageError("sweep: starts runs on nodes of its own; it goes neither with torchrun, TF_CONFIG nor a rendezvous")
    for given in resolve_personal(("hosts", "hostfile"), {}, os.environ).values():
        if any(takes_option(point.job.launcher, given.option.name) for point in points):
            remedy = "give --launcher local" if given.of_own_file else f"unset {given.option.variable}, or give --launcher local"
            raise UsageError(f"sweep: starts runs on nodes of this machine, and {given.key} names hosts for them; {remedy}")
        if not given.of_own_file:
            note(f"{given.option.variable}: the sweep has its nodes elsewhere, and nothing uses it")
    if follows and (tasks := step_tasks(os.environ)) > 1:
        raise UsageError(
            f"sweep: Slurm started {tasks} of these processes in one step, and each would do all of it; type: srun --ntasks 1 …"
        )


def _refuse_unknown(points: Sequence[Point]) -> None:
    """Raise UsageError, which names the point, for a model or data that there is not, and a vocabulary that the data cannot have."""
    from ...models.build import written_out

    known: set[tuple[Any, ...]] = set()
    for number, point in enumerate(points, start=1):
        job = point.job
        if (asked := (job.model, job.data, job.data_dir, job.vocabulary)) not in known:
            try:
                written_out(job)
            except UsageError as error:
                raise UsageError(f"point {number} of {len(points)} ({point.text}): {error}") from error
            known.add(asked)


def _print_plan(points: Sequence[Point], request: Request, folder: Path, *, as_json: bool) -> None:
    commands = [["trainer", *point_arguments(Entry(point), request, folder)] for point in points]
    if as_json:
        rows = [{"name": point.name, "settings": point.settings, "command": typed} for point, typed in zip(points, commands, strict=True)]
        click.echo(json_text({"path": str(folder), "points": rows}, indent=1))
        return
    click.echo("\n".join(shlex.join(command) for command in commands))


def _print_outcome(sweep: SweepFolder, *, tables: bool, as_json: bool) -> None:
    summaries = [_summary(sweep, entry) for entry in sweep.entries]
    if not as_json:
        done = [(sweep.run_path(entry), entry.point.settings) for entry in sweep.entries if entry.state == "succeeded"]
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
            "summary": None if found is None else row(found),
        }
        for entry, found in zip(sweep.entries, summaries, strict=True)
    ]
    done = [(sweep.run_path(entry), entry.point.settings) for entry in sweep.entries if entry.state == "succeeded"]
    document = {"path": str(sweep.path), "conclusion": points_conclusion(done), "points": rows}
    click.echo(json_text(finite_json(document), indent=1))


def _summary(sweep: SweepFolder, entry: Entry) -> dict[str, Any] | None:
    """Return the summary of a point that succeeded."""
    return RunReader(sweep.run_path(entry)).summary() if entry.state == "succeeded" else None


def _verdict(sweep: SweepFolder, finished: bool) -> int:
    """Return 0; raises what says that points are missing, and how to go on."""
    go_on = f"To go on: trainer sweep --resume {shlex.quote(str(sweep.path))}{trust_flag(*sweep.request.settings())}"
    missing = [entry for entry in sweep.entries if entry.state != "succeeded"]
    if not finished:
        raise InterruptedRunError(f"interrupted by the user; {len(missing)} of {len(sweep.entries)} points are missing. {go_on}")
    if missing:
        causes = "; ".join(f"{entry.point.name} ({entry.cause})" for entry in missing)
        raise RunFailedError(f"{len(missing)} of {len(sweep.entries)} points did not succeed: {causes}. {go_on}")
    return 0
