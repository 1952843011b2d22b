"""``trainer data list | prepare | info | verify | remove``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ...core.console import json_text, one_line
from ...core.errors import DamagedStoreError
from ...data.base import DataInfo, TextFeatures
from ...data.store import dataset_list, stored_dataset
from ...data.store.dataset_list import described, distinct_test_pairs, find_stores, remove_store
from ...data.store.location import cache_root, full_name, whole_path
from ...report.compare.cells import holds_figures, plain_lines
from ..options import GivenPath, IntegerRange, name_settings
from ..streams import output_is_a_copy

MAX_SHOWN = 10  # elements of a list that `trainer data info` shows; its JSON has all


@click.group()
def data() -> None:
    """List, prepare, verify and remove datasets."""


_data_dir_option = click.option(
    "--data-dir",
    type=GivenPath(),
    callback=lambda ctx, parameter, folder: None if folder is None else whole_path(folder),
    help="Folder with the dataset's original files.",
)
_vocabulary_option = click.option(
    "--vocabulary", type=IntegerRange(2, 65_535), help="Text: vocabulary size; it becomes part of the dataset's name."
)


@data.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_command(as_json: bool) -> None:
    """List all datasets, and which of them are prepared."""
    rows = dataset_list.list_datasets()
    if as_json:
        click.echo(json_text({"cache": str(cache_root()), "datasets": [asdict(row) for row in rows]}, indent=2))
        return
    table = [("NAME", "PREPARED", "TRAIN", "TEST", "SIZE", "DESCRIPTION")]
    table += [
        (row.name, "yes" if row.prepared else row.begun or "no", _count(row.train), _count(row.test), _size(row.bytes), _description(row))
        for row in rows
    ]
    columns = [[one_line(cell) for cell in column] for column in zip(*table, strict=True)]
    for line in plain_lines(columns, [holds_figures(column[1:]) for column in columns]):
        click.echo(line)
    click.echo(f"\nPrepared datasets lie in {cache_root()}.")


@data.command("prepare")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_data_dir_option
@_vocabulary_option
@click.option("--again", is_flag=True, help="Rebuild the dataset even if it is already prepared.")
def prepare_command(names: Sequence[str], data_dir: Path | None, vocabulary: int | None, again: bool) -> None:
    """Prepare datasets, so that runs can start at once."""
    output_is_a_copy()
    name_settings({"data_dir": "flag", "vocabulary": "flag"})
    for name in names if vocabulary is None else [full_name(name, data_dir, vocabulary) for name in names]:
        stored_dataset.prepare(name, data_dir, again)
        opened = stored_dataset.open_dataset(name, data_dir)
        sizes, synthetic = opened.info.sizes, " (synthetic)" if opened.info.synthetic else ""
        click.echo(one_line(f"{name}: {sizes['train']:,} + {sizes['test']:,} {_examples(opened.info)}{synthetic} in {opened.path}"))
        distinct = distinct_test_pairs(opened)
        if distinct is not None and distinct < sizes["test"]:
            click.echo(f"  of the {sizes['test']:,} test pairs {distinct:,} are distinct")
        for line in opened.left_out:
            click.echo(f"  skipped: {line}")


@data.command("info")
@click.argument("name", metavar="NAME")
@_data_dir_option
@_vocabulary_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def info_command(name: str, data_dir: Path | None, vocabulary: int | None, as_json: bool) -> None:
    """Describe a dataset: examples, shapes and classes, or languages, lengths and vocabulary.

    Prepares it if necessary.
    """
    name_settings({"data_dir": "flag", "vocabulary": "flag"})
    name = name if vocabulary is None else full_name(name, data_dir, vocabulary)
    facts = described(stored_dataset.open_dataset(name, data_dir))
    if as_json:
        click.echo(json_text(facts, indent=2))
        return
    for key, value in facts.items():
        rows = [(f"{key} {part}", fact) for part, fact in value.items()] if isinstance(value, dict) else [(key, value)]
        for label, fact in rows:
            click.echo(one_line(f"{label.replace('_', ' '):30}{_render_value(fact)}"))


@data.command("verify")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify_command(names: Sequence[str], as_json: bool) -> None:
    """Verify the sha256 of every file of prepared datasets; without a name, of all.

    Exits with 1 and names the file if one is damaged.
    """
    chosen = names or list(dict.fromkeys(row.name.partition(":")[0] for row in dataset_list.list_datasets() if row.prepared))
    reports = [report for name in chosen for report in stored_dataset.verify(name)]
    if as_json:
        documents = [
            {"name": report.name, "path": report.path, "ok": not report.damaged, "files": [asdict(check) for check in report.files]}
            for report in reports
        ]
        click.echo(json_text({"ok": not any(report.damaged for report in reports), "stores": documents}, indent=2))
    else:
        for report in reports:
            state = "damaged" if report.damaged else f"{len(report.files)} files as they should be"
            click.echo(one_line(f"{report.name}: {state} ({report.path})"))
        if not reports:
            click.echo("No dataset is prepared yet.")
    _raise_for_damage(reports)


@data.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def remove_command(names: Sequence[str]) -> None:
    """Remove prepared datasets.

    Includes those of earlier versions and interrupted preparations. Original files stay; a run prepares its dataset again.
    """
    output_is_a_copy()
    stores = {folder: name for name in names for folder in find_stores(name)}  # all are known before one is removed
    for folder, name in stores.items():
        begun = "" if folder.exists() else "what an interrupted preparation left of "
        click.echo(one_line(f"{name}: removed {begun}{folder} ({_size(remove_store(folder))})"))


def _raise_for_damage(reports: Iterable[stored_dataset.StoreReport]) -> None:
    lines = [
        f"data: the store of {report.name!r} in {report.path!r} is damaged: {check.name} {check.problem}. "
        f"Make it again with: {report.remedy}"
        for report in reports
        for check in report.damaged
    ]
    if lines:
        raise DamagedStoreError("\n".join(lines))


def _render_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        more = f" and {len(value) - MAX_SHOWN:,} more" if len(value) > MAX_SHOWN else ""
        return f"{', '.join(map(str, value[:MAX_SHOWN]))}{more}" or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _examples(info: DataInfo) -> str:
    if not isinstance(info.features, TextFeatures) or not info.features.languages:
        return "examples"
    return f"pairs ({'-'.join(info.features.languages)}, {max(info.features.vocabulary_sizes.values()):,} pieces)"


def _description(row: dataset_list.DatasetStatus) -> str:
    origin = f" [from {row.data_dir}]" if row.data_dir else ""
    synthetic = " [synthetic]" if row.synthetic else ""
    text = f" [{'-'.join(row.languages)}, {row.pieces:,} pieces]" if row.languages and row.pieces else ""
    shown = f"skipped: {'; '.join(row.left_out)}" if row.languages else f"damaged files skipped: {len(row.left_out)}"
    left_out = f" [{shown}]" if row.left_out else ""
    problem = f" [problem: {row.problem}]" if row.problem else ""
    return f"{row.description}{text}{origin}{synthetic}{left_out}{problem}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:.1f} MB"
