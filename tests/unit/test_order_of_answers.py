"""Leading tasks answer at different speeds: each evaluation is recorded at its step."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_training import LeadingTask, Records, Saver, run_to_end, training_loop

EPOCHS = 12
SAVING = st.sampled_from([{}, {"checkpoint_every": "3steps"}, {"checkpoint_every": "7steps"}])


class Leaders:
    """Leading tasks with equal commands; `pick` chooses who answers next, the first one reports."""

    def __init__(self, count, pick):
        self.tasks, self.pick = [LeadingTask() for _ in range(count)], pick

    def __len__(self):
        return len(self.tasks)

    def send(self, command):
        for task in self.tasks:
            task.send(command)

    def receive(self, timeout_seconds):
        waiting = [number for number, task in enumerate(self.tasks) if task.answers]
        if not waiting:
            return None
        leader = waiting[self.pick(len(waiting))]
        answer = self.tasks[leader].answers.pop(0)
        return (leader, answer) if leader == 0 or answer.kind == "done" else self.receive(timeout_seconds)

    def refuse(self, leader, wrong):
        raise AssertionError(wrong)


class Evaluations(Records):
    def __init__(self):
        super().__init__()
        self.places = []

    def evaluation(self, record):
        self.places.append((record.step, record.updates_applied))


@settings(max_examples=40)
@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=200), SAVING)
def test_evaluation_is_recorded_at_its_step_in_any_order(leaders, order, saving):
    picks, ticks = itertools.cycle(order), itertools.count(0.0, 0.01)
    records = Evaluations()
    job = {"epochs": EPOCHS, "eval_every": "1epochs", "save_final": False, "nodes": leaders, **saving}
    loop = training_loop(job, Leaders(leaders, lambda count: next(picks) % count), records, Saver())
    loop.clock = lambda: next(ticks)
    steps_per_epoch = loop.epochs.steps_per_epoch
    assert run_to_end(loop).updates_reported == EPOCHS * steps_per_epoch
    assert records.places == [(epoch * steps_per_epoch, epoch * steps_per_epoch) for epoch in range(1, EPOCHS + 1)]
