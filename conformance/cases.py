"""What backends are asked for in the suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

__all__ = ["OPTIMIZERS", "OPTIONAL_CAPABILITIES", "UNEVEN_BATCHES", "every_optimizer"]

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "momentum": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "schedule": "step", "schedule_gamma": 0.5},
    "nesterov": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "weight-decay": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 1e-2, "warmup_steps": 50},
    "adam": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-3},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 1e-2, "schedule": "cosine"},
}
"""Every update rule, with every schedule among them."""


QUICK = {"adam": 1, "adamw": 2}
"""Update rules, with the number of workers, that need no marker: each of their own kind, one of them with a schedule."""


def every_optimizer() -> list[Any]:
    """Return each optimiser on one, two and three workers: a global batch of 64 examples as 64, 32 + 32, 22 + 21 + 21.

    One case on one worker and one on two need no marker; the rest takes long. Plain descent, on three workers, is among the uneven batches.
    """
    cases: list[Any] = []
    for name in OPTIMIZERS:
        for workers in (1, 2, 3):
            marks = () if QUICK.get(name) == workers else pytest.mark.slow
            cases.append(pytest.param(name, 64, workers, id=f"{name}-{workers}w", marks=marks))
    return cases


UNEVEN_BATCHES = [
    pytest.param("sgd", 10, 3, id="sgd-10-over-3w", marks=pytest.mark.slow),
    pytest.param("adam", 7, 2, id="adam-7-over-2w", marks=pytest.mark.slow),
    pytest.param("sgd", 2, 3, id="sgd-2-over-3w"),
]
"""Global batches that do not divide; the one smaller than the number of workers, the hardest, needs no marker."""

OPTIONAL_CAPABILITIES: Mapping[str, Mapping[str, Any]] = {
    "mode": {"mode": "async"},
    "precision": {"precision": "bf16"},
    "device": {"device": "gpu"},
    "augment": {"augment": "crop"},
    "deterministic": {"deterministic": True},
    "profile": {"profile": 5},
    "compile": {"compile": "auto"},
    "accumulate": {"accumulate": 2},
    "clip_norm": {"clip_norm": 1.0},
    "ema_decay": {"ema_decay": 0.9},
    "exchange": {"exchange": "direct"},
}
"""By option, what a job asks for beyond the least that a backend can."""
