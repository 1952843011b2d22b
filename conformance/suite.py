"""Pytest suite for backends; subclass `BackendConformance` in a pytest module."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from ..backends.capabilities import Capabilities, Precision, refuse_unsupported
from ..backends.loading import load_backend
from ..checkpoint import find_checkpoint
from ..core.errors import UsageError
from ..core.job import Job
from ..core.plugins import forward_backends
from ..core.settings.job_fields import flag_name
from ..core.update_rules import EMA
from ..data.store.stored_dataset import open_dataset
from ..launch.node.fork_server_client import ForkServerConnection, ForkServerProcess
from ..launch.node.scratch import task_environment
from ..launch.node.supervisor import Supervisor
from ..models.build import build_model
from ..records.store.run_directory import RunReader
from .cases import (
    OPTIMIZERS,
    OPTIONAL_CAPABILITIES,
    UNEVEN_BATCHES,
    Trained,
    evaluation_loss,
    every_optimizer,
    kill_task_once,
    train_logistic_regression,
)
from .runs import FinishedRun, norm_wise_difference, options_of, read_run, relative_difference, run_job, trainer

__all__ = ["OPTIMIZERS", "BackendConformance"]
STEPS = 200
LOSS_TOLERANCE = 1e-4
PLAIN_SGD_LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
ASYNC_ACCURACY_TOLERANCE = 0.02
REJOIN_STEPS = 20_000
LOW_PRECISION_TOLERANCE = 0.05  # bf16 has 8 bits: products are off by up to 2⁻⁸, which adds up in part
DROPOUT_LOSS_TOLERANCE = 1e-4  # of two steps; other masks change the loss by more
# Optimizer and global batch, options, and those of the reference, by declared capability. Many gradients are clipped; of micro-batches the
# last is smaller.
FEATURES: Mapping[str, tuple[str, int, Mapping[str, Any], Mapping[str, Any]]] = {
    "augmentation": ("sgd", 30, {"augment": "crop"}, {"augment": "crop"}),
    "accumulation": ("adamw", 22, {"accumulate": 3}, {}),
    "clipping": ("sgd", 30, {"clip_norm": 0.5}, {"clip_norm": 0.5}),
    "weight_averaging": ("adam", 30, {"ema_decay": 0.98}, {"ema_decay": 0.98}),
}
WARM_SECONDS, WARM_SHARE = 0.1, 0.05  # first step's limit: seconds or fraction of initialisation, the longer one


@cache
def reference(optimizer: str, global_batch: int, **further: Any) -> Trained:
    """Train the reference once per process; `further` are fields of its job."""
    fields = {"steps": STEPS, "global_batch_size": global_batch, **OPTIMIZERS[optimizer], **further}
    job = Job.model_validate({"backend": "reference", **fields})
    return train_logistic_regression(job, open_dataset(job.data))


class BackendConformance:
    """Cases for a backend's declared capabilities.

    Name the backend::

        class TestMyBackend(BackendConformance):
            backend = "mine"

    Every case runs ``trainer`` in real processes. Tolerances: losses of 200 steps within 1e-4 relative of a float64 reference (1e-5 for SGD
    without momentum), final weights within 1e-4 norm-wise, on any number of workers.

    `backend`: its name; `network`: connection of its nodes; `buffers_model`, `dropout_model`: models with running statistics and dropout.
    """

    backend: ClassVar[str]
    network: ClassVar[str] = "auto"
    precision_model: ClassVar[str] = "cnn"
    buffers_model: ClassVar[str] = "resnet18"
    dropout_model: ClassVar[str] = "alexnet"

    @property
    def capabilities(self) -> Capabilities:
        """Declared capabilities of the backend."""
        return load_backend(self.backend).capabilities

    def train(self, out: Path, **options: Any) -> FinishedRun:
        """Run one job on the backend."""
        return run_job(out, backend=self.backend, network=self.network, tensorboard=False, **options)

    @pytest.mark.cluster
    @pytest.mark.parametrize(("optimizer", "global_batch", "workers"), every_optimizer() + UNEVEN_BATCHES)
    def test_sync_equals_the_reference(self, optimizer: str, global_batch: int, workers: int, tmp_path: Path) -> None:
        """Losses, weights, counts and the evaluation agree with the float64 reference."""
        run = self.train(tmp_path, nodes=workers, global_batch_size=global_batch, steps=STEPS, **OPTIMIZERS[optimizer])
        tolerance = PLAIN_SGD_LOSS_TOLERANCE if optimizer in ("sgd", "weight-decay") else LOSS_TOLERANCE
        self._check_equal(run, reference(optimizer, global_batch), tolerance)

    def _check_counts(self, run: FinishedRun) -> None:
        """Each planned update was applied once, each example counted once."""
        data = open_dataset("digits")
        assert run.summary["updates_scheduled"] == run.summary["updates_applied"] == run.summary["steps"] == len(run.losses)
        assert run.summary["examples"] == sum(record.examples for record in run.steps)
        assert all(record.examples == data.info.sizes["test"] for record in run.evals)
        assert np.all(np.isfinite(run.losses))

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_fused_steps_equal_single_ones(self, tmp_path: Path) -> None:
        """Fused steps give the same losses and weights as single ones, bit by bit."""
        options: dict[str, Any] = {"nodes": 2, "global_batch_size": 10, "steps": 60}
        fused = self.train(tmp_path, **options)
        single = self.train(tmp_path, steps_per_call=1, **options)
        np.testing.assert_array_equal(fused.losses, single.losses)
        for name, value in single.weights.items():
            np.testing.assert_array_equal(fused.weights[name], value)

    @pytest.mark.parametrize(("declared", "among"), [("survives", {"sync", "async"}), ("rejoins", {"async"})])
    def test_tasks_that_survive_losses_exist_and_do_not_lead(self, declared: str, among: Collection[str]) -> None:
        """The placement of jobs in these modes has every declared role, none on a leading task."""
        roles, modes = getattr(self.capabilities, declared), self.capabilities.modes & {*among}
        jobs = [Job.model_validate({"backend": self.backend, "mode": mode, "nodes": 2}) for mode in sorted(modes)]
        placed = [task for job in jobs for task in load_backend(self.backend).placement(job)]
        assert {*roles} <= {task.role for task in placed}
        assert not {*roles} & {task.role for task in placed if task.leading}

    def test_its_tasks_can_be_forked_where_it_says_so(self, tmp_path: Path) -> None:
        """Forking is possible; other tests show that forked tasks train correctly."""
        if not self.capabilities.forks:
            pytest.skip("this backend's tasks import it one by one")
        server = ForkServerProcess(Job.model_validate({"backend": self.backend, "nodes": 2}))
        pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            with server.connect({}, "-") as connection:
                supervisor = Supervisor(lambda *_: None, lambda *_: None, lambda name, pid: pids.put(pid), ForkServerConnection(connection))
                supervisor.start("worker-0", tmp_path / "worker-0.log", task_environment(os.environ, tmp_path, None))
                parent = psutil.Process(pids.get(timeout=100)).ppid()
                supervisor.stop(0.0)
        finally:
            server.close()
        assert parent != os.getpid(), "the process to fork from has ended: does `preload` start a thread?"

    @pytest.mark.cluster
    @pytest.mark.faults
    @pytest.mark.slow
    def test_killed_worker_rejoins_and_each_update_counts_once(self, tmp_path: Path) -> None:
        """A killed worker rejoins, if declared; each update is recorded and applied once."""
        if "worker" not in self.capabilities.rejoins:
            pytest.skip(f"{self.backend} does not declare that a worker rejoins")
        path = tmp_path / "run"
        killer = threading.Thread(target=kill_task_once, args=(path, "worker-1"))
        killer.start()
        options = {"mode": "async", "nodes": 3, "ps": 2, "steps": REJOIN_STEPS, "max_restarts": 1, "eval_every": "end"}
        run = self.train(tmp_path, name="run", sample_interval=0.1, **options)
        killer.join()
        steps = sorted(step for record in run.steps for step in range(record.step, record.step + record.count))
        assert steps == list(range(REJOIN_STEPS))
        assert run.summary["updates_applied"] == REJOIN_STEPS
        assert [event.event for event in RunReader(path).events() if event.event in ("task_failed", "attempt_failed")] == ["task_failed"]

    def test_what_it_does_not_declare_is_refused(self, tmp_path: Path) -> None:
        """An undeclared option exits with code 2 and its name.

        The first such option, or all with CROSSTRAIN_CONFORMANCE=full.
        """
        mode = max(self.capabilities.modes)  # sync, if supported
        runs = len(OPTIONAL_CAPABILITIES) if os.environ.get("CROSSTRAIN_CONFORMANCE") == "full" else 1
        for field, beyond in OPTIONAL_CAPABILITIES.items():
            if field in ("deterministic", "exchange") and mode == "async":
                continue  # async has no fixed order, and uses a parameter server
            fields = {"mode": mode, **beyond}
            job = Job.model_validate({"backend": self.backend, **fields})
            try:
                refuse_unsupported(job, self.backend, self.capabilities)
            except UsageError as error:
                message = str(error)
            else:
                continue
            assert message.startswith(f"{field}: "), message
            if runs:
                runs -= 1
                refused = trainer("run", "--backend", self.backend, "--out", str(tmp_path), *options_of(fields))
                assert refused.returncode == 2, refused.stderr
                assert refused.stderr.startswith(f"error: {flag_name(field)}: "), refused.stderr
                assert list(tmp_path.iterdir()) == []

    @pytest.mark.cluster
    def test_a_resumed_run_goes_on_where_it_stood(self, tmp_path: Path) -> None:
        """A resumed run has the same losses and weights, bit by bit on deterministic backends."""
        options: dict[str, Any] = {"nodes": 2, "global_batch_size": 30, "deterministic": self.capabilities.deterministic}
        options |= OPTIMIZERS["adam"]
        whole = self.train(tmp_path, steps=60, checkpoint_every="35steps", **options)
        half = whole.path / "checkpoints/step-000000035"
        done = trainer("run", "--resume", str(half), "--steps", "60", "--quiet")
        assert done.returncode == 0, done.stderr
        assert "from step 35" in done.stderr
        resumed = read_run(whole.path)
        assert resumed.summary["resumed"] == 1
        assert len(resumed.losses) == 60
        if self.capabilities.deterministic:
            np.testing.assert_array_equal(resumed.losses, whole.losses)
            assert norm_wise_difference(resumed.weights, whole.weights) == 0
        assert relative_difference(resumed.losses, whole.losses) <= LOSS_TOLERANCE
        assert norm_wise_difference(resumed.weights, whole.weights) <= WEIGHT_TOLERANCE

    @pytest.mark.cluster
    def test_open_ends_warm(self, tmp_path: Path) -> None:
        """One-time work ends before the run clock.

        One warm run of three is enough, as any may be disturbed.
        """
        waits = []
        for _ in range(3):
            run = self.train(tmp_path, nodes=2, global_batch_size=30, steps=3, steps_per_call=1)
            first = min(run.steps, key=lambda record: record.step).time_seconds
            waits.append((first, run.summary["init_seconds"]))
            if first <= max(WARM_SECONDS, WARM_SHARE * run.summary["init_seconds"]):
                return
        raise AssertionError(f"seconds to the first step, and seconds of initialisation before: {waits}")

    @pytest.mark.cluster
    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("feature", FEATURES)
    def test_a_feature_equals_the_reference(self, feature: str, workers: int, tmp_path: Path) -> None:
        """A declared feature changes losses or weights as in the reference; micro-batches do not."""
        self._require(**{feature: getattr(self.capabilities, feature)})
        optimizer, batch, options, expected = FEATURES[feature]
        run = self.train(
            tmp_path, nodes=workers, global_batch_size=batch, steps=STEPS, eval_every="end", **options, **OPTIMIZERS[optimizer]
        )
        trained, plain = reference(optimizer, batch, **expected), reference(optimizer, batch)
        self._check_equal(run, trained, PLAIN_SGD_LOSS_TOLERANCE if optimizer == "sgd" else LOSS_TOLERANCE)
        if "ema_decay" in expected:
            assert norm_wise_difference(find_checkpoint(run.path)[0].slot(EMA), trained.average) <= WEIGHT_TOLERANCE
            assert norm_wise_difference(trained.weights, trained.average) > WEIGHT_TOLERANCE
            assert run.evals[-1].loss == pytest.approx(evaluation_loss(trained.average, open_dataset("digits")), rel=LOSS_TOLERANCE)
        elif expected:
            assert relative_difference(plain.losses, trained.losses) > LOSS_TOLERANCE

    @pytest.mark.cluster
    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [2, 3])
    def test_the_direct_exchange_equals_the_reference(self, workers: int, tmp_path: Path) -> None:
        """The direct exchange also handles batches that do not divide."""
        self._require(direct_exchange="direct" in self.capabilities.exchanges and "sync" in self.capabilities.modes)
        run = self.train(tmp_path, nodes=workers, global_batch_size=10, steps=STEPS, exchange="direct", **OPTIMIZERS["adam"])
        self._check_equal(run, reference("adam", 10))

    def _require(self, **declared: bool) -> None:
        for name, is_declared in declared.items():
            if not is_declared:
                pytest.skip(f"backend {self.backend} declares no {name.replace('_', ' ')}")

    def _check_equal(self, run: FinishedRun, expected: Trained, loss_tolerance: float = LOSS_TOLERANCE) -> None:
        assert len(run.losses) == len(expected.losses)
        assert relative_difference(run.losses, expected.losses) <= loss_tolerance
        assert norm_wise_difference(run.weights, expected.weights) <= WEIGHT_TOLERANCE
        self._check_counts(run)

    @pytest.mark.cluster
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_a_declared_precision_is_used(self, precision: Precision, tmp_path: Path) -> None:
        """Losses are near but unlike fp32's, and the summary has the precision.

        Without hardware it is refused.
        """
        if precision not in self.capabilities.precisions:
            pytest.skip(f"backend {self.backend} does not declare {precision}")
        self._require_forward(self.precision_model)
        options: dict[str, Any] = {"model": self.precision_model, "global_batch_size": 30, "steps": 20, **OPTIMIZERS["sgd"]}
        fields = {**options, "precision": precision, "network": self.network}
        tried = trainer("run", "--backend", self.backend, "--out", str(tmp_path), "--quiet", "--json", *options_of(fields))
        if tried.returncode == 2:
            assert tried.stderr.startswith("error: --precision: "), tried.stderr
            return
        assert tried.returncode == 0, tried.stderr
        run = read_run(Path(json.loads(tried.stdout)["path"]))
        assert run.summary["precision_used"] == precision
        difference = relative_difference(run.losses, self.train(tmp_path, **options).losses)
        assert 0 < difference <= LOW_PRECISION_TOLERANCE

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_buffers_are_trained_kept_and_taken_over(self, tmp_path: Path) -> None:
        """Running statistics change, are in the checkpoint, and affect an evaluation from it."""
        self._require_forward(self.buffers_model)
        run = self.train(tmp_path, model=self.buffers_model, nodes=2, global_batch_size=16, steps=3, lr=1e-3, eval_every="end")
        initial = build_model(self.buffers_model, open_dataset("digits").info).initial_buffers()
        buffers = find_checkpoint(run.path)[0].buffers
        assert {name: values.shape for name, values in buffers.items()} == {name: values.shape for name, values in initial.items()}
        assert all(np.all(np.isfinite(values)) for values in buffers.values())
        assert any(np.any(buffers[name] != values) for name, values in initial.items())
        done = trainer("evaluate", str(run.path), "--backend", self.backend, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["loss"] == pytest.approx(run.summary["eval"]["loss"], rel=LOSS_TOLERANCE)

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_deterministic_runs_repeat_to_the_bit(self, tmp_path: Path) -> None:
        """Two runs with convolutions and running statistics have equal losses, weights and buffers."""
        self._require(repeatable_training=self.capabilities.deterministic)
        self._require_forward(self.buffers_model)
        options: dict[str, Any] = {"model": self.buffers_model, "nodes": 2, "global_batch_size": 16, "steps": 3, "eval_every": "end"}
        first, second = (self.train(tmp_path, deterministic=True, **options) for _ in range(2))
        np.testing.assert_array_equal(first.losses, second.losses)
        arrays, again = (find_checkpoint(run.path)[0].arrays for run in (first, second))
        assert arrays.keys() == again.keys()
        for name, value in arrays.items():
            np.testing.assert_array_equal(value, again[name])

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_dropout_is_the_same_on_any_number_of_workers(self, tmp_path: Path) -> None:
        """With ``--deterministic`` a mask is independent of the workers, and elements are dropped."""
        self._require_forward(self.dropout_model)
        self._require(repeatable_training=self.capabilities.deterministic)
        options: dict[str, Any] = {"model": self.dropout_model, "data": "synthetic-images:size=64,classes=10,train=64,test=16"}
        options |= {"global_batch_size": 8, "steps": 2, "eval_every": "end", "save_final": False}
        single = self.train(tmp_path, deterministic=True, **options)
        two = self.train(tmp_path, deterministic=True, nodes=2, **options)
        random = self.train(tmp_path, **options)
        assert relative_difference(two.losses, single.losses) <= DROPOUT_LOSS_TOLERANCE
        if self.capabilities.accumulation:
            parts = self.train(tmp_path, deterministic=True, accumulate=3, **options)
            assert relative_difference(parts.losses, single.losses) <= DROPOUT_LOSS_TOLERANCE
        assert relative_difference(random.losses[:1], single.losses[:1]) > DROPOUT_LOSS_TOLERANCE

    def _require_forward(self, model: str) -> None:
        if self.backend not in forward_backends(model):
            pytest.skip(f"backend {self.backend} has no forward function of {model}")

    @pytest.mark.cluster
    def test_async_converges_like_sync(self, tmp_path: Path) -> None:
        """Async applies exactly the planned updates, with the sync reference's accuracy.

        Each worker has its share.
        """
        self._require(async_mode="async" in self.capabilities.modes)
        options: dict[str, Any] = {"nodes": 2, "batch_size": 10, "epochs": 16, "lr": 0.02}
        run = self.train(tmp_path, mode="async", **options)
        self._check_counts(run)
        sync = Job.model_validate({"backend": "reference", "mode": "sync", **options})
        data = open_dataset(sync.data)
        weights = train_logistic_regression(sync, data).weights
        images, labels = data.inputs("test"), data.labels("test")
        logits = images.reshape(len(labels), -1) @ weights["dense.weight"].T + weights["dense.bias"]
        accuracy = float((logits.argmax(1) == labels).mean())
        assert accuracy > 0.8
        assert abs(run.summary["eval"]["accuracy"] - accuracy) <= ASYNC_ACCURACY_TOLERANCE
        self._check_shares(run)

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_async_workers_share_alike(self, tmp_path: Path) -> None:
        """No worker of three falls behind, as with delayed acknowledgements."""
        self._require(async_mode="async" in self.capabilities.modes)
        run = self.train(tmp_path, mode="async", nodes=3, batch_size=10, steps=3000)
        self._check_counts(run)
        self._check_shares(run)

    def _check_shares(self, run: FinishedRun) -> None:
        """Each async worker made at least half its fair share of updates; no staleness is negative."""
        updates = run.summary["updates_by_worker"]
        assert min(updates) >= 0.5 * sum(updates) / len(updates), updates
        assert all(value >= 0 for record in run.steps for value in record.staleness or ())

    @pytest.mark.cluster
    @pytest.mark.slow
    def test_every_part_of_a_step_is_calibrated(self, tmp_path: Path) -> None:
        """Every worker calibrates each component in each mode.

        The direct exchange is tried or refused.
        """
        for mode in sorted(self.capabilities.modes):
            run = self.train(tmp_path / mode, mode=mode, nodes=2, global_batch_size=22, steps=60, calibrate=True)
            calibration = RunReader(run.path).calibration()
            assert calibration is not None, [record for record in RunReader(run.path).events() if record.event == "calibration_failed"]
            assert [worker["worker"] for worker in calibration["workers"]] == [0, 1]
            assert calibration["payload_bytes"] == sum(weights.nbytes for weights in run.weights.values())
            for worker in calibration["workers"]:
                for component in ("data", "compute", "half_compute", "communicate", "message"):
                    assert worker[f"{component}_seconds"] > 0, (component, worker)
                if mode == "sync" and "direct" in self.capabilities.exchanges and run.summary["device_used"] == "cpu":
                    assert (worker["direct_step_seconds"] is None) == bool(calibration["direct_untried"]), calibration
                    assert worker["direct_step_seconds"] is None or worker["direct_step_seconds"] > 0
            for shares in run.summary["time_shares"]["workers"]:
                whole = sum(shares[f"{component}_seconds"] for component in ("data", "compute", "peers", "communicate"))
                assert whole == pytest.approx(shares["step_seconds"])
            self._check_counts(run)
