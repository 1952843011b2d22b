"""Bringing a state to the tasks, before a run goes on or an evaluation begins."""

from __future__ import annotations

import time

from ...backends.base import State
from ...core.errors import RunFailedError
from ...engine.protocol.messages import Message
from ...engine.protocol.state_transfer import load_messages
from .task_group import Control

__all__ = ["load_state"]


def load_state(control: Control, state: State, timeout_seconds: float) -> None:
    """Have every leading task take over a state, which travels to the first of them.

    Raises RunFailedError where a task dies of it, or after the time.
    """
    for message in load_messages(state):
        control.send_to_first(message)
    control.send(Message("load", {"sequence": 0}))
    deadline = time.monotonic() + timeout_seconds
    waiting = len(control)
    while waiting:
        if time.monotonic() > deadline:
            raise RunFailedError(f"the tasks did not take over the checkpoint's state within {timeout_seconds:.0f} s")
        answer = control.receive(1.0)
        if answer is not None and answer[1].kind == "done":
            waiting -= 1
