"""``trainer run --repeats N``: one process and run directory for each of N seeds."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from ...core.console import json_text, note
from ...core.errors import UsageError
from ...core.job import Job
from ...core.settings.personal import shown_command
from ...launch.sweep_runner import SignalsToChild, run_child
from ...records.store.jsonl import finite_json
from ...records.store.run_directory import name_part
from ...records.text import figure_text


def repeat(job: Job, arguments: Sequence[str], repeats: int, *, as_json: bool) -> int:
    """Run `arguments` once per seed, print mean and deviation, and return the exit code."""
    from ...report.compare.ratios import aggregate

    name = job.name or f"{datetime.now():%Y%m%d-%H%M%S}-{name_part(job.model)}-{job.backend}-{job.mode}-{job.nodes}n-{secrets.token_hex(2)}"
    taken = [path for path in (job.out / f"{name}-r{number}" for number in range(1, repeats + 1)) if path.exists()]
    if taken:
        raise UsageError(f"name: {taken[0].name!r} is taken in {str(job.out)!r}; give another --name")
    common = _drop_options(arguments, "--repeats")
    summaries: list[dict[str, Any]] = []
    with SignalsToChild() as signals:
        for number in range(repeats):
            seed = job.seed + number
            note(f"run {number + 1} of {repeats}: seed {seed}")
            for_seed = ["--seed", str(seed), "--name", f"{name}-r{number + 1}", "--json"]
            exit_code, output = run_child([*common, *for_seed], signals)
            if exit_code != 0:
                if number + 1 < repeats:
                    note(_describe_missing(job, arguments, name, number + 1, repeats))
                return exit_code
            summaries.append(json.loads(output))
    together = finite_json(aggregate(summaries))
    if as_json:
        click.echo(json_text({**together, "paths": [summary["path"] for summary in summaries], "summaries": summaries}, indent=2))
    else:
        click.echo(_render(together, summaries))
    return 0


def _describe_missing(job: Job, arguments: Sequence[str], name: str, begun: int, repeats: int) -> str:
    left, first_seed = repeats - begun, job.seed + begun
    last = "" if left == 1 else f" to {repeats}"
    seeds = f"seed {first_seed}" if left == 1 else f"seeds {first_seed} to {first_seed + left - 1}"
    many = ["--name", f"{name}-r{repeats}"] if left == 1 else ["--repeats", str(left), "--name", f"{name}-from-r{begun + 1}"]
    command = ["trainer", *_drop_options(arguments, "--repeats", "--seed", "--name"), "--seed", str(first_seed), *many]
    return (
        f"trainer: run {begun} of {repeats} did not succeed, and {'run' if left == 1 else 'runs'} {begun + 1}{last} ({seeds}) "
        f"{'was' if left == 1 else 'were'} not started. To start {'it' if left == 1 else 'them'}: {shlex.join(shown_command(command))}"
    )


def _drop_options(arguments: Sequence[str], *options: str) -> list[str]:
    remaining: list[str] = []
    left_out = False
    for argument in arguments:
        if left_out or argument.startswith(tuple(f"{option}=" for option in options)):
            left_out = False
        elif argument in options:
            left_out = True
        else:
            remaining.append(argument)
    return remaining


def _render(together: dict[str, Any], summaries: Sequence[dict[str, Any]]) -> str:
    lines = [f"{together['runs']} runs, seeds {summaries[0]['seed']} to {summaries[-1]['seed']}: mean ± standard deviation"]
    if together["converged"] is not None:
        lines.append(f"reached {summaries[0]['target']}: {together['converged']} of {together['runs']}")
    if together["dropped"]:
        lines.append(f"excluded as the fastest and the slowest: {', '.join(together['dropped'])}")
    for name, figure in together["figures"].items():
        if figure is not None:
            digits = _decimals(figure["mean"])
            spread = "" if figure["sigma"] is None else f" ± {figure_text(name, figure['sigma'], digits)}"
            lines.append(f"{name.replace('_', ' '):<24}{figure_text(name, figure['mean'], digits)}{spread}  (of {figure['values']})")
    if together["contended"]:
        every = len(together["contended"]) == together["runs"]
        void = "speeds and times are not their own" if every else "speeds and times are of the other runs"
        lines.append(f"CPU contention from other programs: {', '.join(together['contended'])}; {void}")
    if any(summary["synthetic"] for summary in summaries):
        from ...report.compare.run_tables import SYNTHETIC

        lines.append(SYNTHETIC)
    return "\n".join([*lines, *(f"run directory: {summary['path']}" for summary in summaries)])


def _decimals(mean: float | str) -> int:
    if isinstance(mean, str) or abs(mean) < 100:
        return 4
    return 1 if abs(mean) < 10_000 else 0
