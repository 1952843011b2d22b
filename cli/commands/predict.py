"""``trainer predict``: the time of a step on other nodes and links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click

from ...core.console import json_text, note
from ...core.errors import UsageError
from ...core.units import parse_bandwidth
from ...records.store.jsonl import finite_json
from ...report.analysis.cost_model import Exchange, Link, Topology
from ...report.analysis.fit import Observed, fit, observe
from ...report.analysis.predictions import Question, Scaling, document, read_validation, render_predictions
from ...report.analysis.predictions import predict as predicted
from ...report.compare.run_tables import to_text
from ...report.runs.locate import find_run
from ...report.runs.run import Run, diverged, labelled
from ..options import IntegerRange, check_choice, name_settings, out_option
from ..streams import echo_wrapped

DEFAULT_NODES = (1, 2, 4, 8, 64, 512)
MAX_NODES = 65536
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@click.command(short_help="Predict scaling to other numbers of nodes and other links.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN…]")
@click.option(
    "--nodes",
    metavar="N[,N…]",
    help="Numbers of nodes to predict [default: 1,2,4,8,64,512 and the runs' own numbers of nodes, without those too small for --ps].",
)
@click.option("--bandwidth", metavar="RATE", help="Speed of each node's link in each direction, such as 10gbit [default: the first run's].")
@click.option(
    "--latency", default="0s", show_default=True, metavar="TIME", help="Additional message latency compared with the runs, such as 50us."
)
@click.option("--topology", metavar="ring|ps", help="All-reduce or parameter server [default: that of the first run].")
@click.option("--exchange", metavar="native|direct", help="All-reduce of sync workers [default: that of the first sync run].")
@click.option(
    "--ps", type=IntegerRange(), metavar="N", help="Number of parameter servers, each on its own node [default: the first run's]."
)
@click.option(
    "--scaling",
    default="both",
    show_default=True,
    metavar="weak|strong|both",
    help="weak keeps each worker's batch, strong the global batch.",
)
@out_option("Folder in which to look for RUN by name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def predict(
    runs: tuple[str, ...],
    nodes: str | None,
    bandwidth: str | None,
    latency: str,
    topology: str | None,
    exchange: str | None,
    ps: int | None,
    scaling: str,
    out: Path,
    as_json: bool,
) -> None:
    """Predict how the job of finished runs would scale, from the measured cost of a step.

    Requires one finished run with calibration; a short one on two nodes, each with its own cores (--cores-per-node), is enough. A second
    run with another --bandwidth shows better how much communication overlaps with computation. The first run defines the job: model, batch,
    workers per node. The calibration after a run with native all-reduce also times the direct one, so --exchange direct can be predicted.
    """
    paths = [find_run(run, out) for run in runs]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("run: got the same run twice; the model is fitted to different ones.")
    observed = [observe(run) for run in _without_diverged(labelled([Run(path) for path in paths]))]
    chosen = _topology(topology, observed[0])
    name_settings({"ps": "flag"})
    servers = _servers(ps, observed, chosen)
    check_choice("--scaling", scaling, ("weak", "strong", "both"))
    question = Question(
        nodes=_default_nodes(servers, observed) if nodes is None else _nodes(nodes),
        link=Link(_bytes_per_second(bandwidth, observed[0]), _seconds(latency)),
        topology=chosen,
        ps=servers,
        scalings=("weak", "strong") if scaling == "both" else (cast(Scaling, scaling),),
    )
    fitted, validation = fit(observed, _exchange(exchange, chosen)), read_validation()
    rows = predicted(fitted, question, validation)
    if as_json:
        predictions: dict[str, Any] = finite_json(document(fitted, question, rows, validation))
        click.echo(json_text(predictions, indent=1))
    else:
        echo_wrapped(to_text(render_predictions(fitted, question, rows, validation)))


def _without_diverged(runs: Sequence[Run]) -> Sequence[Run]:
    lost = {run.name: since for run in runs if (since := diverged(run.summary)) is not None}
    if not lost or len(lost) == len(runs):
        return runs
    named = ", ".join(f"{name} ({since})" for name, since in lost.items())
    note(f"skipped, as their loss was not finite (NaN or infinite), so their speed is not that of training: {named}")
    return [run for run in runs if run.name not in lost]


def _default_nodes(servers: int, observed: Sequence[Observed]) -> tuple[int, ...]:
    every = sorted({*DEFAULT_NODES, *(run.nodes for run in observed)})
    return tuple(nodes for nodes in every if nodes >= servers) or tuple(every[-1:])


def _nodes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MAX_NODES for part in parts):
        raise UsageError.of("--nodes", text, f"whole numbers from 1 to {MAX_NODES} with commas between, such as 2,4,8")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _bytes_per_second(text: str | None, first: Observed) -> float | None:
    if text is None:
        return first.bytes_per_second
    try:
        return parse_bandwidth(text) / 8
    except ValueError as error:
        raise UsageError.of("--bandwidth", text, str(error)) from None


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)", text.strip().lower(), re.ASCII)
    if match is None:
        raise UsageError.of("--latency", text, "a number with ns, us, ms or s, such as 50us")
    return float(match[1]) * _TIMES[match[2]]


def _topology(text: str | None, first: Observed) -> Topology:
    if text is None:
        return "ring" if first.mode == "sync" else "ps"
    check_choice("--topology", text, ("ring", "ps"))
    return cast(Topology, text)


def _exchange(text: str | None, topology: Topology) -> Exchange | None:
    check_choice("--exchange", text, ("native", "direct"))
    if text is not None and topology == "ps":
        raise UsageError("--exchange: workers of parameter servers do not add up their gradients; it belongs to --topology ring")
    return cast(Exchange | None, text)


def _servers(count: int | None, observed: list[Observed], topology: Topology) -> int:
    if count is None:
        return next((run.ps for run in observed if run.mode == "async"), 1)
    if count < 1:
        raise UsageError.of("--ps", count, "a whole number of at least 1")
    if topology == "ring":
        raise UsageError("--ps: a ring has no parameter servers; it belongs to --topology ps")
    return count
