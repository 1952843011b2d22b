"""Which hosts are the nodes of a run? Reads ``--hosts`` and ``--hostfile``, in the forms of Slurm and of MPI as well.

A list has hosts between commas, of which each may end with ``:COUNT``, its number of processes (``mpirun --host``), and may have ranges in
brackets (``node[01-03,7]``, as Slurm writes lists). A file has such a list on each line, after which ``slots=COUNT`` may stand (Open MPI);
a host that it names several times has as many processes (``PBS_NODEFILE``, ``SLURM_HOSTFILE``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ...core.errors import UsageError
from ...core.job import MOST_NODES
from ...core.settings.config_files import hand_written
from ...core.untrusted.bounded_json import UnreadableError, open_regular

__all__ = ["Host", "parse_hosts", "read_hostfile"]

MOST_BYTES = 1 << 20
"""Of a hostfile: a line of 256 bytes for each of the most nodes that a run can have."""

MOST_ENTRIES = 1 << 17
"""Of a hostfile, in which a host may stand once for each of its cores: more than a file of so many bytes has of names of eight letters."""

MOST_CHARACTERS = 512
"""Of a host, maybe with a user before it; names that are known to DNS have half of it."""

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_]|::)[A-Za-z0-9_.:%-]*")
"""A host's name or address, maybe with a user. It cannot begin with a dash, which a program would take for an option."""

_BRACKETED_ADDRESS = re.compile(r"(?:[^\[\]@]*@)?\[[0-9A-Fa-f.]*:")
_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host as it was written, maybe with a user before it, and its number of processes where that was said."""

    name: str
    processes: int | None = None


def parse_hosts(text: str, where: str = "--hosts") -> list[Host]:
    """Return the hosts of a list, in its order. Raises UsageError, which begins with `where`, for what is none, or a host twice."""
    return _checked(_hosts_of_list(text, where), where)


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Return the hosts of a file, in its order; what follows ``#`` is a comment. Raises UsageError as `parse_hosts` does.

    A host that stands there several times has the sum of its processes, one for each time where no number is said.
    """
    where = f"--hostfile {os.fspath(path)!r}"
    try:
        with open_regular(Path(path)) as file:
            data = file.read(MOST_BYTES + 1)
        text = hand_written(data)
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}.") from error
    except UnreadableError as error:
        raise UsageError(f"{where}: {error}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is no text.") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{where}: is larger than {MOST_BYTES >> 20} MiB; a run has at most {MOST_NODES:,} nodes.")
    lines = enumerate(text.split("\n"), 1)
    hosts = (host for number, line in lines for host in _hosts_of_line(line.partition("#")[0], f"{where}, line {number}"))
    return _checked(hosts, where, repeats=True)


def _hosts_of_list(text: str, where: str) -> Iterator[Host]:
    return (host for item in _items(text, where) for host in _hosts_of(item, where))


def _hosts_of_line(line: str, where: str) -> Iterator[Host]:
    first, *options = line.split() or [""]
    if not first:
        return
    slots = None
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key.lower() not in ("slots", "max_slots", "max-slots"):
            raise UsageError(f"{where}: got {option!r} after the host; allowed: slots=COUNT.")
        if not _COUNT.fullmatch(value):
            raise UsageError(f"{where}: got {option!r}; allowed: a whole number of processes, from 1 to 9999.")
        if key.lower() == "slots" and slots is not None:
            raise UsageError(f"{where}: says slots= twice.")
        if key.lower() == "slots":
            slots = int(value)
    for host in _hosts_of_list(first, where):
        yield host if slots is None else Host(host.name, slots)


def _items(text: str, where: str) -> Iterator[str]:
    """Yield what stands between commas outside of brackets."""
    if not text.strip():
        raise UsageError(f"{where}: got no host; give at least one, such as node0,node1.")
    before = ","
    for match in re.finditer(r"(?:\[[^\[\]]*\]|[^,\[\]]++)+|[,\[\]]|$", text):
        item = match[0] or ","  # the end
        if item == "," == before:
            raise UsageError(f"{where}: got {text[:120]!r}, in which an entry is empty; leave it out.")
        before = item
        if item in "[]":
            raise UsageError(f"{where}: got {text[:120]!r}, in which a bracket has no other; write ranges as node[01-03,7].")
        if item != ",":
            yield item.strip()


def _hosts_of(item: str, where: str) -> Iterator[Host]:
    if _BRACKETED_ADDRESS.match(item):
        raise UsageError(
            f"{where}: got {item[:120]!r}; IPv6 addresses are written without brackets, such as fe80::1, and --procs-per-node or a "
            "hostfile's line (fe80::1 slots=2) says how many processes they have."
        )
    name, colon, count = item.rpartition(":")
    processes = None
    if colon and ":" not in name:  # an IPv6 address has several
        if not _COUNT.fullmatch(count):
            raise UsageError(f"{where}: got {item[:120]!r}; after the colon belongs a number of processes, from 1 to 9999.")
        item, processes = name, int(count)
    for host in _expanded(item, where):
        if len(host) > MOST_CHARACTERS or not _NAME.fullmatch(host):
            raise UsageError(f"{where}: got {host[:120]!r}; allowed: names or addresses of hosts with commas between, such as node0,node1.")
        yield Host(host, processes)


def _expanded(item: str, where: str) -> Iterator[str]:
    """Yield the names that ranges stand for, in order: ``a[08-10]`` is a08, a09 and a10."""
    parts = re.split(r"\[([^\[\]]*)\]", item)
    choices: list[list[str]] = []
    total = 1
    for place, part in enumerate(parts):
        choices.append([part] if place % 2 == 0 else _numbers(part, item, where))
        total *= len(choices[-1])
        if total > MOST_NODES:
            raise UsageError(f"{where}: got {item[:120]!r}, which are {total:,} hosts or more; a run has at most {MOST_NODES:,} nodes.")
    yield from map("".join, product(*choices))


def _numbers(text: str, item: str, where: str) -> list[str]:
    """Return the numbers of a range as they are written: ``08-10,3`` is 08, 09, 10 and 3."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        count = int(last) - int(first) + 1
        if count < 1 or len(found) + count > MOST_NODES:
            raise UsageError(
                f"{where}: got {part[:120]!r} in {item[:120]!r}; allowed: a number, or a range such as 01-03, of at most {MOST_NODES:,}."
            )
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def _checked(hosts: Iterable[Host], where: str, *, repeats: bool = False) -> list[Host]:
    """Return the hosts, with `repeats` one that is there several times with all of its processes.

    Raises UsageError where there is none, one twice else, or too many, of which no more are made than that takes.
    """
    found: dict[str, Host] = {}
    for number, host in enumerate(hosts):
        if number == MOST_ENTRIES:
            raise UsageError(f"{where}: names hosts more than {MOST_ENTRIES:,} times; write {host.name} slots=COUNT for several processes.")
        if host.name in found and repeats:
            found[host.name] = Host(host.name, (found[host.name].processes or 1) + (host.processes or 1))
            continue
        if host.name in found:
            raise UsageError(f"{where}: names {host.name!r} twice; several processes on one host are {host.name}:2, or --procs-per-node 2.")
        if len(found) == MOST_NODES:
            raise UsageError(f"{where}: names more than {MOST_NODES:,} hosts; a run has at most {MOST_NODES:,} nodes.")
        found[host.name] = host
    if not found:
        raise UsageError(f"{where}: names no host; give at least one, such as node0.")
    return list(found.values())
