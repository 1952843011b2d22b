"""Encodes plans, results and states as messages of the control protocol, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import CalibrationOrder, CalibrationResult, EvalResult, Plan, State, StepResult
from ...records.schema import StepRecord
from .messages import Message

__all__ = [
    "calibrated_from_message",
    "calibrated_to_message",
    "calibration_from_message",
    "calibration_to_message",
    "eval_from_message",
    "eval_to_message",
    "plan_from_message",
    "plan_to_message",
    "state_from_arrays",
    "state_from_message",
    "state_to_arrays",
    "state_to_message",
    "step_record",
    "steps_from_message",
    "steps_to_message",
]


def plan_to_message(plan: Plan) -> Message:
    """Encode a plan; a learning rate that is the same throughout travels once."""
    rates = plan.learning_rates
    if len(rates) > 1 and np.all(rates == rates[0]):
        rates = rates[:1]
    fields = {name: getattr(plan, name) for name in ("first_step", "count", "epoch", "first_in_epoch", "skip", "arranged")}
    return Message("train", fields, {"learning_rates": rates})


def plan_from_message(message: Message) -> Plan:
    """Decode what `plan_to_message` made."""
    rates = np.broadcast_to(message.array("learning_rates").astype(np.float64), (message["count"],))
    place = (message["first_step"], message["count"], message["epoch"], message["first_in_epoch"])
    arranged = tuple((begin, tokens, batches) for begin, tokens, batches in message["arranged"])
    return Plan(*place, np.ascontiguousarray(rates), message["skip"], arranged)


def steps_to_message(result: StepResult) -> Message:
    """Encode a step result."""
    fields = {
        "first_step": result.first_step,
        "examples": result.examples,
        "seconds": result.seconds,
        "data_wait_seconds": result.data_wait_seconds,
        "network_wait_seconds": result.network_wait_seconds,
        "worker": result.worker,
        "profiled_seconds": result.profiled_seconds,
    }
    arrays: dict[str, NDArray[Any]] = {"losses": np.asarray(result.losses, dtype=np.float32)}
    if result.staleness is not None:
        arrays["staleness"] = np.asarray(result.staleness, dtype=np.int64)
    return Message("steps", fields, arrays)


def steps_from_message(message: Message) -> StepResult:
    """Decode what `steps_to_message` made."""
    return StepResult(
        first_step=message["first_step"],
        losses=message.array("losses"),
        examples=message["examples"],
        seconds=message["seconds"],
        data_wait_seconds=message["data_wait_seconds"],
        network_wait_seconds=message["network_wait_seconds"],
        worker=message["worker"],
        staleness=message.array("staleness") if "staleness" in message.arrays else None,
        profiled=message["profiled_seconds"] is not None,
        profiled_seconds=message["profiled_seconds"],
    )


def eval_to_message(result: EvalResult, sequence: int) -> Message:
    """Encode an evaluation's sums, as the answer to the command of this number."""
    return Message("evaluated", {**{name: getattr(result, name) for name in EvalResult.__dataclass_fields__}, "sequence": sequence})


def eval_from_message(message: Message) -> EvalResult:
    """Decode what `eval_to_message` made."""
    return EvalResult(**{name: message[name] for name in EvalResult.__dataclass_fields__})


def calibration_to_message(order: CalibrationOrder) -> Message:
    """Encode an order to calibrate."""
    return Message("calibrate", {"part": order.component, "count": order.count, "seconds": order.seconds})


def calibration_from_message(message: Message) -> CalibrationOrder:
    """Decode what `calibration_to_message` made."""
    return CalibrationOrder(message["part"], message["count"], message["seconds"])


def calibrated_to_message(found: CalibrationResult) -> Message:
    """Encode a worker's figures."""
    return Message("calibrated", {name: getattr(found, name) for name in CalibrationResult.__dataclass_fields__})


def calibrated_from_message(message: Message) -> CalibrationResult:
    """Decode what `calibrated_to_message` made."""
    return CalibrationResult(**{name: message[name] for name in CalibrationResult.__dataclass_fields__})


def state_to_arrays(state: State) -> dict[str, NDArray[Any]]:
    """Return a state's arrays by key: ``parameters/NAME``, ``buffers/NAME``, ``slots/SLOT/NAME``, in this order; no copies."""
    arrays: dict[str, NDArray[Any]] = {f"parameters/{name}": value for name, value in state.parameters.items()}
    arrays.update({f"buffers/{name}": value for name, value in state.buffers.items()})
    for slot, values in state.slots.items():
        arrays.update({f"slots/{slot}/{name}": value for name, value in values.items()})
    return arrays


def state_from_arrays(arrays: Mapping[str, NDArray[Any]], updates: int, scalars: Mapping[str, float] | None = None) -> State:
    """Return the state whose arrays `state_to_arrays` gave. Raises ValueError for a key of another sort."""
    parameters: dict[str, NDArray[Any]] = {}
    buffers: dict[str, NDArray[Any]] = {}
    slots: dict[str, dict[str, NDArray[Any]]] = {}
    for key, value in arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "parameters":
            parameters[rest] = value
        elif kind == "buffers":
            buffers[rest] = value
        elif kind == "slots":
            slot, _, name = rest.partition("/")
            slots.setdefault(slot, {})[name] = value
        else:
            raise ValueError(f"an array of a state is called {key!r}")
    return State(parameters, slots, updates, buffers, dict(scalars or {}))


def state_to_message(state: State, kind: str = "state") -> Message:
    """Encode a state as one message; for small ones and for tests (`state_transfer` has the way for those of any size)."""
    return Message(kind, {"updates": state.updates, "scalars": dict(state.scalars)}, state_to_arrays(state))


def state_from_message(message: Message) -> State:
    """Decode what `state_to_message` made."""
    return state_from_arrays({key: message.array(key) for key in message.arrays}, message["updates"], message.get("scalars"))


def step_record(result: StepResult, epoch: int, now: float, rates: NDArray[np.float64]) -> StepRecord:
    """Return the record of a step result: `now` on the run clock, the learning rate of each update."""
    same = len(rates) > 1 and bool(np.all(rates == rates[0]))
    details: dict[str, Any] = {}
    if result.staleness is not None:
        details["staleness"] = tuple(result.staleness.tolist())
    return StepRecord(
        step=result.first_step,
        count=result.count,
        epoch=epoch,
        time_seconds=now,
        seconds=result.seconds,
        examples=result.examples,
        losses=tuple(result.losses.tolist()),
        learning_rates=(float(rates[0]),) if same else tuple(rates.tolist()),
        data_wait_seconds=result.data_wait_seconds,
        network_wait_seconds=result.network_wait_seconds,
        worker=result.worker,
        profiled_seconds=result.profiled_seconds,
        **details,
    )
