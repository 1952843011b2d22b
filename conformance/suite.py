"""The suite itself.

Subclass `BackendConformance` in a pytest module and name the backend::

    class TestMyBackend(BackendConformance):
        backend = "mine"

Every case runs real processes through the command ``trainer``. Tolerances: losses of 200 steps within 1e-4 relative of a float64
reference (1e-5 for SGD without momentum), final weights within 1e-4 norm-wise, at any number of workers of one global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ..backends.loading import load_backend
from ..core.job import Job
from ..data.store.stored_dataset import open_dataset
from ..records.store.run_directory import RunReader
from .reference import Trained, train_logistic_regression
from .runs import FinishedRun, norm_wise_difference, relative_difference, run_job, trainer

__all__ = ["OPTIMIZERS", "BackendConformance"]

STEPS = 200
LOSS_TOLERANCE = 1e-4
PLAIN_SGD_LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
ASYNC_ACCURACY_TOLERANCE = 0.02

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "momentum": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "schedule": "step", "schedule_gamma": 0.5},
    "nesterov": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "weight-decay": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 1e-2, "warmup_steps": 50},
    "adam": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-3},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 1e-2, "schedule": "cosine"},
}
"""Every update rule, with every schedule among them."""


def _every_optimizer() -> list[Any]:
    """Each optimiser on one, two and three workers: a global batch of 64 examples as 64, 32 + 32, 22 + 21 + 21.

    Every rule on one or two workers needs no marker; the rest takes long. Three workers are among the uneven batches.
    """
    cases: list[Any] = []
    for place, name in enumerate(OPTIMIZERS):
        for workers in (1, 2, 3):
            marks = () if workers == place % 2 + 1 else pytest.mark.slow
            cases.append(pytest.param(name, 64, workers, id=f"{name}-{workers}w", marks=marks))
    return cases


UNEVEN_BATCHES = [
    pytest.param("sgd", 10, 3, id="sgd-10-over-3w"),
    pytest.param("adam", 7, 2, id="adam-7-over-2w"),
    pytest.param("sgd", 2, 3, id="sgd-2-over-3w"),
]
"""Global batches that do not divide, one of them smaller than the number of workers."""


@cache
def reference(optimizer: str, global_batch: int) -> Trained:
    """Train the reference once per process."""
    job = Job.model_validate({"backend": "reference", "steps": STEPS, "global_batch_size": global_batch, **OPTIMIZERS[optimizer]})
    return train_logistic_regression(job, open_dataset(job.data))


class BackendConformance:
    """What every backend has to show. `backend` is its name; `network` how its nodes are connected."""

    backend: ClassVar[str]
    network: ClassVar[str] = "auto"

    def train(self, out: Path, **options: Any) -> FinishedRun:
        """Run one job on the backend under test."""
        return run_job(out, backend=self.backend, network=self.network, tensorboard=False, **options)

    @pytest.mark.cluster
    @pytest.mark.parametrize(("optimizer", "global_batch", "workers"), _every_optimizer() + UNEVEN_BATCHES)
    def test_sync_equals_the_reference(self, optimizer: str, global_batch: int, workers: int, tmp_path: Path) -> None:
        """Losses, weights, counts and the evaluation agree with the float64 reference."""
        run = self.train(tmp_path, nodes=workers, global_batch_size=global_batch, steps=STEPS, **OPTIMIZERS[optimizer])
        expected = reference(optimizer, global_batch)
        assert len(run.losses) == STEPS
        tolerance = PLAIN_SGD_LOSS_TOLERANCE if optimizer in ("sgd", "weight-decay") else LOSS_TOLERANCE
        assert relative_difference(run.losses, expected.losses) <= tolerance
        assert norm_wise_difference(run.weights, expected.weights) <= WEIGHT_TOLERANCE
        self.check_counts(run)

    def check_counts(self, run: FinishedRun) -> None:
        """Each planned update was applied once, each example counted once."""
        data = open_dataset("digits")
        assert run.summary["updates_scheduled"] == run.summary["updates_applied"] == run.summary["steps"] == len(run.losses)
        assert run.summary["examples"] == sum(record.examples for record in run.steps)
        assert all(record.examples == data.info.sizes["test"] for record in run.evals)
        assert np.all(np.isfinite(run.losses))

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_fused_steps_equal_single_ones(self, tmp_path: Path) -> None:
        """Many steps per call give the same losses and weights as one step per call, to the bit."""
        options: dict[str, Any] = {"nodes": 2, "global_batch_size": 10, "steps": 60}
        fused = self.train(tmp_path, **options)
        single = self.train(tmp_path, steps_per_call=1, **options)
        np.testing.assert_array_equal(fused.losses, single.losses)
        for name, value in single.weights.items():
            np.testing.assert_array_equal(fused.weights[name], value)

    @pytest.mark.cluster
    def test_async_converges_like_sync(self, tmp_path: Path) -> None:
        """Async applies exactly the planned updates, every worker its share, and reaches the accuracy of sync training.

        A backend without async mode has to say so.
        """
        options: dict[str, Any] = {"nodes": 2, "batch_size": 10, "epochs": 16, "lr": 0.02}
        if "async" not in load_backend(self.backend).capabilities.modes:
            refused = trainer("run", "--backend", self.backend, "--mode", "async", "--out", str(tmp_path))
            assert refused.returncode == 2
            assert "async" in refused.stderr
            return
        sync = self.train(tmp_path, mode="sync", **options)
        run = self.train(tmp_path, mode="async", **options)
        self.check_counts(run)
        assert abs(run.summary["eval"]["accuracy"] - sync.summary["eval"]["accuracy"]) <= ASYNC_ACCURACY_TOLERANCE
        updates = run.summary["updates_by_worker"]
        assert min(updates) >= 0.5 * sum(updates) / len(updates)
        assert all(value >= 0 for record in run.steps for value in record.staleness or ())

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_every_part_of_a_step_is_calibrated(self, tmp_path: Path) -> None:
        """In each of its modes every worker repeats each part of a step, and the run still ends well."""
        for mode in sorted(load_backend(self.backend).capabilities.modes):
            run = self.train(tmp_path / mode, mode=mode, nodes=2, global_batch_size=22, steps=60, calibrate=True)
            found = RunReader(run.path).calibration()
            assert found is not None, [record for record in RunReader(run.path).events() if record.event == "calibration_failed"]
            assert [worker["worker"] for worker in found["workers"]] == [0, 1]
            assert found["payload_bytes"] == sum(weights.nbytes for weights in run.weights.values())
            for worker in found["workers"]:
                for part in ("data", "compute", "half_compute", "communicate", "message"):
                    assert worker[f"{part}_seconds"] > 0, (part, worker)
            for shares in run.summary["time_shares"]["workers"]:
                whole = sum(shares[f"{part}_seconds"] for part in ("data", "compute", "peers", "communicate"))
                assert whole == pytest.approx(shares["step_seconds"])
            self.check_counts(run)
