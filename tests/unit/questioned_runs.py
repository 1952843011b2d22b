"""Run directories written by hand, for the questions that `trainer explain` answers."""

from __future__ import annotations

import json

from click.testing import CliRunner
from run_samples import a_job, open_run

from crosstrain.cli.commands.explain import explain as command
from crosstrain.records.store.schema import Clock, StepRecord
from crosstrain.records.summary import summarise


def asked(path, *options):
    done = CliRunner().invoke(command, [str(path), *options, "--json"], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)["questions"]


def trained(out, *, state="interrupted", groups=20, total=400, nodes=1, described=None, evaluations=(), samples=(), **job):
    """Make a run of groups of 10 updates in 0.1 s; 2 s before its clock and 0.5 s after it.

    Its plan has `total` updates.
    """
    asked_for = a_job(out, **{"name": "run", "nodes": nodes, "batch_size": 10, "epochs": None, "steps": total, **job})
    writer = open_run(asked_for)
    writer.write_job({**asked_for.model_dump(mode="json"), "total_steps": total, **(described or {})})
    rate = (0.05,)
    for number in range(groups):
        losses = (1.0 / (number + 1),) * 10
        writer.step(StepRecord(10 * number, 10, 0, 0.1 * (number + 1), 0.1, 100 * nodes, losses, rate))
    for record in evaluations:
        writer.evaluation(record)
    for record in samples:
        writer.system(record)
    run_seconds = 0.1 * groups
    clock = Clock(2.0, run_seconds, run_seconds, 0.0, 0.0, run_seconds + 2.5)
    done = 10 * groups
    writer.write_summary(summarise(writer.path, clock, state=state, updates_scheduled=done, updates_applied=done, examples_per_epoch=1000))
    writer.write_status(state, exit_code=0)
    writer.close()
    return writer.path
