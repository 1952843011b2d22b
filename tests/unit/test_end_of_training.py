"""Training state is saved before the test split is translated at the end.

An interrupt then ends the translations, not the run.
"""

import pytest
from made_up_training import LeadingTask, Records, Saver, run_to_end, training_loop
from msgspec import structs
from test_translation_orders import OBJECTIVE, answer

from crosstrain.core.errors import RunFailedError
from crosstrain.engine.progress import QuietProgress

SENTENCES = 700
STEPS = 24
ORDERS_AT_THE_END = 11  # 64 sentences per order, with a beam of 4


class Task(LeadingTask):
    """A task that translates; `record_command` is called with each command that arrives."""

    def __init__(self, record_command):
        super().__init__()
        self.record_command, self.commands = record_command, []

    def send(self, command):
        self.record_command(command)
        self.commands.append(command.kind)
        super().send(command)

    def work(self, command):
        yield from super().work(command)
        if command.kind == "decode":
            yield answer(command, 0, 1)

    def sums(self):
        return {"loss_sum": 7.0, "correct": 3.0, "target_tokens": 9.0, "examples": float(SENTENCES)}


class Run:
    """A run to its end; `at_order(loop, number)` is called before each order of translations."""

    def __init__(self, at_order=lambda loop, number: None, **job):
        self.tasks, self.records, self.saver = Task(self.record_command), Records(), Saver()
        self.at_order, self.orders, self.saved_before_orders = at_order, 0, []
        job = {"epochs": 3, "eval_every": "end", **job}
        self.loop = training_loop(job, self.tasks, self.records, self.saver, OBJECTIVE, SENTENCES)

    def record_command(self, command):
        if command.kind == "decode" and command.decoding.beam == 4:
            self.saved_before_orders.append(self.saver.written)
            self.at_order(self.loop, self.orders)
            self.orders += 1


def test_state_is_saved_before_final_translation():
    run = Run()
    outcome = run_to_end(run.loop)
    assert run.saved_before_orders == [1] * ORDERS_AT_THE_END
    assert run.tasks.commands.count("state") == 1
    assert (outcome.updates_reported, outcome.interrupted) == (STEPS, False)
    assert run.records.events["translated"]["sentences"] == 700


def test_final_translation_is_timed_separately():
    """Each command takes equally long; those before the end are evaluations."""
    run = Run()
    outcome = run_to_end(run.loop)
    decoded = run.tasks.commands.count("decode") - ORDERS_AT_THE_END
    assert outcome.translate_seconds == pytest.approx(0.1 * ORDERS_AT_THE_END)
    assert outcome.eval_seconds == pytest.approx(0.1 * (run.tasks.commands.count("evaluate") + decoded))


class TwoTasks(Task):
    """Two leading tasks, the second of which takes `slower` times as long to translate."""

    def __init__(self, slower):
        super().__init__(lambda command: None)
        self.slower = slower

    def __len__(self):
        return 2

    def send(self, command):
        before = len(self.answers)
        super().send(command)
        messages, self.answers[before:] = self.answers[before:], []
        for leader in (1, 0):
            for message in messages:
                if message.kind == "decoded":
                    self.answers.append((leader, answer(command, leader, 2)))
                elif message.kind == "done":
                    seconds = 0.1 * (self.slower if leader and command.kind == "decode" else 1.0)
                    self.answers.append((leader, structs.replace(message, seconds=seconds)))
                elif leader == 0:
                    self.answers.append((0, message))

    def receive(self, timeout_seconds):
        return self.answers.pop(0) if self.answers else None


@pytest.mark.thorough
@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_translation_time_is_that_of_slowest_task(slower):
    tasks = TwoTasks(slower)
    outcome = run_to_end(training_loop({"epochs": 3, "eval_every": "end"}, tasks, Records(), Saver(), OBJECTIVE, SENTENCES))
    orders = -(-SENTENCES // 128)  # of both
    decoded = tasks.commands.count("decode") - orders
    assert outcome.translate_seconds == pytest.approx(0.1 * max(1.0, slower) * orders)
    assert outcome.eval_seconds == pytest.approx(0.1 * (1 + max(1.0, slower) * decoded))


def test_failed_translation_keeps_saved_state():
    def fail(loop, number):
        raise RunFailedError("out of memory")

    run = Run(fail)
    with pytest.raises(RunFailedError, match="out of memory"):
        run_to_end(run.loop)
    assert (run.saver.written, run.loop.outcome.updates_reported) == (1, STEPS)


class Seen(QuietProgress):
    """Records progress messages, without repetitions."""

    def __init__(self):
        self.messages = []

    def doing(self, text):
        if text not in self.messages[-1:]:
            self.messages.append(text)


def test_progress_of_evaluations_and_final_translation_is_shown():
    run = Run()
    run.loop.progress = seen = Seen()
    run_to_end(run.loop)
    messages = [text for text in seen.messages if text is not None]
    assert messages[0] == f"evaluating after step {STEPS}"
    assert [text for text in messages if "greedy" in text] == [f"translating 500 test sentences (greedy): {done} done" for done in (0, 256)]
    at_the_end = [f"translating all 700 test sentences (beam 4): {64 * order} done" for order in range(ORDERS_AT_THE_END)]
    assert [text for text in messages if "beam" in text] == at_the_end
    assert seen.messages[-1] is None


@pytest.mark.parametrize("saves", [{"checkpoint_every": "10steps"}, {}, {"save_final": False}])
def test_interrupt_ends_translations_and_completes_run(saves):
    answers = []
    run = Run(lambda loop, number: answers.append(loop.interrupt()) if number == 1 else None, **saves)
    outcome = run_to_end(run.loop)
    assert answers == [True]
    assert run.loop.only_translates
    assert run.orders == 2
    assert (outcome.updates_reported, outcome.interrupted) == (STEPS, False)
    assert run.saver.written == run.tasks.commands.count("state")
    assert "translated" not in run.records.events
    assert outcome.translate_seconds == pytest.approx(0.2)  # as far as it came
    assert run.records.events["translation_interrupted"] == {"step": STEPS, "split": "test"}


def test_returning_nodes_do_not_pause_final_translation():
    answers = []
    run = Run(lambda loop, number: answers.append(loop.pause()), checkpoint_every="10steps")
    outcome = run_to_end(run.loop)
    assert answers == [False] * ORDERS_AT_THE_END
    assert not outcome.interrupted
    assert run.records.events["translated"]["step"] == STEPS


def test_pause_during_training_stops_with_checkpoint():
    run = Run(checkpoint_every="10steps")
    run.tasks.record_command = lambda command: run.loop.pause() if command.kind == "train" else None
    outcome = run_to_end(run.loop)
    assert not run.loop.only_translates
    assert outcome.interrupted
    assert outcome.updates_reported < STEPS
    assert (run.saver.written, run.orders) == (1, 0)


def test_empty_translations_of_diverged_model_are_recorded():
    run = Run()
    run_to_end(run.loop)
    assert run.records.events["translations_without_numbers"] == {"step": STEPS, "split": "test", "sentences": 700}
