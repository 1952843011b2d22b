"""``trainer models``: the models with their sizes and backends."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass

import click

from ...core.console import json_text
from ...core.errors import UsageError
from ...core.plugins import Plugin, available, load
from ...core.settings.job_fields import schema
from ...data.base import DataInfo, TextFeatures
from ...data.columns import ColumnSpec
from ...data.store.stored_dataset import open_dataset
from ...models.build import SIZE, Argument, arguments_of, build_model

PIECES = 8000  # vocabulary for the sizes of sequence models
TEXT = DataInfo(
    f"text of {PIECES:,} pieces",
    {"train": 1, "test": 1},
    tuple(ColumnSpec(name, "uint16", (None,)) for name in ("source", "target")),
    TextFeatures({"source": PIECES, "target": PIECES}),
)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model with its size and backends."""

    name: str
    description: str  # empty if the model does not load
    parameters: int | None  # None: see `problem`
    parameters_data: str  # dataset of that size; for sequence models text of `PIECES` pieces
    backends: tuple[str, ...]
    problem: str | None = None
    arguments: tuple[str, ...] = ()


@click.command("models", short_help="Show the models and the backends they run on.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
def models(as_json: bool) -> None:
    """Show models with their sizes and backends.

    Sizes are for the default dataset, or for text if a model reads sequences.
    """
    rows = describe_models()
    click.echo(json_text([asdict(row) for row in rows], indent=2) if as_json else "\n".join(map(_line, rows)))


def describe_models() -> list[ModelRow]:
    """Describe all models; a broken one has its problem."""
    data = open_dataset(schema("data")["default"]).info
    return [_row(plugin, data) for plugin in available("model").values()]


def _row(plugin: Plugin, data: DataInfo) -> ModelRow:
    backends = tuple(key.split("/")[1] for key in available("forward") if key.split("/")[0] == plugin.name)
    try:
        known = arguments_of(plugin.name, load(plugin, "model"))
        arguments = tuple(_describe(argument, f"that of the {SIZE}" if SIZE in known else "the model's own") for argument in known.values())
        module = importlib.import_module(plugin.target.partition(":")[0])
        description = (module.__doc__ or "").strip().split("\n")[0]
    except UsageError as error:
        return ModelRow(plugin.name, "", None, data.name, backends, str(error))
    problems = []
    for info in (data, TEXT):
        try:
            return ModelRow(plugin.name, description, build_model(plugin.name, info).size, info.name, backends, arguments=arguments)
        except UsageError as error:
            problems.append(str(error))
    return ModelRow(plugin.name, description, None, data.name, backends, problems[0], arguments)


def _describe(argument: Argument, without_default: str) -> str:
    default = without_default if argument.default is None else argument.write(argument.default)
    return f"{argument.name}: {argument.allowed} [default: {default}]"


def _line(row: ModelRow) -> str:
    if not row.description and row.problem:
        return f"{row.name:<12}unusable: {row.problem}"
    size = f"not for {row.parameters_data}: {row.problem}" if row.problem else f"{row.parameters:,} parameters on {row.parameters_data}"
    line = f"{row.name:<12}{row.description} {size}; backends: {', '.join(row.backends)}"
    return "\n".join([line, *(f"{'':<12}  {argument}" for argument in row.arguments)])
