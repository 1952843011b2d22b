"""The real training loop with a simulated leading task that computes nothing."""

import numpy as np

from crosstrain.backends.base import EvalResult, StepResult
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.engine.loop import Outputs, Subject, TrainingLoop
from crosstrain.engine.progress import QuietProgress
from crosstrain.engine.protocol.state_transfer import PeerMemory, StateBegin, StateEnd
from crosstrain.engine.protocol.task_messages import Done, Evaluated, Steps
from crosstrain.models.objectives import CLASSIFICATION

BATCH = 8


def data_info(test_examples):
    """Return data of 64 training examples, in eight batches, and so many test examples."""
    return DataInfo.of_images("toy", {"train": 64, "test": test_examples}, ImageFeatures((1, 2, 2), 3, (0.0,), (1.0,)))


class LeadingTask:
    """Answers each command with results of `work`, its end, and the state on request."""

    def __init__(self):
        self.answers = []
        self.updates = 0

    def __len__(self):
        return 1

    def send(self, command):
        self.answers += [*self.work(command), Done(command.sequence, command.kind, 0.1, 0.0), *self.state(command)]

    def work(self, command):
        if command.kind == "train":
            plan = command.plan()
            self.updates += plan.count
            yield Steps.from_result(self.trained(StepResult(plan.first_step, np.ones(plan.count, np.float32), plan.count * BATCH, 0.1)))
        elif command.kind == "evaluate":
            sums = self.sums()
            yield Evaluated.from_result(EvalResult("test", sums, 0.1, self.updates), command.sequence)

    def trained(self, result):
        return result

    def sums(self):
        return {"loss_sum": 1.0, "correct": 3.0, "examples": 5.0}

    def state(self, command):
        """Send the state after the command's end, since training continues once it is copied."""
        if command.kind == "state":
            yield StateBegin(command.sequence, [], 0, {}, PeerMemory.of_this_process(), [])
            yield StateEnd(command.sequence)

    def receive(self, timeout_seconds):
        return (0, self.answers.pop(0)) if self.answers else None

    def refuse(self, leader, wrong):
        raise AssertionError(wrong)


class Records:
    """Keeps the events, and checks that records are possible."""

    def __init__(self):
        self.events = {}

    def step(self, record):
        assert record.count == len(record.losses)

    def evaluation(self, record):
        assert 0 <= record.metrics.get("accuracy", 0.0) <= 1

    def event(self, event, **detail):
        self.events[event] = detail

    def check(self):
        pass


class Saver:
    """Records the update and accuracy of each checkpoint; `written` counts completed saves."""

    active_at = 0.0
    ended = written = 0

    def __init__(self):
        self.saved = []

    def begin(self, save, message):
        self.saved.append((save.cursor.step, save.evaluation and save.evaluation.metrics.get("accuracy")))

    def end(self):
        self.ended += 1

    def wait(self):
        self.written = self.ended

    def ending(self, step):
        return False


def training_loop(job, tasks, records=None, saver=None, objective=CLASSIFICATION, test_examples=5, start=None):
    """Return the loop of a job with these settings and a simulated leading task."""
    return TrainingLoop(
        Job(batch_size=BATCH, **job),
        Subject(data_info(test_examples), objective),
        tasks,
        Outputs(records or Records(), QuietProgress(), saver or Saver(), lambda: 1.0),
        start=start,
    )


def run_to_end(loop):
    """Run a loop until nothing is left to do; return its outcome."""
    while loop.advance():
        pass
    return loop.outcome
