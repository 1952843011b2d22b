"""Heartbeats of a translating task: the stall time-out does not depend on the model's speed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs
from test_scoring_files import LINES, PIECES, Source, made
from test_translation_orders import OBJECTIVE

from crosstrain.backends.decoding_functions import Translating
from crosstrain.data.text import END
from crosstrain.engine.protocol import task_messages as messages
from crosstrain.engine.protocol.messages import ImpossibleAnswerError
from crosstrain.engine.task import CommandLoop
from crosstrain.engine.translation import Decoded, TranslationOrders
from crosstrain.launch.driver.outstanding_requests import MAX_HEARTBEATS, OutstandingRequests
from crosstrain.models.decoding import GREEDY

STEPS, STEP_SECONDS = 5, 0.06


class SlowModel:
    """Emits a piece after a pause, and ends each translation after a fixed number."""

    def begin(self, sources):
        self.place = 0

    def advance(self, tokens_n, rows_n):
        time.sleep(STEP_SECONDS)
        self.place += 1
        found_nv = np.full((len(rows_n), PIECES), -9.0, np.float32)
        found_nv[:, END if self.place == STEPS else 7] = -0.1
        return found_nv


@pytest.fixture(scope="module")
def translating(tmp_path_factory):
    return Translating(made(tmp_path_factory.mktemp("data"), Source()), OBJECTIVE, SlowModel(), 0, 1)


def ordered():
    """Return the orders for all lines, the first command, and the outstanding requests."""
    orders = TranslationOrders(OBJECTIVE.translation, "test", Decoded(len(LINES), GREEDY), 1)
    (command,) = orders.messages
    command.sequence = 1
    outstanding = OutstandingRequests([0])
    outstanding.started(["worker-0"], ["worker-0"])
    outstanding.add_command("worker-0", command)
    return orders, command, outstanding


def as_received(message):
    return structs.replace(message, task="worker-0")


def test_task_sends_heartbeats_between_steps(translating, monkeypatch):
    monkeypatch.setattr("crosstrain.engine.task.INTERVAL_SECONDS", STEP_SECONDS / 2)
    orders, command, outstanding = ordered()
    sent, commands = [], iter([command, messages.Close()])
    session = SimpleNamespace(translating=lambda: translating, drain=list, close=lambda: None)
    stream, states = SimpleNamespace(send=sent.append), SimpleNamespace(wait=lambda: None)
    CommandLoop(session, stream, SimpleNamespace(next=lambda: next(commands)), states, reports=True).run()
    assert [outstanding.violation_in(0, as_received(message)) for message in sent] == [None] * len(sent)
    *signs, answer, done = sent
    assert STEPS - 1 <= len(signs) <= STEPS + 1  # more if the machine paused before the first
    assert (answer.complete, done.kind) == (True, "done")
    for message in signs:
        orders.add(0, message)
        assert (orders.complete, orders.seconds) == (False, 0.0)
    orders.add(0, answer)
    assert orders.complete
    assert orders.sums["translated_sentences"] == len(LINES)


def test_every_step_may_send_a_heartbeat(translating):
    calls = []
    translating.scored("test", 0, 1, GREEDY, lambda: calls.append(1))
    assert len(calls) == STEPS + 1


def test_heartbeats_need_a_request_and_are_limited():
    orders, command, outstanding = ordered()
    wrong_heartbeat = messages.Decoded.heartbeat(7)
    assert "nobody asked for" in outstanding.violation_in(0, as_received(wrong_heartbeat))
    with pytest.raises(ImpossibleAnswerError, match="nobody asked for"):
        orders.add(0, wrong_heartbeat)
    sign = as_received(messages.Decoded.heartbeat(command.start))
    assert {outstanding.violation_in(0, sign) for _ in range(MAX_HEARTBEATS)} == {None}
    assert "more often than there can be" in outstanding.violation_in(0, sign)


def test_heartbeat_is_no_answer():
    _, command, outstanding = ordered()
    assert outstanding.violation_in(0, as_received(messages.Decoded.heartbeat(command.start))) is None
    assert "without its answer" in outstanding.violation_in(0, as_received(messages.Done(1, "decode", 0.1, 0.0)))
