"""``trainer models`` lists models; ``trainer models check`` compares frameworks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from ...core.console import json_text
from ...core.errors import UsageError
from ...core.plugins import Plugin, available, load
from ...core.settings.job_fields import schema
from ...data.base import DataInfo, TextFeatures
from ...data.columns import ColumnSpec
from ...data.store.location import whole_path
from ...data.store.stored_dataset import open_dataset
from ...lockstep.layer_check import LayerCheck, check_layers
from ...lockstep.text import line_of_layer
from ...models.build import SIZE, Argument, arguments_of, build_model, canonical_model
from ...models.check.agreement import Agreement, OnFramework, compare, compared_backends, keep
from ...models.check.passes import TIMED_EXAMPLES
from ...records.store.jsonl import finite_json
from ...records.text import seconds_text
from ..options import GivenPath, name_settings

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


@click.group("models", invoke_without_command=True, short_help="Show the models and the backends they run on, or check one.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """Show models with their sizes and backends.

    Sizes are for the default dataset, or for text if a model reads sequences.
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"--json: write it after {ctx.invoked_subcommand}", ctx)
        return
    rows = describe_models()
    click.echo(json_text([asdict(row) for row in rows], indent=2) if as_json else "\n".join(map(_line, rows)))


@models.command("check", short_help="Check that a model computes the same on every framework.")
@click.argument("model", metavar="MODEL")
@click.option(
    "--data", metavar="NAME", help="Dataset; a few of its examples are computed.", default=schema("data")["default"], show_default=True
)
@click.option("--data-dir", type=GivenPath(), help="Folder with the dataset's original files.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
def check_command(model: str, data: str, data_dir: Path | None, as_json: bool) -> int:
    """Compute a few examples on each installed framework, and compare results and gradients.

    Each layer is also computed by itself, forward and backward, and judged against float64. Also measures what carrying out the model
    costs a training step, where there is something to compare with. Ends with 1 if frameworks differ or one of them cannot compute the
    model, and says where the difference begins.
    """
    name_settings({"data": "flag", "data_dir": "flag"})
    folder = None if data_dir is None else whole_path(data_dir)
    model = canonical_model(model)
    spec = build_model(model, open_dataset(data, folder).info)
    backends = sorted(compared_backends(model), key=lambda backend: spec.method(backend) != "native")
    if not backends:
        raise UsageError(f"model: {model!r} runs on no installed framework. See: trainer backends")
    agreement = compare(model, data, folder, spec, backends, timed=True)
    keep(spec, agreement)
    running = [part.backend for part in agreement.frameworks if part.problem is None]
    layers = check_layers(model, data, folder, running)
    sound = agreement.is_sound and not layers.findings
    document = finite_json({**asdict(agreement), "layers": msgspec.to_builtins(layers), "sound": sound})
    click.echo(json_text(document, indent=2) if as_json else "\n".join(_lines(agreement, layers)))
    return 0 if sound else 1


def _lines(agreement: Agreement, layers: LayerCheck) -> Iterator[str]:
    yield f"{agreement.model} on {agreement.data}"
    for part in agreement.frameworks:
        yield f"{part.backend:<12}{part.method}, {part.problem or _speed(part)}"
        if part.graph_problem is not None:
            yield f"{'':<12}not compared in float64: {part.graph_problem}"
    for difference in agreement.differences:
        names, verdict = f"{difference.first} and {difference.second}", "agree" if difference.agrees else "DIFFER"
        share = f"{difference.relative:.1e} of the norm (at most {difference.tolerance:g})"
        yield f"{names}, {difference.precision}: {difference.what} {verdict}: {share}"
    if agreement.begins is not None:
        yield f"The difference begins at {agreement.begins.text}."
    if layers.problem is not None:
        yield f"Layer by layer: not compared, as {layers.problem}."
    elif not layers.findings:
        count = len({row.layer for row in layers.rows})
        yield f"Layer by layer, float32: {len(layers.rows):,} tensors of {count} layers differ from float64 by rounding alone."
    yield from (f"Layer by layer, float32: {line_of_layer(finding)}" for finding in layers.findings)
    if len(agreement.frameworks) < 2:
        yield "Nothing to compare with: no other framework is installed or has this model."


def _speed(part: OnFramework) -> str:
    if part.step_seconds is None:
        return "not timed"
    cost = "there is no other form of it to compare with" if part.cost is None else f"{part.cost:.2f} × the CPU time of the model by itself"
    return f"a training step of {TIMED_EXAMPLES} examples on one thread {seconds_text(part.step_seconds)}; {cost}"


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
