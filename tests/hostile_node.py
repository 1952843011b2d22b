"""A node that knows the secret, trains normally, and then attacks its driver.

Usage: ``python hostile_node.py ATTACK run …``
"""

import json
import sys
import threading
import time
from dataclasses import asdict

from untyped import Message

import crosstrain.launch.launchers.joining as joining
from crosstrain.cli.main import main
from crosstrain.engine.protocol.messages import RawArray
from crosstrain.launch.node.agent import Agent

TASK = "worker-1"
NAME = "x" * 60


def line(**fields):
    return json.dumps(fields).encode() + b"\n"


def endless(*pieces):
    while True:
        yield from pieces


RAW = {
    "garbage": [bytes(range(256)) * 40],
    "a claim of 4 GiB": [line(kind="log", task=TASK, arrays=[["text", "|u1", [2**32], 2**32]])],
    "a claim of 1 GiB": [line(kind="log", task=TASK, arrays=[["text", "|u1", [2**30], 2**30]])],
    "1 GiB of a log": [line(kind="log", task=TASK, arrays=[["text", "|u1", [2**30], 2**30]]), *[bytes(2**20)] * 2**10],
    "a header of 15 MiB": [b'{"kind":"log","task":[' + b"[]," * (5 * 2**20) + b"[]]}\n"],
    "a header without an end": endless(b"{" * 2**20),
}
"""Bytes that are sent unchanged."""

UNASKED = {
    "a done that nobody asked for": Message(
        "done", {"from": TASK, "sequence": 10**6, "command": "train", "seconds": 0.1, "drain_seconds": 0}
    ),
    "a sample with a wrong field": Message("sample", {"record": {"node": 1, "cores": "many"}}),
    "a log with a path": Message("log", {"task": "../../../../x"}, {"text": RawArray("|u1", [1], b"x")}),
}
"""Messages that end the run by themselves."""

FLOODS = {
    "a flood of phases": lambda _: Message("phase", {"from": TASK, "name": NAME}),
    "a flood of errors": lambda _: Message(
        "error", {"from": TASK, "type": NAME, "message": NAME, "errno": None, "exit_code": None, "peer_lost": False}
    ),
    "a flood of logs": lambda _: Message("log", {"task": TASK}, {"text": RawArray("|u1", [2**22], bytes(2**22))}),
    "a flood of samples": lambda agent: Message("sample", {"record": agent.record}),
}
"""Messages of which each would do no harm."""

SILENT = "no message is read any more"
ATTACKS = [*RAW, *UNASKED, *FLOODS, SILENT]


class HostileAgent(Agent):
    """Does its work until its first task trains; then it attacks."""

    record = None

    def _on_sample(self, record):
        super()._on_sample(record)
        self.record = asdict(record)

    def _request_in(self, message):
        request = super()._request_in(message)
        if message.kind == "train" and self.record is not None and not hasattr(self, "attack"):
            self.attack = threading.Thread(target=self._attack, daemon=True)
            self.attack.start()
            if sys.argv[1] == SILENT:
                time.sleep(3600)
        return request

    def _attack(self):
        print("attacks", flush=True)
        attack = sys.argv[1]
        try:
            if attack in RAW:
                with self._stream._lock:
                    for piece in RAW[attack]:
                        self._stream.writer.write(piece)
                        self._stream.writer.flush()
            elif attack in UNASKED:
                self._stream.send(UNASKED[attack])
            while attack in FLOODS:
                self._stream.send(FLOODS[attack](self))
        except OSError:
            return  # cut off


if __name__ == "__main__":
    joining.Agent = HostileAgent
    sys.exit(main(sys.argv[2:]))
