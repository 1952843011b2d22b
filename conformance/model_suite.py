"""Pytest suite for models: the same computation on every backend.

Subclass `ModelConformance` in a pytest module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ..backends.loading import declared_capabilities, load_backend
from ..checkpoint import find_checkpoint
from ..core.job import Job
from ..core.plugins import available, forward_backends, missing_packages
from ..data.store.stored_dataset import open_dataset
from ..models.build import build_model
from .runs import FinishedRun, norm_wise_difference, relative_difference, run_job, trainer
from .sequence_passes import PADDED, PLAIN, STEPWISE, reads_sequences, sequence_passes

LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
LOSS_TOLERANCE = 1e-3
BUFFER_TOLERANCE = 1e-4
PADDING_TOLERANCE = 1e-6
GLOBAL_BATCH = 64  # on 1, 2 and 3 workers 64, 32 + 32, 22 + 21 + 21
T = TypeVar("T")
Train = Callable[[int], Mapping[str, FinishedRun]]
Passes = Mapping[str, Mapping[str, NDArray[np.float32]]]  # of sequence models, by backend


@dataclass(frozen=True)
class FirstStep:
    """Gradient of the first global batch, and later buffers on one worker, by canonical name."""

    gradient: Mapping[str, NDArray[np.float32]]
    buffers: Mapping[str, NDArray[np.float32]]


def pairs(results: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """Yield the first backend's result with each other one, and both names."""
    (first, ours), *remaining = results.items()
    for name, theirs in remaining:
        yield f"{first} and {name}", ours, theirs


