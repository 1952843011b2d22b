"""Which faults are injected into which run, and at which of its steps: drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crosstrain.backends.loading import load_backend


@dataclass(frozen=True)
class Combination:
    """A backend and a mode, with enough updates for all faults of a run.

    That is at least ten seconds for each. In async mode the remaining workers train on, also during a pause.
    """

    backend: str
    mode: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.mode}"

    @property
    def workers_rejoin(self) -> bool:
        """Whether a lost worker restarts alone, as the backend declares it."""
        return self.mode == "async" and "worker" in load_backend(self.backend).capabilities.rejoins

    @property
    def arguments(self) -> list[str]:
        """The command's options: three virtual nodes, and a checkpoint each fiftieth of the run."""
        exact = ["--deterministic"] if self.mode == "sync" else ["--ps", "2"]
        job = ["--backend", self.backend, "--mode", self.mode, "--nodes", "3", "--data", "glyphs28", "--batch-size", "10", *exact]
        every = ["--steps", str(self.steps), "--checkpoint-every", f"{self.steps // 50}steps", "--eval-every", "end"]
        return [
            *job,
            *every,
            "--sample-interval",
            "0.1",
            "--no-tensorboard",
            "--no-calibrate",
            "--stall-timeout",
            "8",
            "--node-timeout",
            "5",
        ]


COMBINATIONS = (
    Combination("torch", "sync", 16_000),
    Combination("torch", "async", 240_000),
    Combination("tf", "sync", 6_000),
    Combination("tf", "async", 90_000),
)

KILLS = ("worker", "chief", "ps", "agent", "driver")
"""Processes that are killed (SIGKILL). The chief of a sync run is rank 0."""

KINDS = (*KILLS, "pause-task", "pause-agent", "pause-driver", "stop-task", "stop-agent", "cut", "reset")
"""Kinds of faults. pause: SIGSTOP for 5 s; stop: for ever; cut: a node's link is down for 3 s; reset: its connections are."""

PER_RUN = 5
"""Faults of one run; the death of the driver is a run of its own."""


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, its run and its `step`; `place` selects the target."""

    combination: str
    kind: str
    number: int
    run: str
    step: int
    place: int

    @property
    def key(self) -> str:
        return f"{self.combination} {self.kind} {self.number}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "key": self.key}


def planned(seed: int, per_kill: int, kinds: Sequence[str]) -> list[Fault]:
    """Return the faults of a seed, grouped by run.

    `per_kill` of each kind of kill, a fifth as many of the others.
    """
    faults: list[Fault] = []
    wanted = {name: [] for name in (combination.name for combination in COMBINATIONS)}
    for kind in kinds:
        able = [candidate for candidate in COMBINATIONS if candidate.mode == "async" or kind != "ps"]
        for number in range(per_kill if kind in KILLS else max(1, per_kill // 5)):
            wanted[able[number % len(able)].name].append((kind, number))
    for combination in COMBINATIONS:
        drawn = random.Random(f"{seed} {combination.name} {per_kill} {' '.join(kinds)}")
        mine = wanted[combination.name]
        drawn.shuffle(mine)
        rest = [item for item in mine if item[0] != "driver"]
        runs = [rest[begin : begin + PER_RUN] for begin in range(0, len(rest), PER_RUN)]
        runs += [[item] for item in mine if item[0] == "driver"]
        for index, run in enumerate(runs):
            part = combination.steps // (len(run) + 1)
            steps = [part * (place + 1) + drawn.randrange(-part // 3, part // 3) for place in range(len(run))]
            for (kind, number), step in zip(run, steps, strict=True):
                faults.append(Fault(combination.name, kind, number, f"{combination.name}-{seed}-{index}", step, drawn.randrange(1000)))
    return faults
