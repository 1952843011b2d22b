"""A trace of system calls (strace -f -ttt -T), cut into the all-reduces that it shows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .ranks.counters import MARK

_LINE = re.compile(r"^(?P<thread>\d+) +(?P<time>\d+\.\d+) (?:<\.\.\. (?P<resumed>\w+) resumed>|(?P<name>\w+)\()(?P<rest>.*)$")
_END = re.compile(r"= (?P<result>-?\d+|0x[0-9a-f]+|\?)(?P<error> E[A-Z]+)?[^=]*?(?:<(?P<seconds>\d+\.\d+)>)?$")

SENDING = {"write", "writev", "send", "sendto", "sendmsg", "sendmmsg"}
RECEIVING = {"read", "readv", "recv", "recvfrom", "recvmsg", "recvmmsg"}
WAITING = {"futex", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"}


@dataclass
class Call:
    """One system call: thread, start (seconds since the epoch), duration and result.

    `seconds` and `result` are None where the trace does not show its end. `moved` are the bytes that it copied between the process and
    the system; 0 for calls that copy none.
    """

    thread: int
    name: str
    began: float
    arguments: str = field(repr=False)
    seconds: float | None = None
    result: int | None = None

    @property
    def moved(self) -> int:
        """The bytes copied."""
        return max(self.result or 0, 0) if self.name in SENDING | RECEIVING else 0


@dataclass(frozen=True)
class AllReduce:
    """The calls that began between two marks, by all threads."""

    began: float
    ended: float
    calls: Sequence[Call]

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return how many bytes calls of these names copied."""
        wanted = set(names)
        return sum(call.moved for call in self.calls if call.name in wanted)


def read(lines: Iterable[str]) -> list[Call]:
    """Return the calls of a trace by start; lines about signals and exits are skipped."""
    calls: list[Call] = []
    unfinished: dict[int, Call] = {}
    for line in lines:
        match = _LINE.match(line.rstrip("\n"))
        if match is None:
            continue
        thread = int(match["thread"])
        if match["resumed"]:
            call = unfinished.pop(thread, None)
            if call is None:
                continue
        else:
            call = Call(thread, match["name"], float(match["time"]), match["rest"])
            calls.append(call)
            if match["rest"].endswith("<unfinished ...>"):
                unfinished[thread] = call
                continue
        if end := _END.search(match["rest"]):
            call.seconds = None if end["seconds"] is None else float(end["seconds"])
            call.result = None if end["result"] == "?" else int(end["result"], 0)
    return calls


def cut(calls: Sequence[Call]) -> list[AllReduce]:
    """Return the calls between neighbouring marks. Raises ValueError for fewer than two marks."""
    marks = [place for place, call in enumerate(calls) if call.name == "write" and MARK.decode() in call.arguments]
    if len(marks) < 2:
        raise ValueError(f"{len(marks)} marks in the trace")
    return [AllReduce(calls[first].began, calls[last].began, calls[first + 1 : last]) for first, last in pairwise(marks)]


def per_thread(all_reduces: Sequence[AllReduce]) -> Mapping[int, Counter[str]]:
    """Return for each thread how often all of these all-reduces made each call."""
    counted: dict[int, Counter[str]] = defaultdict(Counter)
    for all_reduce in all_reduces:
        for call in all_reduce.calls:
            counted[call.thread][call.name] += 1
    return counted
