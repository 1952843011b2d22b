"""What one small all-reduce is made of: ``python -m benchmarks.exchange.anatomy [--only NAME …] [--bytes N] [--ranks N] [--timeline] …``.

First without a tracer: seconds, switches of threads, time on a core and waiting for one, packets, as the kernel counts them. Then rank 0
under strace, which slows it down, so that from there only the calls, their order and the bytes that they copy are taken.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain.core.units import parse_bandwidth

from .. import machine
from ..processes import MeasurementError
from .group import ADDERS, run_ranks
from .table import time_text
from .traces import RECEIVING, SENDING, WAITING, AllReduce, Call, cut, per_thread, read

__all__ = ["counted_text", "main", "parse", "timeline_text", "traced_text"]

LOGREG_BYTES = 31_400
"""The gradients of logistic regression on 784 features and 10 classes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code: 0, 1 where a run failed, 2 without strace."""
    given = parse(arguments)
    if given.traced and shutil.which("strace") is None:
        print("benchmarks.exchange.anatomy: strace is not installed; install it, or give --traced 0", file=sys.stderr)
        return 2
    print(machine.sentence(machine.describe(given.network, None)), flush=True)
    try:
        for name in given.only:
            print(f"\n## {name}, {given.bytes:,} bytes, {given.ranks} ranks\n", flush=True)
            print(counted_text(_counted(name, given)), flush=True)
            if given.traced:
                calls = _traced(name, given)
                found = cut(calls)
                print("\n" + traced_text(found, given.bytes), flush=True)
                delays = sum("TCP_NODELAY" in call.arguments for call in calls)
                print(f"sockets told to send at once (TCP_NODELAY): {delays}")
                if given.timeline:
                    print("\n" + timeline_text(sorted(found, key=lambda one: one.ended - one.began)[len(found) // 2]), flush=True)
    except MeasurementError as error:
        print(f"benchmarks.exchange.anatomy: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.anatomy", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(ADDERS), default=list(ADDERS), help="these exchanges (default: all)")
    parser.add_argument("--bytes", type=int, default=LOGREG_BYTES, metavar="N", help=f"of the vector (default {LOGREG_BYTES:,})")
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="nodes with a rank each (default 3)")
    parser.add_argument("--counted", type=int, default=1000, metavar="N", help="all-reduces without a tracer (default 1000)")
    parser.add_argument("--traced", type=int, default=50, metavar="N", help="all-reduces under strace (default 50); 0: none")
    parser.add_argument("--timeline", action="store_true", help="all calls of the all-reduce that took the median time under strace")
    parser.add_argument("--bandwidth", type=parse_bandwidth, metavar="RATE", help="speed of each node's link, such as 1gbit")
    parser.add_argument("--network", choices=("isolated", "host"), default="isolated", help="virtual nodes, or loopback")
    return parser.parse_args(arguments)


def _counted(name: str, given: argparse.Namespace) -> Mapping[str, Any]:
    arguments = ["--sizes", str(given.bytes), "--count", str(given.counted)]
    found = run_ranks(ADDERS[name], arguments, ranks=given.ranks, network=given.network, bits_per_second=given.bandwidth)
    counted: Mapping[str, Any] = found[str(given.bytes)]
    return counted


def _traced(name: str, given: argparse.Namespace) -> list[Call]:
    """Trace rank 0; the tracer is its grandchild (-D), so that the rank stays a child of this process."""
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as folder:
        trace = Path(folder) / "trace"
        run_ranks(
            ADDERS[name],
            ["--sizes", str(given.bytes), "--count", str(given.traced), "--marks"],
            ranks=given.ranks,
            network=given.network,
            bits_per_second=given.bandwidth,
            first_under=["strace", "-D", "-f", "-ttt", "-T", "-s", "16", "-o", str(trace)],
        )
        with trace.open(encoding="utf-8", errors="replace") as lines:
            return read(lines)


def counted_text(found: Mapping[str, Any]) -> str:
    """Return what the kernel counted for one all-reduce: a line for the process, its packets, and each thread."""
    process, packets = found["process"], found["packets"]
    lines = [
        f"one all-reduce: {time_text(found['mean_seconds'])}",
        f"process: {process['voluntary_switches']:.2f} waits (voluntary switches), "
        f"{process['involuntary_switches']:.2f} times interrupted, "
        f"{time_text(process['user_seconds'])} user, {time_text(process['system_seconds'])} system",
        "packets: " + ", ".join(f"{name} {value:.2f}" for name, value in packets.items()),
        "",
        "| thread | waits | interrupted | on a core | waiting for one |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, thread in sorted(found["threads"].items(), key=lambda item: -item[1]["core_seconds"]):
        if thread["voluntary_switches"] >= 0.01 or thread["core_seconds"] > 1e-6:
            switches = f"{thread['voluntary_switches']:.2f} | {thread['involuntary_switches']:.2f}"
            lines.append(f"| {name} | {switches} | {time_text(thread['core_seconds'])} | {time_text(thread['waiting_seconds'])} |")
    return "\n".join(lines)


def traced_text(found: Sequence[AllReduce], size_bytes: int) -> str:
    """Return the calls of one all-reduce in the mean: a line for each thread, and the bytes that were copied."""
    lines = ["| thread | calls of one all-reduce |", "|---|---|"]
    for number, (_, calls) in enumerate(sorted(per_thread(found).items())):
        lines.append(f"| {number} | {', '.join(f'{name} {count / len(found):.2f}' for name, count in calls.most_common())} |")
    total = sum(len(one.calls) for one in found) / len(found)
    waiting = sum(call.name in WAITING for one in found for call in one.calls) / len(found)
    out, into = (sum(one.bytes_of(names) for one in found) / len(found) for names in (SENDING, RECEIVING))
    lines.append(f"\n{total:.1f} system calls, {waiting:.1f} of them to wait or to wake; copied out {out:,.0f} bytes, in {into:,.0f}")
    lines.append(f"({out / size_bytes:.2f} and {into / size_bytes:.2f} times the vector)")
    return "\n".join(lines)


def timeline_text(one: AllReduce) -> str:
    """Return all calls of an all-reduce, a line each: when it began, by which thread, how long it took and what it returned."""
    threads = {thread: number for number, thread in enumerate(sorted({call.thread for call in one.calls}))}
    lines = [f"{time_text(one.ended - one.began)} under strace:"]
    for call in one.calls:
        taken = "?" if call.seconds is None else time_text(call.seconds)
        lines.append(f"{(call.began - one.began) * 1e6:8.0f} µs  thread {threads[call.thread]}  {call.name} = {call.result}  ({taken})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
