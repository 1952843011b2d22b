"""``trainer export``: a trained model in an external format, and a list of a run's files."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from ...backends.export import PLAIN, PLAIN_FORMATS
from ...backends.loading import declared_capabilities, load_backend
from ...checkpoint import CHECKPOINTS, DamagedCheckpointError, is_checkpoint, list_checkpoints, read_checkpoint
from ...checkpoint.selection import ChosenWeights, Selection, locked_weights
from ...core.console import json_text, note
from ...core.errors import TrainerError, UsageError
from ...core.plugins import Plugin, available
from ...core.process import child_working_directory, python
from ...launch.driver.resumption import LINK, refuse_foreign
from ...launch.node.scratch import make_scratch, remove_scratch
from ...records.store.run_directory import UNKNOWN, describe_folder
from ..interrupts import TerminationAsInterrupt
from ..options import GivenPath, check_choice, check_typed_model, model_option, name_settings, trust_option
from ..run_request import find_run_or_checkpoint
from ..streams import echo_wrapped, output_is_a_copy
from ..trained_job import checkpoint_options

EXPORTS = "exports"  # default folder of a run's exports


@click.command(short_help="Export a trained model, or list a run's files.")
@click.argument("source", type=GivenPath(), metavar="RUN|CHECKPOINT")
@checkpoint_options
@model_option
@click.option(
    "--format", "format_name", metavar="NAME", help=f"{', '.join(PLAIN_FORMATS)}, or a framework's format; without it, all are listed."
)
@click.option("--output", "-o", type=GivenPath(), help="Folder to make [default: RUN/exports/STEP-FORMAT].")
@click.option("--describe", is_flag=True, help="List the files with purpose and size.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@trust_option("Trust")
def export(
    source: Path,
    selection: Selection,
    model: str | None,
    format_name: str | None,
    output: Path | None,
    describe: bool,
    as_json: bool,
    trust_run: bool,
) -> None:
    """Export a trained model to a format that needs no trainer.

    RUN is a run directory, with its newest valid checkpoint by default; CHECKPOINT is one of its checkpoints. The new folder contains a
    README that explains how to load it.
    """
    if describe == (format_name is not None):
        raise UsageError(f"--format: give one of {', '.join(_writers())}; or --describe to list the files.")
    if describe:
        for option in (*(["--model"] if model else []), *selection.given_options):
            raise UsageError(f"{option}: belongs to --format; --describe loads no model")
        _describe(source, as_json=as_json)
        return
    output_is_a_copy()
    backend = _writer(format_name or "")
    with locked_weights(find_run_or_checkpoint(source), selection) as chosen:
        for error in chosen.damaged:
            note(f"{error} Another one is taken.")
        target = output or _default_target(chosen, format_name or "")
        link = EXPORTS if output is None and target.parent.name == EXPORTS and target.parent.is_symlink() else None
        recorded = chosen.meta.job["model"]
        name_settings({"model": "flag" if model is not None else f"checkpoint {chosen.path.name}"})
        check_typed_model(model, recorded)
        taken = {"model": recorded if model is None else None, LINK: link}
        refuse_foreign(taken, chosen.path, ("model",), trusted=trust_run)
        with TerminationAsInterrupt():
            _export(chosen, format_name or "", backend, target)
    _print_result(chosen, format_name or "", target, as_json=as_json)


def _writers() -> dict[str, Plugin | None]:
    """Return the backend that writes each format, None if no framework does."""
    writers: dict[str, Plugin | None] = dict.fromkeys(PLAIN_FORMATS)
    for plugin in available("backend").values():
        try:
            formats = declared_capabilities(plugin).export_formats
        except UsageError as error:
            note(str(error))
            continue
        for name in formats:
            writers.setdefault(name, plugin)
    return writers


def _writer(name: str) -> str:
    """Return the name of the installed backend that writes a format, or `PLAIN`."""
    writers = _writers()
    check_choice("--format", name, list(writers))
    backend = writers[name]
    if backend is None:
        return PLAIN
    load_backend(backend.name)  # raises where its framework is not installed
    return backend.name


def _default_target(chosen: ChosenWeights, format_name: str) -> Path:
    name, checkpoint = f"{chosen.label}-{format_name}", chosen.path
    return checkpoint.parent.parent / EXPORTS / name if checkpoint.parent.name == CHECKPOINTS else checkpoint.with_name(name)


def _export(chosen: ChosenWeights, format_name: str, backend: str, target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError(f"--output: {str(target)!r} exists, and nothing is overwritten. Remove it or give another folder.")
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"--output: {str(target.parent)!r} cannot be written ({error.strerror}). Give another folder.") from error
    try:
        _run_exporter(backend, format_name, chosen, draft)
        draft.chmod(0o777 & ~_umask())
        draft.rename(target)
    except BaseException as error:
        free = shutil.disk_usage(target.parent).free + sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        wanted = sum(array.nbytes for array in chosen.checkpoints[0].parameters.values())
        shutil.rmtree(draft, ignore_errors=True)
        for folder in missing:
            if not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, TrainerError) and not isinstance(error, UsageError) and free < wanted:
            room = f"{str(target.parent)!r} has room for {_size(free)}; the weights alone are {_size(wanted)}."
            raise TrainerError(f"the export failed: {room} Free some space, or give another folder with --output.") from error
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _run_exporter(backend: str, format_name: str, chosen: ChosenWeights, folder: Path) -> None:
    """Export in a separate process, whose output is shown only if it fails."""
    scratch = make_scratch()
    error = scratch / "error"
    paths = [str(checkpoint.path) for checkpoint in chosen.checkpoints]
    written = (chosen.weights, str(folder), str(error), str(os.getpid()), *paths)
    command = python("crosstrain.backends.export", backend, format_name, *written)
    try:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=child_working_directory())
        message = error.read_text(encoding="utf-8") if error.exists() else ""
    finally:
        remove_scratch(scratch)
    if done.returncode == 0:
        return
    if message and done.returncode == UsageError.exit_code:
        raise UsageError(message)
    tail = "\n".join(f"  {line}" for line in (message or done.stderr.strip()).splitlines()[-15:])
    raise TrainerError(f"the export failed (exit code {done.returncode}); its last output:\n{tail}")


def _print_result(chosen: ChosenWeights, format_name: str, target: Path, *, as_json: bool) -> None:
    sizes = {path.relative_to(target).as_posix(): path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file()}
    if as_json:
        files = [{"path": name, "bytes": size} for name, size in sizes.items()]
        fields = {"path": str(target), "format": format_name, "checkpoint": str(chosen.path), "step": chosen.meta.step}
        fields |= {"averaged_checkpoints": chosen.averaged, "weights": chosen.weights}
        click.echo(json_text({**fields, "files": files}, indent=1))
        return
    click.echo(f"{target}  ({format_name}, {chosen.meta.step:,} updates, {_size(sum(sizes.values()))} in {len(sizes)} files)")


def _describe(source: Path, *, as_json: bool) -> None:
    source = source if source.is_dir() else find_run_or_checkpoint(source)
    rows = describe_folder(source)
    if all(row.purpose == UNKNOWN for row in rows):
        raise UsageError(f"export: {str(source)!r} has no file of a run, a checkpoint or an export")
    problems = _problems(source)
    if as_json:
        files = [dataclasses.asdict(row) for row in rows]
        click.echo(json_text({"path": str(source), "files": files, "bytes": sum(row.bytes for row in rows), "damaged": problems}, indent=1))
        return
    width = max((len(row.path) for row in rows), default=0)
    for row in rows:
        echo_wrapped(f"{row.path:<{width}}  {_size(row.bytes):>9}  {row.purpose}\n")
    click.echo(f"{len(rows)} files, {_size(sum(row.bytes for row in rows))}")
    for text in problems.values():
        click.echo(text)


def _problems(source: Path) -> Mapping[str, str]:
    problems: dict[str, str] = {}
    for path in [source] if is_checkpoint(source) else list_checkpoints(source):
        try:
            read_checkpoint(path)
        except DamagedCheckpointError as error:
            problems[path.name] = str(error)
    return problems


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
