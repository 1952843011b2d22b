"""A running run, written step by step as by its driver; the driver is the test's process."""

import math
import os

from report_runs import ENVIRONMENT

from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunWriter
from crosstrain.records.store.schema import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord
from crosstrain.records.summary import summarise

GROUP = 4
STEP_SECONDS = 0.05


class GrowingRun:
    """One node, updates of 50 ms and 20 examples, starting as an empty directory.

    Then `describe`, `train`, `evaluate`, `end`.
    """

    def __init__(self, out, name, **fields):
        self.job = Job.model_validate({"backend": "torch", "out": out, "name": name, "batch_size": 20, **fields})
        self.writer = RunWriter.create(self.job)
        self.path = self.writer.path
        self.step, self.seconds, self.evaluated = 0, 0.0, 0.0

    def describe(self):
        """Write what the run is, as far as that is known before it trains."""
        command = ["trainer", "run", "--backend", "torch", "--name", self.job.name]
        segment = {"started_at": "2026-05-01T10:00:00.000+00:00", "command": command, "run_seconds": 0.0}
        described = {**self.job.model_dump(mode="json"), "global_batch_size_resolved": 20, "command": command, "segments": [segment]}
        self.writer.write_job({**described, "total_steps": 400})
        self.writer.write_status("starting")
        return self

    def train(self, updates=GROUP):
        """Make updates, with a node sample after each group; the first ones start the run."""
        if self.step == 0:
            self.writer.write_env([ENVIRONMENT])
            self.writer.event(EventRecord("run_started", 0.0))
            self.writer.write_status("running")
        for _ in range(0, updates, GROUP):
            self.seconds += GROUP * STEP_SECONDS
            losses = tuple(2 * math.exp(-step / 80) for step in range(self.step, self.step + GROUP))
            self.writer.step(StepRecord(self.step, GROUP, 0, self.seconds, GROUP * STEP_SECONDS, GROUP * 20, losses, (0.05,)))
            self.step += GROUP
            self.writer.system(_sample(self.seconds))
        return self

    def evaluate(self):
        """Evaluate for half a second."""
        self.seconds += 0.5
        self.evaluated += 0.5
        accuracy = self.step / (self.step + 100)
        self.writer.evaluation(EvalRecord(self.step, 1.0, self.seconds, 0.5, "test", 360, 1 - accuracy, {"accuracy": accuracy}, self.step))
        return self

    def end(self, state="succeeded", cause=None):
        """End in this state, with a summary after a success."""
        if state == "succeeded":
            self.writer.event(EventRecord("run_ended", self.seconds))
            spent = Clock(1.0, self.seconds, self.seconds - self.evaluated, self.evaluated, 0.0, self.seconds + 2)
            figures = summarise(
                self.path, spent, state=state, updates_scheduled=self.step, updates_applied=self.step, examples_per_epoch=1000
            )
            self.writer.write_summary({**figures, "time_shares": None})
        self.writer.write_status(state, cause=cause, exit_code=0 if state == "succeeded" else 1, pid=os.getpid())
        self.writer.close()
        return self

    def close(self):
        """Let go of the files of a run that has not ended; a second call does nothing."""
        self.writer.close()


def _sample(seconds):
    return SystemRecord(
        node=0,
        time_seconds=seconds,
        interval_seconds=GROUP * STEP_SECONDS,
        cpu_seconds=seconds,
        cpu_cores_used=1.0,
        cpu_fraction=0.5,
        cores_available=2.0,
        memory_rss_bytes=300_000_000,
        memory_pss_bytes=None,
        network_source="interface",
        network_sent_bytes=round(1_000_000 * seconds),
        network_received_bytes=round(500_000 * seconds),
        interfaces=None,
        disk_read_bytes=0,
        disk_written_bytes=0,
        gpus=None,
        monitor_cpu_seconds=0.01,
    )
