"""The control protocol's messages: a JSON header line, then raw bytes where the message carries arrays.

The same framing serves between driver and agent and between agent and task. Arrays are never written as JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import EvalResult, Plan, State, StepResult

__all__ = [
    "PROTOCOL",
    "Message",
    "ProtocolError",
    "Stream",
    "eval_from_message",
    "eval_to_message",
    "plan_from_message",
    "plan_to_message",
    "state_from_message",
    "state_to_message",
    "steps_from_message",
    "steps_to_message",
]

PROTOCOL = 1
MAX_HEADER_BYTES = 16 * 2**20


class ProtocolError(ConnectionError):
    """The peer sent something that is not a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message: what kind it is, JSON-ready fields, and arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or `default` where the message has none of this name."""
        return self.fields.get(key, default)


class Stream:
    """Messages over a pair of binary files. Sending is safe from several threads; receiving belongs to one."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Write one message and flush. Raises OSError (BrokenPipeError) where the peer is gone."""
        arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
        header: dict[str, Any] = {"kind": message.kind, **message.fields}
        if arrays:
            header["arrays"] = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        with self._lock:
            self._writer.write(json.dumps(header, separators=(",", ":")).encode() + b"\n")
            for array in arrays.values():
                if array.nbytes:
                    self._writer.write(array.data.cast("B"))
            self._writer.flush()

    def receive(self) -> Message | None:
        """Read one message; None at the end of the stream. Raises ProtocolError for anything that is not a message."""
        line = self._reader.readline(MAX_HEADER_BYTES)
        if not line:
            return None
        if not line.endswith(b"\n"):
            if len(line) == MAX_HEADER_BYTES:
                raise ProtocolError("a header that is too long")
            return None
        try:
            header = json.loads(line)
            kind = header.pop("kind")
            described = header.pop("arrays", [])
            arrays = {name: self._array(dtype, shape) for name, dtype, shape in described}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"not a message: {line[:80]!r}") from error
        return Message(kind, header, arrays)

    def _array(self, dtype: str, shape: list[int]) -> NDArray[Any]:
        array = np.empty(shape, dtype=np.dtype(dtype))
        if array.dtype.hasobject:
            raise ProtocolError("arrays of Python objects do not travel")
        view = array.data.cast("B") if array.nbytes else memoryview(b"")
        filled = 0
        while filled < len(view):
            piece = self._reader.read(len(view) - filled)
            if not piece:
                raise ProtocolError("the stream ended within an array")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        return array

    def close(self) -> None:
        """Close both directions; errors of a peer that is gone are of no interest here."""
        for file in (self._writer, self._reader):
            try:
                file.close()
            except OSError:
                continue


def plan_to_message(plan: Plan) -> Message:
    """Encode a plan; a learning rate that is the same throughout travels once."""
    rates = plan.learning_rates
    if len(rates) > 1 and np.all(rates == rates[0]):
        rates = rates[:1]
    fields = {"first_step": plan.first_step, "count": plan.count, "epoch": plan.epoch, "first_in_epoch": plan.first_in_epoch}
    return Message("train", fields, {"learning_rates": rates})


def plan_from_message(message: Message) -> Plan:
    """Decode what `plan_to_message` made."""
    rates = np.broadcast_to(message.arrays["learning_rates"].astype(np.float64), (message["count"],))
    return Plan(message["first_step"], message["count"], message["epoch"], message["first_in_epoch"], np.ascontiguousarray(rates))


def steps_to_message(result: StepResult) -> Message:
    """Encode a step result."""
    fields = {
        "first_step": result.first_step,
        "examples": result.examples,
        "seconds": result.seconds,
        "data_wait_seconds": result.data_wait_seconds,
        "network_wait_seconds": result.network_wait_seconds,
        "worker": result.worker,
    }
    arrays: dict[str, NDArray[Any]] = {"losses": np.asarray(result.losses, dtype=np.float32)}
    if result.staleness is not None:
        arrays["staleness"] = np.asarray(result.staleness, dtype=np.int64)
    return Message("steps", fields, arrays)


def steps_from_message(message: Message) -> StepResult:
    """Decode what `steps_to_message` made."""
    return StepResult(
        first_step=message["first_step"],
        losses=message.arrays["losses"],
        examples=message["examples"],
        seconds=message["seconds"],
        data_wait_seconds=message["data_wait_seconds"],
        network_wait_seconds=message["network_wait_seconds"],
        worker=message["worker"],
        staleness=message.arrays.get("staleness"),
    )


def eval_to_message(result: EvalResult) -> Message:
    """Encode an evaluation's sums."""
    return Message("evaluated", {name: getattr(result, name) for name in EvalResult.__dataclass_fields__})


def eval_from_message(message: Message) -> EvalResult:
    """Decode what `eval_to_message` made."""
    return EvalResult(**{name: message[name] for name in EvalResult.__dataclass_fields__})


def state_to_message(state: State, kind: str = "state") -> Message:
    """Encode a state: parameters as arrays ``parameters/NAME``, slots as ``slots/SLOT/NAME``."""
    arrays: dict[str, NDArray[Any]] = {f"parameters/{name}": value for name, value in state.parameters.items()}
    for slot, values in state.slots.items():
        arrays.update({f"slots/{slot}/{name}": value for name, value in values.items()})
    return Message(kind, {"updates": state.updates}, arrays)


def state_from_message(message: Message) -> State:
    """Decode what `state_to_message` made."""
    parameters: dict[str, NDArray[Any]] = {}
    slots: dict[str, dict[str, NDArray[Any]]] = {}
    for key, value in message.arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "parameters":
            parameters[rest] = value
        else:
            slot, _, name = rest.partition("/")
            slots.setdefault(slot, {})[name] = value
    return State(parameters, slots, message["updates"])
