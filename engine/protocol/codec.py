"""Encoding of plans, results and states as messages of the control protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...backends.base import CalibrationOrder, CalibrationResult, EvalResult, Plan, State, StepResult
from ...data.base import Split
from ...models.decoding import Decoding, Hypothesis
from ...records.store.schema import StepRecord
from .messages import Message

R = TypeVar("R", EvalResult, CalibrationResult, Decoding)


def _named(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _made(kind: type[R], message: Message) -> R:
    return kind(**{name: message[name] for name in kind.__dataclass_fields__})


def _distinct(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    return rates[:1] if len(rates) > 1 and np.all(rates == rates[0]) else rates


def plan_to_message(plan: Plan) -> Message:
    """Encode a plan; a constant learning rate is sent once."""
    fields = _named(plan, ("first_step", "count", "epoch", "first_in_epoch", "skip", "arranged"))
    return Message("train", fields, {"learning_rates": _distinct(plan.learning_rates)})


def plan_from_message(message: Message) -> Plan:
    """Decode a plan."""
    rates = np.broadcast_to(message.array("learning_rates").astype(np.float64), (message["count"],))
    place = (message["first_step"], message["count"], message["epoch"], message["first_in_epoch"])
    arranged = tuple((begin, tokens, batches) for begin, tokens, batches in message["arranged"])
    return Plan(*place, np.ascontiguousarray(rates), message["skip"], arranged)


def steps_to_message(result: StepResult) -> Message:
    """Encode a step result."""
    arrays: dict[str, NDArray[Any]] = {"losses": np.asarray(result.losses, dtype=np.float32)}
    if result.staleness is not None:
        arrays["staleness"] = np.asarray(result.staleness, dtype=np.int64)
    return Message("steps", _named(result, _STEP_FIELDS), arrays)


_STEP_FIELDS = ("first_step", "examples", "seconds", "data_wait_seconds", "network_wait_seconds", "worker", "profiled_seconds")


def steps_from_message(message: Message) -> StepResult:
    """Decode a step result."""
    return StepResult(
        **{name: message[name] for name in _STEP_FIELDS},
        losses=message.array("losses"),
        staleness=message.array("staleness") if "staleness" in message.arrays else None,
        profiled=message["profiled_seconds"] is not None,
    )


def eval_to_message(result: EvalResult, sequence: int) -> Message:
    """Encode an evaluation's sums as the answer to command `sequence`."""
    return Message("evaluated", {**_named(result, EvalResult.__dataclass_fields__), "sequence": sequence})


def eval_from_message(message: Message) -> EvalResult:
    """Decode an evaluation's sums."""
    return _made(EvalResult, message)


def calibration_to_message(order: CalibrationOrder) -> Message:
    """Encode a calibration order."""
    return Message("calibrate", {"part": order.component, "count": order.count, "seconds": order.seconds})


def calibration_from_message(message: Message) -> CalibrationOrder:
    """Decode a calibration order."""
    return CalibrationOrder(message["part"], message["count"], message["seconds"])


def calibrated_to_message(found: CalibrationResult) -> Message:
    """Encode a worker's figures."""
    return Message("calibrated", _named(found, CalibrationResult.__dataclass_fields__))


def calibrated_from_message(message: Message) -> CalibrationResult:
    """Decode a worker's figures."""
    return _made(CalibrationResult, message)


def state_to_arrays(state: State) -> dict[str, NDArray[Any]]:
    """Return arrays by key: ``parameters/NAME``, ``buffers/NAME``, ``slots/SLOT/NAME``, in this order; no copies."""
    arrays: dict[str, NDArray[Any]] = {f"parameters/{name}": value for name, value in state.parameters.items()}
    arrays.update({f"buffers/{name}": value for name, value in state.buffers.items()})
    for slot, values in state.slots.items():
        arrays.update({f"slots/{slot}/{name}": value for name, value in values.items()})
    return arrays


def state_from_arrays(arrays: Mapping[str, NDArray[Any]], updates: int, scalars: Mapping[str, float] | None = None) -> State:
    """Return the state of arrays by key. Raises ValueError for other keys than `state_to_arrays` has."""
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
    """Encode a small state as one message; `state_transfer` sends any size."""
    return Message(kind, {"updates": state.updates, "scalars": dict(state.scalars)}, state_to_arrays(state))


