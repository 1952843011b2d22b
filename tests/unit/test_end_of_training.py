"""What is trained is saved before the whole test split is translated, and an interrupt then ends the translations, not the run."""

import numpy as np
import pytest
from test_translation_orders import OBJECTIVE, answer

from crosstrain.backends.base import EvalResult, StepResult
from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo
from crosstrain.engine.loop import TrainingLoop
from crosstrain.engine.progress.base import QuietProgress
from crosstrain.engine.protocol.codec import eval_to_message, plan_from_message, steps_to_message
from crosstrain.engine.protocol.messages import Message

INFO = DataInfo.of_images("toy", (1, 2, 2), 3, {"train": 64, "test": 700}, (0.0,), (1.0,))
STEPS = 24
ORDERS_AT_THE_END = 11  # 700 sentences, 64 of a beam of 4 an order


class Tasks:
    """A leading task, made up, that answers at once; `before` is called with each command that arrives."""

    def __init__(self, before):
        self.before, self.answers, self.commands = before, [], []

    def __len__(self):
        return 1

    def send(self, command):
        self.before(command)
        self.commands.append(command.kind)
        done = Message("done", {"sequence": command["sequence"], "command": command.kind, "seconds": 0.1, "drain_seconds": 0.0})
        self.answers += [*self.work(command), done, *self.state(command)]

    def work(self, command):
        if command.kind == "train":
            plan = plan_from_message(command)
            yield steps_to_message(StepResult(plan.first_step, np.ones(plan.count, np.float32), plan.count * 8, 0.1))
        elif command.kind == "evaluate":
            sums = {"loss_sum": 7.0, "correct": 3.0, "target_tokens": 9.0, "examples": 700.0}
            yield eval_to_message(EvalResult("test", sums, 0.1, STEPS))
        elif command.kind == "decode":
            yield answer(command, 0, 1)

    def state(self, command):
        """It follows behind the command's end: whoever has copied it trains on."""
        if command.kind == "state":
            yield Message("state_begin", {"sequence": command["sequence"]})
            yield Message("state_end", {"sequence": command["sequence"]})

    def receive(self, timeout_seconds):
        return (0, self.answers.pop(0)) if self.answers else None


class Records:
    def __init__(self):
        self.events = {}

    def step(self, record):
        pass

    def evaluation(self, record):
        pass

    def event(self, event, **detail):
        self.events[event] = detail

    def check(self):
        pass


class Saver:
    """Counts what was written."""

    active_at = 0.0
    begun = ended = written = 0

    def begin(self, save, message):
        self.begun += 1

    def end(self):
        self.ended += 1

    def wait(self):
        self.written = self.ended


class Run:
    """A run to its end, in which `at_order(loop, number)` is called before each order of the end's translations."""

    def __init__(self, at_order=lambda loop, number: None, **job):
        self.tasks, self.records, self.saver = Tasks(self.before), Records(), Saver()
        self.at_order, self.orders, self.saved_before_orders = at_order, 0, []
        self.loop = TrainingLoop(
            Job(epochs=3, batch_size=8, eval_every="end", **job),
            data=INFO,
            objective=OBJECTIVE,
            tasks=self.tasks,
            recorder=self.records,
            progress=QuietProgress(),
            clock=lambda: 1.0,
            saver=self.saver,
        )

    def before(self, command):
        if command.kind == "decode" and command["beam"] == 4:
            self.saved_before_orders.append(self.saver.written)
            self.at_order(self.loop, self.orders)
            self.orders += 1


def test_what_is_trained_is_on_disk_before_the_test_split_is_translated():
    run = Run()
    outcome = run.loop.run()
    assert run.saved_before_orders == [1] * ORDERS_AT_THE_END
    assert run.tasks.commands.count("state") == 1
    assert (outcome.updates_reported, outcome.interrupted) == (STEPS, False)
    assert run.records.events["translated"]["sentences"] == 700


def test_a_failure_of_the_translations_costs_no_state():
    def fail(loop, number):
        raise RunFailedError("out of memory")

    run = Run(fail)
    with pytest.raises(RunFailedError, match="out of memory"):
        run.loop.run()
    assert (run.saver.written, run.loop.outcome.updates_reported) == (1, STEPS)


@pytest.mark.parametrize("saves", [{"checkpoint_every": "10steps"}, {}, {"save_final": False}])
def test_an_interrupt_ends_the_translations_and_leaves_a_complete_run(saves):
    found = []
    run = Run(lambda loop, number: found.append(loop.interrupt()) if number == 1 else None, **saves)
    outcome = run.loop.run()
    assert found == [True]
    assert run.orders == 2
    assert (outcome.updates_reported, outcome.interrupted) == (STEPS, False)
    assert run.saver.written == run.tasks.commands.count("state")
    assert "translated" not in run.records.events
    assert run.records.events["translation_interrupted"] == {"step": STEPS, "split": "test"}


def test_nodes_that_come_back_while_the_end_is_translated_change_nothing():
    found = []
    run = Run(lambda loop, number: found.append(loop.pause()), checkpoint_every="10steps")
    outcome = run.loop.run()
    assert found == [False] * ORDERS_AT_THE_END
    assert not outcome.interrupted
    assert run.records.events["translated"]["step"] == STEPS


def test_a_pause_while_training_stops_it_with_a_checkpoint():
    run = Run(checkpoint_every="10steps")
    run.tasks.before = lambda command: run.loop.pause() if command.kind == "train" else None
    outcome = run.loop.run()
    assert outcome.interrupted
    assert outcome.updates_reported < STEPS
    assert (run.saver.written, run.orders) == (1, 0)


def test_empty_translations_of_a_model_that_has_diverged_are_told():
    run = Run()
    run.loop.run()
    assert run.records.events["translations_without_numbers"] == {"step": STEPS, "split": "test", "sentences": 700}
