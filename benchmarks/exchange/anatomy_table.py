"""Table of all-reduces: a column for each implementation, a row for each counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .table import time_text
from .traces import RECEIVING, SENDING, WAITING, AllReduce

BUSY_SECONDS = 1e-6
"""On a core during an all-reduce: a thread with less does something else."""


def column(counted: Mapping[str, Any], traced: Sequence[AllReduce], size_bytes: int) -> dict[str, str]:
    """Return rank 0's mean counters of one all-reduce, from the kernel and from a trace."""
    process, packets, threads = counted["process"], counted["packets"], counted["threads"].values()
    calls = [call for all_reduce in traced for call in all_reduce.calls]

    def a_turn(number: float) -> str:
        return f"{number / len(traced):,.1f}"

    out, into = (sum(all_reduce.bytes_of(names) for all_reduce in traced) / len(traced) for names in (SENDING, RECEIVING))
    return {
        "time": time_text(counted["mean_seconds"]),
        "on a core, all threads": time_text(process["user_seconds"] + process["system_seconds"]),
        "of that in the system": time_text(process["system_seconds"]),
        "ready, but waiting for a core, all threads": time_text(sum(thread["waiting_seconds"] for thread in threads)),
        "threads that take part": str(sum(thread["core_seconds"] > BUSY_SECONDS for thread in threads)),
        "times that a thread waits (voluntary switches)": f"{process['voluntary_switches']:.1f}",
        "times that a thread is put off its core": f"{process['involuntary_switches']:.1f}",
        "system calls": a_turn(len(calls)),
        "of these to send": a_turn(sum(call.name in SENDING for call in calls)),
        "to receive": a_turn(sum(call.name in RECEIVING for call in calls)),
        "to wait or to wake another thread": a_turn(sum(call.name in WAITING for call in calls)),
        "bytes copied to the system, of the vector": f"{out / size_bytes:.2f}",
        "bytes copied from the system, of the vector": f"{into / size_bytes:.2f}",
        "TCP segments out, in": f"{packets['OutSegs']:.1f}, {packets['InSegs']:.1f}",
        "acknowledgements that were delayed": f"{packets['DelayedACKs']:.2f}",
        "segments sent again": f"{packets['RetransSegs']:.2f}",
    }


def markdown(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table. All columns have the same lines."""
    labels = next(iter(columns.values())).keys()
    lines = [f"| of one all-reduce | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    return "\n".join([*lines, *(f"| {label} | {' | '.join(column[label] for column in columns.values())} |" for label in labels)])
