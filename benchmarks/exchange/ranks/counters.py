"""Counters of this process and its node during all-reduces.

They are context switches, time on a core, waiting time and packets.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = b"all-reduce"
"""Written before and after each counted all-reduce, to split a trace of system calls there."""

WARM_UP = 50

PACKETS: dict[str, dict[str, tuple[str, ...]]] = {
    "/proc/net/snmp": {"Tcp": ("OutSegs", "InSegs", "RetransSegs")},
    "/proc/net/netstat": {"TcpExt": ("DelayedACKs", "TCPPureAcks", "TCPHPHits", "TCPAutoCorking", "TCPOrigDataSent")},
}
"""Counters of the whole network namespace: in a virtual node, of this rank alone."""


def count(run: Callable[[int], None], barrier: Callable[[], None], iterations: int, marks: bool) -> dict[str, Any]:
    """Return the mean counters of one of `iterations` all-reduces, and the seconds of each.

    With `marks` each is called separately.
    """
    run(WARM_UP)
    barrier()
    with open(os.devnull, "wb", buffering=0) as null:
        before, began = _read(), time.perf_counter()
        seconds = []
        if marks:
            for _ in range(iterations):
                null.write(MARK)
                start = time.perf_counter()
                run(1)
                seconds.append(time.perf_counter() - start)
            null.write(MARK)
        else:
            run(iterations)
        taken, after = time.perf_counter() - began, _read()
    threads = {}
    for key, (name, counts) in after["threads"].items():
        old = before["threads"].get(key, (name, dict.fromkeys(counts, 0)))[1]
        change = {what: (counts[what] - old[what]) / iterations for what in counts}
        if any(change.values()):
            threads[f"{name} {key}"] = change
    packets = {name: (after["packets"][name] - before["packets"][name]) / iterations for name in after["packets"]}
    process = {name: (after["process"][name] - before["process"][name]) / iterations for name in after["process"]}
    return {"mean_seconds": taken / iterations, "seconds": seconds, "process": process, "threads": threads, "packets": packets}


def _read() -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    process = {
        "voluntary_switches": usage.ru_nvcsw,
        "involuntary_switches": usage.ru_nivcsw,
        "user_seconds": usage.ru_utime,
        "system_seconds": usage.ru_stime,
    }
    return {"process": process, "threads": {path.name: _thread(path) for path in Path("/proc/self/task").iterdir()}, "packets": _packets()}


def _thread(path: Path) -> tuple[str, dict[str, float]]:
    """Return a thread's name, its switches, and its seconds on a core and waiting for one."""
    status = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
    on_core, waiting, _ = (path / "schedstat").read_text().split()
    return status["Name"].strip(), {
        "voluntary_switches": int(status["voluntary_ctxt_switches"]),
        "involuntary_switches": int(status["nonvoluntary_ctxt_switches"]),
        "core_seconds": int(on_core) / 1e9,
        "waiting_seconds": int(waiting) / 1e9,
    }


def _packets() -> dict[str, int]:
    packets: dict[str, int] = {}
    for file, wanted in PACKETS.items():
        lines = Path(file).read_text().splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            kind, *columns = names.split()
            table = dict(zip(columns, values.split()[1:], strict=True))
            packets |= {name: int(table[name]) for name in wanted.get(kind.rstrip(":"), ()) if name in table}
    return packets
