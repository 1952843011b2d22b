"""A model's layers on several backends, each by itself against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends.base import State
from ..core.job import Job
from ..engine.protocol.state_transfer import state_to_arrays
from ..launch.driver.training_job import TrainingJob
from ..launch.node.scratch import make_scratch, remove_scratch
from ..records.store.lockstep_results import Finding, LayerRow
from .arrays import read
from .layers import EXAMPLES, LayerTape, UncomputedError
from .processes import LAYERS, SideProcesses, ending, layers_computed, started
from .reference import has_reference


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """What layers showed: rows have the errors of the first backend and of a further one.

    `problem`: why they were not computed.
    """

    rows: tuple[LayerRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    problem: str | None = None


def check_layers(model: str, data: str, data_dir: Path | None, backends: Sequence[str]) -> LayerCheck:
    """Compute each layer of a model's first update by itself on backends, and judge it.

    A problem says why that is impossible.
    """
    jobs = [
        Job(backend=name, model=model, data=data, data_dir=data_dir, global_batch_size=EXAMPLES, deterministic=True) for name in backends
    ]
    training = TrainingJob.from_job(jobs[0])
    if not has_reference(training.model):
        return LayerCheck(problem="the model's layers are not known one by one")
    initial = State(training.model.initial(jobs[0].seed), buffers=training.model.initial_buffers(jobs[0].seed))
    folder = make_scratch()
    try:
        files = [f"layers-{name}.arrays" for name in backends]
        sides = [SideProcesses(name, name) for name in backends]
        with ending(sides):
            tape = LayerTape(jobs[0], training.model, training.data, state_to_arrays(initial), 0, folder, sides[0])
            requests = [tape.request(job, file) for job, file in zip(jobs, files, strict=True)]
            for problem in layers_computed(started(sides, LAYERS, jobs[0].start_timeout), requests):
                if problem is not None:
                    raise UncomputedError(problem)
        results = [read(str(folder / file)) for file in files]
        findings: list[Finding] = []
        for number in range(1, len(results)) or [0]:
            names = {"A": backends[0], "B": backends[number], "": ""}
            for finding in tape.findings([results[0], results[number]], ["fp32"] * 2):
                finding.side = names[finding.side]
                findings += [finding] if finding not in findings else []
        return LayerCheck(tuple(tape.rows), tuple(findings))
    except UncomputedError as error:
        return LayerCheck(problem=str(error))
    finally:
        remove_scratch(folder)
