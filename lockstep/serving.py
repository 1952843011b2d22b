"""What both ends of a side's processes know: a request a line as JSON, and an answer a line."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ..core.errors import TrainerError, raised

READY = b"crosstrain compares updates"  # the first line that a process writes


class End(msgspec.Struct, tag="end"):
    """End the process."""


class Answer(msgspec.Struct):
    """What came of a request: a problem and its exit code, or losses and a learning rate.

    `uncomputed`: why layers could not be computed one by one.
    """

    problem: str | None = None
    code: int = 1
    losses: list[float | None] = []  # None: not finite, as JSON has it
    rate: float = 0.0
    precision: str = ""
    uncomputed: str | None = None

    @property
    def loss(self) -> float:
        """The last loss, NaN if it is not finite."""
        loss = self.losses[-1] if self.losses else None
        return math.nan if loss is None else loss


class Preload(msgspec.Struct, tag="preload"):
    """Import what a job needs; this has no answer."""

    job: dict[str, Any]


def serve_layers(load: Callable[[dict[str, Any]], object], compute: Callable[[Any], None], failing: str, requests: Any) -> None:
    """Serve requests to compute layers on the CPU, of this type or `Preload`.

    `failing`: what could not be done where the framework, or a user's code, raises an error; the job's backend is ``{backend}`` in it.
    """

    def answer(request: Any) -> Answer | None:
        if isinstance(request, Preload):
            with suppress(Exception):  # the request for layers has the error again, and an answer
                load(request.job)
            return None
        try:
            compute(request)
        except TrainerError as error:
            return Answer(uncomputed=str(error))
        except Exception as error:  # noqa: BLE001 -- of the framework, or of a user's code
            return Answer(uncomputed=f"{failing.format(**request.job)}: {raised(error)}")
        finally:
            gc.collect()  # of arrays that refer to each other, as large as the model, before the next request
        return Answer()

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    serve(answer, requests | Preload | End)


def serve(answer: Callable[[Any], Answer | None], requests: Any) -> None:
    """Answer requests of this type from standard input, until its end or `End`.

    What libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    answers.write(READY + b"\n")
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=requests)
        if isinstance(request, End):
            break
        if (answered := answer(request)) is not None:
            answers.write(msgspec.json.encode(answered) + b"\n")