def state_from_message(message: Message) -> State:
    """Decode a state of one message."""
    return state_from_arrays({key: message.array(key) for key in message.arrays}, message["updates"], message.get("scalars"))


def step_record(result: StepResult, epoch: int, now: float, rates: NDArray[np.float64]) -> StepRecord:
    """Return the record of a step result: `now` in run seconds, `rates` of its updates."""
    return StepRecord(
        step=result.first_step,
        count=result.count,
        epoch=epoch,
        time_seconds=now,
        losses=tuple(result.losses.tolist()),
        learning_rates=tuple(_distinct(rates).tolist()),
        staleness=None if result.staleness is None else tuple(result.staleness.tolist()),
        **{name: getattr(result, name) for name in _STEP_FIELDS if name != "first_step"},
    )


def decoding_of(message: Message) -> Decoding:
    """Return a message's decoding settings."""
    return _made(Decoding, message)


def decode_message(split: Split, start: int, stop: int, decoding: Decoding) -> Message:
    """Return the order to translate and score sentences start … stop − 1, each leading task its share."""
    return Message("decode", {"split": split, "start": start, "stop": stop, **_named(decoding, Decoding.__dataclass_fields__)})


def decoded_message(order: Message, sums: Mapping[str, float], without_numbers: int, seconds: float) -> Message:
    """Answer a decode order with a task's sums and the sentences without finite log-probabilities."""
    fields = {"start": order["start"], "sums": dict(sums), "without_numbers": without_numbers, "seconds": seconds}
    return Message("decoded", {**fields, "complete": True})


def still_decoding_message(order: Message) -> Message:
    """Return the heartbeat of a task in a decode order."""
    return Message("decoded", {"start": order["start"], "sums": {}, "without_numbers": 0, "seconds": 0.0, "complete": False})


def translate_message(sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> Message:
    """Return the order to translate sentences, which end with END."""
    lengths = np.array([len(source) for source in sources], np.int64)
    pieces = np.concatenate([np.zeros(0, np.int64), *(np.asarray(source, np.int64) for source in sources)])
    fields = {"n_best": n_best, **_named(decoding, Decoding.__dataclass_fields__)}
    return Message("translate", fields, {"pieces": pieces, "lengths": lengths})


def sources_of(message: Message) -> list[NDArray[np.int64]]:
    """Return the sentences of a translation order."""
    return _cut(message.array("pieces"), message.array("lengths"))


def translated_message(order: Message, translations: Sequence[Sequence[Hypothesis]]) -> Message:
    """Answer a translation order: each sentence's hypotheses, best first (`models.decoding.search`)."""
    every = [hypothesis for hypotheses in translations for hypothesis in hypotheses]
    arrays = {
        "counts": np.array([len(hypotheses) for hypotheses in translations], np.int64),
        "lengths": np.array([len(one.pieces) for one in every], np.int64),
        "pieces": np.array([piece for one in every for piece in one.pieces], np.int64),
        "scores": np.array([one.score for one in every], np.float64),
        "log_probabilities": np.array([one.log_probability for one in every], np.float64),
        "ended": np.array([one.ended for one in every], np.int64),
    }
    return Message("translated", {"order": order["sequence"]}, arrays)


def hypotheses_of(message: Message, sentences: int) -> list[list[Hypothesis]]:
    """Return the hypotheses of so many sentences. Raises ValueError where counts do not match."""
    counts, lengths = message.array("counts"), message.array("lengths")
    scores, totals, ended = message.array("scores"), message.array("log_probabilities"), message.array("ended")
    fits = len(counts) == sentences and counts.min(initial=0) >= 0 and lengths.min(initial=0) >= 0 and int(counts.sum()) == len(lengths)
    if not fits or int(lengths.sum()) != len(message.array("pieces")) or not len(lengths) == len(scores) == len(totals) == len(ended):
        raise ValueError(f"translations of {len(counts)} sentences that do not fit the {sentences} that were asked for")
    pieces = _cut(message.array("pieces"), lengths)
    every = [
        Hypothesis(tuple(one.tolist()), score, total, bool(end))
        for one, score, total, end in zip(pieces, scores.tolist(), totals.tolist(), ended.tolist(), strict=True)
    ]
    ends = np.cumsum(counts).tolist()
    return [every[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _cut(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
