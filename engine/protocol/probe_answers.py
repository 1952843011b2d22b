"""Validates what a probe answers to the driver's questions: a host may be broken or hostile before a run begins, too.

What it says of the host has the bounds that the greeting of an agent there would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .messages import MOST_ERROR_CHARACTERS, PROTOCOL, Message
from .said import Host, Identity, Label, Name, Port, Said, converted, is_address, unfit_in

__all__ = ["wrong_with_answer"]

MOST_PEERS = 4096

MOST_PORTS = 4
"""Of a probe."""

_Digest = Annotated[str, msgspec.Meta(max_length=255)]


class _Described(Said):
    protocol: int
    identity: Identity
    host: Host
    address: Label | None


class _Time(Said):
    seconds: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Data(Said):
    digest: _Digest


class _Model(Said):
    digest: _Digest | None
    package: Label | None


class _Listens(Said):
    ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=MOST_PORTS)]


class _Connected(Said):
    problems: Annotated[list[Name | None], msgspec.Meta(max_length=MOST_PEERS)]


class _Problem(Said):
    text: Annotated[str, msgspec.Meta(max_length=MOST_ERROR_CHARACTERS)]


_FOUND: Mapping[str, type[Said]] = {
    "describe": _Described,
    "time": _Time,
    "data": _Data,
    "model": _Model,
    "listen": _Listens,
    "connect": _Connected,
}
"""What is found, by the question."""


def wrong_with_answer(question: str, asked: Mapping[str, Any], answer: Message) -> str | None:
    """Return what is wrong with a probe's answer to a question with these fields, or None.

    One of another version of the protocol describes its host in its own way: of that the version counts, and nothing else.
    """
    kinds: Mapping[str, type[Said]] = {"found": _FOUND[question], "problem": _Problem}
    schema = kinds.get(answer.kind)
    if schema is None or answer.arrays:
        return f"a message {answer.kind[:100]!r}, which is none"
    if question == "describe" and answer.kind == "found" and type(answer.get("protocol")) is int and answer["protocol"] != PROTOCOL:
        return None
    if (unfit := unfit_in([dict(answer.fields)])) is not None:
        return unfit
    try:
        said = converted(dict(answer.fields), schema)
    except msgspec.ValidationError as error:
        return f"what is none ({str(error)[:300]})"
    if isinstance(said, _Described) and said.address is not None and not is_address(said.address):
        return f"{said.address[:100]!r} as its address, which is none"
    if isinstance(said, _Connected) and len(said.problems) != len(asked["peers"]):
        return f"{len(said.problems)} answers about {len(asked['peers'])} peers"
    return None