class ModelConformance:
    """Cases for a model with forward functions for two or more backends.

    Name the model::

        class TestMyModel(ModelConformance):
            model = "my_package.my_model"
            data = "the_data_that_it_reads"  # default: "digits"

    Every case runs ``trainer`` in real processes, two backends at a time. Tolerances: logits 1e-4 and gradients 1e-3 norm-wise, losses of
    50 steps 1e-3 relative, on 1, 2 and 3 workers; logits of sequences by position (`sequence_passes`): between backends, with more padding
    (1e-6), and for translation with stepwise decoding (1e-4).

    Outside CROSSTRAIN_CONFORMANCE=full a slow model may compare only `quick_steps`; workers other than 1 and `quick_workers` are `slow`.

    - `model`, `data`: names as for ``--model`` and ``--data``. `data` needs 64 training examples or more.
    - `backends`: compared with the first; by default all installed ones with the model.
    - `network`: network of the nodes.
    - `options`: further job fields, such as the learning rate; models with random draws need ``deterministic``.
    - `steps`: number of compared losses; `quick_steps`: outside the full suite.
    - `quick_workers`: number of workers that is not `slow`, in addition to one.
    - `equal_over_workers`: whether losses are equal on any number of workers; false for batch normalisation, which sees one worker's slice.
    - `gradient_seeds`: seeds tried until gradients agree: a wrong formula shows on every batch, but rounding may cross a ReLU's kink on one
      processor, so deep models need several.
    """

    model: ClassVar[str]
    data: ClassVar[str] = "digits"
    backends: ClassVar[Sequence[str] | None] = None
    network: ClassVar[str] = "auto"
    options: ClassVar[Mapping[str, Any]] = {}
    steps: ClassVar[int] = 50
    quick_steps: ClassVar[int | None] = None
    quick_workers: ClassVar[int] = 3
    equal_over_workers: ClassVar[bool] = True
    gradient_seeds: ClassVar[Sequence[int]] = (Job.model_fields["seed"].default,)

    @classmethod
    def run(cls, out: Path, **options: Any) -> FinishedRun:
        """Run one sync job of the model on `data`, evaluated only at its end."""
        common = {"model": cls.model, "data": cls.data, "network": cls.network, "global_batch_size": GLOBAL_BATCH}
        return run_job(out, tensorboard=False, eval_every="end", **{**common, **cls.options, **options})

    @classmethod
    def compared_backends(cls) -> Sequence[str]:
        """Return the names of two or more compared backends."""
        known = available("backend")
        installed = (name for name in forward_backends(cls.model) if not missing_packages(declared_capabilities(known[name]).packages))
        names = cls.backends or [*installed]
        if len(names) < 2:
            raise AssertionError(f"model {cls.model!r} is compared on two backends or more; there are: {', '.join(names) or 'none'}")
        return names

    @classmethod
    def on_all(cls, compute: Callable[[str], T], names: Sequence[str] | None = None) -> Mapping[str, T]:
        """Return `compute`'s result per backend, two at a time.

        Starting a framework fills a core.
        """
        names = cls.compared_backends() if names is None else names
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(names, pool.map(compute, names), strict=True))

    @classmethod
    def _compared_steps(cls) -> int:
        full = os.environ.get("CROSSTRAIN_CONFORMANCE") == "full"
        return cls.steps if full or cls.quick_steps is None else cls.quick_steps

    @pytest.fixture(scope="class")
    @classmethod
    def train(cls, tmp_path_factory: pytest.TempPathFactory) -> Train:
        """Return a cached function that trains on all backends with a number of workers."""
        out = tmp_path_factory.mktemp("runs")
        steps = cls._compared_steps()

        def trained(workers: int) -> Mapping[str, FinishedRun]:
            return cls.on_all(lambda backend: cls.run(out, backend=backend, nodes=workers, steps=steps, save_final=workers == 1))

        return cache(trained)

    @pytest.fixture(scope="class")
    @classmethod
    def passes(cls, tmp_path_factory: pytest.TempPathFactory) -> Passes:
        """Return each backend's passes with `tensor_functions`; skips models without sequences."""
        info = open_dataset(cls.data).info
        if not reads_sequences(build_model(cls.model, info), info):
            pytest.skip(f"model {cls.model} reads no sequences")
        names = [name for name in cls.compared_backends() if hasattr(load_backend(name), "tensor_functions")]
        if not names:
            pytest.skip("no backend has `tensor_functions`, so that no forward function can be called by itself")
        folder = tmp_path_factory.mktemp("passes")
        return cls.on_all(lambda backend: sequence_passes(backend, cls.model, cls.data, folder / f"{backend}.npz"), names)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the number of workers."""
        if "workers" in metafunc.fixturenames:
            soon = (1, self.quick_workers)
            metafunc.parametrize("workers", [pytest.param(n, marks=() if n in soon else pytest.mark.slow) for n in (1, 2, 3)])

    @pytest.mark.cluster
    def test_losses_agree(self, workers: int, train: Train) -> None:
        """Losses agree step by step on all backends, and with one worker's."""
        runs = train(workers)
        for run in runs.values():
            assert len(run.losses) == self._compared_steps()
            assert np.all(np.isfinite(run.losses))
        for names, ours, theirs in pairs(runs):
            assert relative_difference(ours.losses, theirs.losses) <= LOSS_TOLERANCE, names
        if self.equal_over_workers:
            first, *_ = runs
            assert relative_difference(runs[first].losses, train(1)[first].losses) <= LOSS_TOLERANCE

    @pytest.mark.cluster
    def test_gradients_agree(self, tmp_path: Path) -> None:
        """One step of SGD with rate 1 subtracts the same gradient; running statistics agree."""
        differences: list[Mapping[str, float]] = []
        for seed in self.gradient_seeds:
            steps = self.on_all(partial(self.first_step, tmp_path / f"seed-{seed}", seed))
            for names, ours, theirs in pairs(steps):
                if theirs.buffers:
                    assert norm_wise_difference(ours.buffers, theirs.buffers) <= BUFFER_TOLERANCE, names
            differences.append({names: norm_wise_difference(ours.gradient, theirs.gradient) for names, ours, theirs in pairs(steps)})
            if max(differences[-1].values()) <= GRADIENT_TOLERANCE:
                break
        assert max(differences[-1].values()) <= GRADIENT_TOLERANCE, f"gradients differ by {differences} with seeds {self.gradient_seeds}"

    @classmethod
    def first_step(cls, out: Path, seed: int, backend: str) -> FirstStep:
        """Return the first global batch's gradient of the mean loss, and later buffers."""
        run = cls.run(out, backend=backend, seed=seed, steps=1, optimizer="sgd", lr=1.0, momentum=0.0)
        initial = build_model(cls.model, open_dataset(cls.data).info).initial(seed)
        checkpoint, _ = find_checkpoint(run.path)
        return FirstStep({name: value - checkpoint.parameters[name] for name, value in initial.items()}, checkpoint.buffers)

    @pytest.mark.cluster
    def test_logits_agree(self, train: Train, tmp_path: Path) -> None:
        """All backends compute one trained model's logits of the test split."""
        if not build_model(self.model, open_dataset(self.data).info).classes:
            pytest.skip(f"model {self.model} is no classifier, so that there are no logits of examples to compare")
        run = next(iter(train(1).values()))
        logits = self.on_all(lambda backend: self.logits(run, backend, tmp_path))
        for names, ours, theirs in pairs(logits):
            assert norm_wise_difference({"logits": ours}, {"logits": theirs}) <= LOGITS_TOLERANCE, names
            assert np.all(np.isfinite(theirs)), names
            assert theirs.std() > 0, names

    @pytest.mark.cluster
    def test_logits_of_positions_agree(self, passes: Passes) -> None:
        """All backends compute equal logits per position."""
        for logits in passes.values():
            assert np.all(np.isfinite(logits[PLAIN]))
            assert logits[PLAIN].std() > 0
        for names, ours, theirs in pairs(passes):
            difference = norm_wise_difference({PLAIN: ours[PLAIN]}, {PLAIN: theirs[PLAIN]})
            assert difference <= LOGITS_TOLERANCE, (
                f"{names}: logits differ by {difference:.1e} of the norm; compare the two forward functions, layer by layer"
            )

    @pytest.mark.cluster
    def test_more_padding_changes_nothing(self, passes: Passes) -> None:
        """Padding affects no position of an example."""
        for backend, logits in passes.items():
            difference = norm_wise_difference({PLAIN: logits[PADDED]}, {PLAIN: logits[PLAIN]})
            assert difference <= PADDING_TOLERANCE, (
                f"{backend}: logits differ by {difference:.1e} of the norm with more padding; look at what attends to positions"
                " behind an example's end or sums over them (`_lengths` says where that is)"
            )

    @pytest.mark.cluster
    def test_decoding_step_by_step_is_the_forward_pass(self, passes: Passes) -> None:
        """Stepwise decoding of a translation model equals its forward pass."""
        if not any(STEPWISE in logits for logits in passes.values()):
            pytest.skip(f"model {self.model} does not translate {self.data}")
        for backend, logits in passes.items():
            difference = norm_wise_difference({PLAIN: logits[STEPWISE]}, {PLAIN: logits[PLAIN]})
            assert difference <= LOGITS_TOLERANCE, (
                f"{backend}: logits of `decode_step` differ by {difference:.1e} of the norm from those of `forward`; look at the position"
                " that it counts from, at what its cache keeps, and at what `forward` lets a position see of those behind it"
            )

    @staticmethod
    def logits(run: FinishedRun, backend: str, out: Path) -> NDArray[np.float32]:
        """Return logits float32 [examples, classes] of the test split from the last checkpoint."""
        path = out / f"{backend}.npz"
        done = trainer("evaluate", str(run.path), "--trust-run", "--backend", backend, "--predictions", str(path), "--json")
        assert done.returncode == 0, done.stderr
        with np.load(path) as arrays:
            logits: NDArray[np.float32] = arrays["logits"]
        return logits
