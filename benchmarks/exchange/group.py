"""Ranks that sum vectors, each on another node, and the report of the first."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nodes import nodes
from ..processes import Group, MeasurementError, environment

RANKS = Path(__file__).parent / "ranks"

ADDERS = {"direct": "mesh.py", "gloo": "gloo.py", "TensorFlow": "tf_ring.py"}
"""All-reduce implementations by the names in tables."""


def run_ranks(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    network: str,
    bits_per_second: float | None = None,
    first_under: Sequence[str] = (),
    timeout_seconds: float = 300.0,
) -> Any:
    """Run a script of ranks/ on each node and return rank 0's report, a JSON value.

    Raises MeasurementError if one fails.
    `first_under` is a command that starts rank 0, such as one that traces it.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as name, nodes(ranks, network, bits_per_second) as made:
        folder, shared = Path(name), {"ranks": ranks, "addresses": made.addresses, "ports": made.ports, "secret": secrets.token_hex(32)}
        with Group(folder) as group:
            names = [f"rank-{rank}" for rank in range(ranks)]
            for rank, place in enumerate(names):
                command = [*(first_under if rank == 0 else ()), sys.executable, str(RANKS / script), *arguments]
                command += ["--parent", str(os.getpid())]
                variables = {"GLOO_SOCKET_IFNAME": made.interface, "BENCHMARK_RANKS": json.dumps({**shared, "rank": rank}), "TMPDIR": name}
                group.start(place, command, environment(variables), made.start(rank))
            output = group.wait_for(names[0], timeout_seconds)
            group.wait_for_rest(names[1:])
    results = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    if len(results) != 1:
        raise MeasurementError(f"{script} printed {len(results)} results")
    return json.loads(results[0])
