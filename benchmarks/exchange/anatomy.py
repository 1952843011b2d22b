"""Profile of one small all-reduce.

Usage: ``python -m benchmarks.exchange.anatomy [--only NAME …] [--bytes N] [--ranks N] [--timeline] …``
First without a tracer: the kernel's counts of seconds, context switches, time on a core, waiting time and packets. Then with rank 0
under strace, which slows it down: only the calls, their order and the bytes that they copy are used.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain.core.units import bandwidth_text, parse_bandwidth

from .. import machine
from ..experiments.page import fill
from ..processes import MeasurementError
from .anatomy_table import column, markdown
from .group import ADDERS, run_ranks
from .table import DOCS, machine_text, time_text
from .traces import AllReduce, Call, cut, per_thread, read

PAGE = DOCS / "synchronous-steps.md"

LOGREG_BYTES = 31_400
"""The gradients of logistic regression on 784 features and 10 classes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code: 0, 1 where a run failed, 2 without strace."""
    options = parse(arguments)
    if options.traced and shutil.which("strace") is None:
        print("benchmarks.exchange.anatomy: strace is not installed; install it, or give --traced 0", file=sys.stderr)
        return 2
    facts = machine.describe(options.network, None)
    print(machine.sentence(facts), flush=True)
    columns: dict[str, dict[str, str]] = {}
    try:
        for name in options.only:
            print(f"\n## {name}, {options.bytes:,} bytes, {options.ranks} ranks\n", flush=True)
            counted = _counted(name, options)
            print(counted_text(counted), flush=True)
            if options.traced:
                calls = _traced(name, options)
                all_reduces = cut(calls)
                columns[name] = column(counted, all_reduces, options.bytes)
                print("\n" + traced_text(all_reduces), flush=True)
                print(f"\nsockets without send delay (TCP_NODELAY): {sum('TCP_NODELAY' in call.arguments for call in calls)}")
                if options.timeline:
                    print(
                        "\n"
                        + timeline_text(
                            sorted(all_reduces, key=lambda all_reduce: all_reduce.ended - all_reduce.began)[len(all_reduces) // 2]
                        ),
                        flush=True,
                    )
    except MeasurementError as error:
        print(f"benchmarks.exchange.anatomy: {error}", file=sys.stderr)
        return 1
    if columns:
        print("\n" + markdown(columns))
    if options.page:
        links = "links as fast as the machine copies" if options.bandwidth is None else f"links of {bandwidth_text(options.bandwidth)}"
        note = f"{options.bytes:,} bytes, {machine_text(facts, options.ranks)}, {links}; counted over {options.counted} all-reduces"
        text = f"{note}, traced over {options.traced}.\n\n{markdown(columns)}"
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "anatomy", text), encoding="utf-8")
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
    parser.add_argument("--page", action="store_true", help="write the table into docs/synchronous-steps.md")
    options = parser.parse_args(arguments)
    if options.page and not options.traced:
        parser.error("--page: the table needs a trace as well, so not with --traced 0")
    return options


def _counted(name: str, options: argparse.Namespace) -> Mapping[str, Any]:
    arguments = ["--sizes", str(options.bytes), "--count", str(options.counted)]
    report = run_ranks(ADDERS[name], arguments, ranks=options.ranks, network=options.network, bits_per_second=options.bandwidth)
    counted: Mapping[str, Any] = report[str(options.bytes)]
    return counted


def _traced(name: str, options: argparse.Namespace) -> list[Call]:
    """Trace rank 0; the tracer is its grandchild (-D), so the rank stays our child."""
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as folder:
        trace = Path(folder) / "trace"
        run_ranks(
            ADDERS[name],
            ["--sizes", str(options.bytes), "--count", str(options.traced), "--marks"],
            ranks=options.ranks,
            network=options.network,
            bits_per_second=options.bandwidth,
            first_under=["strace", "-D", "-f", "-ttt", "-T", "-s", "16", "-o", str(trace)],
        )
        with trace.open(encoding="utf-8", errors="replace") as lines:
            return read(lines)


def counted_text(counters: Mapping[str, Any]) -> str:
    """Format the kernel's counts for one all-reduce: the process, its packets, each thread."""
    process, packets = counters["process"], counters["packets"]
    lines = [
        f"one all-reduce: {time_text(counters['mean_seconds'])}",
        f"process: {process['voluntary_switches']:.2f} waits (voluntary switches), "
        f"{process['involuntary_switches']:.2f} times interrupted, "
        f"{time_text(process['user_seconds'])} user, {time_text(process['system_seconds'])} system",
        "packets: " + ", ".join(f"{name} {value:.2f}" for name, value in packets.items()),
        "",
        "| thread | waits | interrupted | on a core | waiting for one |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, thread in sorted(counters["threads"].items(), key=lambda item: -item[1]["core_seconds"]):
        if thread["voluntary_switches"] >= 0.01 or thread["core_seconds"] > 1e-6:
            switches = f"{thread['voluntary_switches']:.2f} | {thread['involuntary_switches']:.2f}"
            lines.append(f"| {name} | {switches} | {time_text(thread['core_seconds'])} | {time_text(thread['waiting_seconds'])} |")
    return "\n".join(lines)


def traced_text(all_reduces: Sequence[AllReduce]) -> str:
    """Return the calls of one all-reduce in the mean: a line for each thread."""
    lines = ["| thread | calls of one all-reduce |", "|---|---|"]
    for number, (_, calls) in enumerate(sorted(per_thread(all_reduces).items())):
        lines.append(f"| {number} | {', '.join(f'{name} {count / len(all_reduces):.2f}' for name, count in calls.most_common())} |")
    return "\n".join(lines)


def timeline_text(all_reduce: AllReduce) -> str:
    """Format all calls of an all-reduce: start, thread, duration and result."""
    threads = {thread: number for number, thread in enumerate(sorted({call.thread for call in all_reduce.calls}))}
    lines = [f"{time_text(all_reduce.ended - all_reduce.began)} under strace:"]
    for call in all_reduce.calls:
        taken = "?" if call.seconds is None else time_text(call.seconds)
        lines.append(
            f"{(call.began - all_reduce.began) * 1e6:8.0f} µs  thread {threads[call.thread]}  {call.name} = {call.result}  ({taken})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
