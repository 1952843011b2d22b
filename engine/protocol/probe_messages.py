"""Questions to the probes of hosts, and answers, with bounds, as a host may be hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec

from .answer_checks import is_address
from .messages import PROTOCOL, Message, MessageParser, ProtocolError, WireMessage
from .node_messages import ErrorText, Host, Identity, Label, Name, OtherRelease, Port

MAX_PEERS = 4096
MAX_PORTS = 4
_Digest = Annotated[str, msgspec.Meta(max_length=255)]


class Problem(WireMessage):
    """Why a question has no result."""

    text: ErrorText


class Description(WireMessage, tag="found"):
    """Machine and network of a host."""

    protocol: int
    identity: Identity
    host: Host
    address: Label | None


class HostTime(WireMessage, tag="found"):
    """The host's clock."""

    seconds: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class DataDigest(WireMessage, tag="found"):
    """Digest of a dataset."""

    digest: _Digest


class ModelDigest(WireMessage, tag="found"):
    """Digest of the package of a user's model; None for other models."""

    digest: _Digest | None
    package: Label | None


class OpenPorts(WireMessage, tag="found"):
    """The ports at which the probe listens."""

    ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=MAX_PORTS)]


class PeerProblems(WireMessage, tag="found"):
    """Why each peer could not be reached, or None."""

    problems: Annotated[list[Name | None], msgspec.Meta(max_length=MAX_PEERS)]


class Question(WireMessage, forbid_unknown_fields=False):  # of a driver of any release
    """Question to a probe; its `ANSWER` may be a `Problem` instead."""

    ANSWER: ClassVar[type[WireMessage]]


class Describe(Question):
    """Describe the host, with the packages of a backend."""

    ANSWER: ClassVar = Description

    backend: str


class Time(Question):
    """Read the clock."""

    ANSWER: ClassVar = HostTime


class Data(Question):
    """Open a dataset."""

    ANSWER: ClassVar = DataDigest

    data: str
    data_dir: str | None


class Model(Question):
    """Import a model."""

    ANSWER: ClassVar = ModelDigest

    model: str
    backend: str


class Listen(Question):
    """Listen on some ports."""

    ANSWER: ClassVar = OpenPorts


class Connect(Question):
    """Try to reach the ports of other hosts."""

    ANSWER: ClassVar = PeerProblems

    peers: Sequence[tuple[str, int]]


QUESTIONS = MessageParser(Question)
_ANSWERS: Mapping[type[Question], MessageParser[WireMessage]] = {
    question: MessageParser(question.ANSWER, Problem) for question in Question.__subclasses__()
}


def read_probe_answer(question: Question, message: Message) -> WireMessage:
    """Return a probe's answer to a question. Raises ProtocolError, with what is wrong with it."""
    protocol = message.protocol
    if isinstance(question, Describe) and message.kind == "found" and protocol not in (None, PROTOCOL):
        return OtherRelease(protocol)
    answer = _ANSWERS[type(question)].parse(message)
    if isinstance(answer, Description) and answer.address is not None and not is_address(answer.address):
        raise ProtocolError(f"{answer.address[:100]!r} as its address, which is none")
    if isinstance(answer, PeerProblems) and isinstance(question, Connect) and len(answer.problems) != len(question.peers):
        raise ProtocolError(f"{len(answer.problems)} answers about {len(question.peers)} peers")
    return answer
