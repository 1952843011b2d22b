"""Does a model compute the same on every backend? A suite for pytest.

Subclass `ModelConformance` in a pytest module and name the model::

    class TestMyModel(ModelConformance):
        model = "my_package.my_model"
        data = "the_data_that_it_reads"  # "digits" where it is not said

Every case runs real processes through the command ``trainer``, each backend in its own, two at the same time. Tolerances: logits within
1e-4 and gradients within 1e-3 norm-wise, the losses of 50 steps within 1e-3 relative, on 1, 2 and 3 workers. Of a model that reads
sequences the logits of each position are compared (`sequence_passes`): on all backends, with more padding (1e-6), and of one that
translates with those of decoding piece by piece (1e-4).

A model whose fifty steps take minutes may name fewer `quick_steps`; those are compared unless the environment has
CROSSTRAIN_CONFORMANCE=full. Comparisons on other numbers of workers than 1 and `quick_workers` carry the marker
`slow`.
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
from ..core.plugins import Plugin, available, forward_backends, missing_packages
from ..data.store.stored_dataset import open_dataset
from ..models.build import build_model
from .runs import FinishedRun, norm_wise_difference, relative_difference, run_job, trainer
from .sequence_passes import PADDED, PLAIN, STEPWISE, reads_sequences, sequence_passes

__all__ = ["ModelConformance"]

LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
LOSS_TOLERANCE = 1e-3
BUFFER_TOLERANCE = 1e-4
PADDING_TOLERANCE = 1e-6

GLOBAL_BATCH = 64
"""Shared by 1, 2 and 3 workers as 64, 32 + 32, 22 + 21 + 21."""

T = TypeVar("T")

Train = Callable[[int], Mapping[str, FinishedRun]]
Passes = Mapping[str, Mapping[str, NDArray[np.float32]]]
"""By backend, the passes of a model of sequences."""


@dataclass(frozen=True)
class FirstStep:
    """By canonical name: the gradient of the first global batch; the buffers after it, on one worker."""

    gradient: Mapping[str, NDArray[np.float32]]
    buffers: Mapping[str, NDArray[np.float32]]


def pairs(found: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """Yield what was found for the first backend with what was found for each of the others, and the names of the two."""
    (first, ours), *others = found.items()
    for name, theirs in others:
        yield f"{first} and {name}", ours, theirs


def _installed(plugin: Plugin) -> bool:
    return not missing_packages(declared_capabilities(plugin).packages)


class ModelConformance:
    """What every model with forward functions for two or more backends has to show.

    - `model`, `data`: names as for ``--model`` and ``--data``. `data` needs 64 training examples or more.
    - `backends`: those that are compared, each with the first; by default all that are installed and have the model.
    - `network`: how nodes are connected.
    - `options`: further fields of the job, such as the learning rate. A model that draws at random needs ``deterministic``.
    - `steps`: how many losses are compared; `quick_steps`: how many where not the full suite is asked for.
    - `quick_workers`: the number of workers on which they are compared without the marker `slow`, besides one.
    - `equal_over_workers`: whether the number of workers makes no difference either; false for batch normalisation, which sees the slice of
      one worker.
    - `gradient_seeds`: the seeds whose first gradients are compared until one agrees. A wrong formula shows on every batch; where rounding
      moves an activation across a ReLU's kink, one batch differs on one processor. A deep model with many of them gives several seeds.
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
        """Run one sync job of the model on `data`, evaluated at its end alone."""
        common = {"model": cls.model, "data": cls.data, "network": cls.network, "global_batch_size": GLOBAL_BATCH}
        return run_job(out, tensorboard=False, eval_every="end", **{**common, **cls.options, **options})

    @classmethod
    def compared_backends(cls) -> Sequence[str]:
        """Return the names of the backends that are compared: two or more."""
        known = available("backend")
        names = cls.backends or [name for name in forward_backends(cls.model) if _installed(known[name])]
        if len(names) < 2:
            raise AssertionError(f"model {cls.model!r} is compared on two backends or more; there are: {', '.join(names) or 'none'}")
        return names

    @classmethod
    def on_all(cls, compute: Callable[[str], T], names: Sequence[str] | None = None) -> Mapping[str, T]:
        """Return what `compute` returns for each backend; two at once, since starting a framework keeps one core busy."""
        names = cls.compared_backends() if names is None else names
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(names, pool.map(compute, names), strict=True))

    @classmethod
    def compared_steps(cls) -> int:
        """Return how many losses are compared this time."""
        full = os.environ.get("CROSSTRAIN_CONFORMANCE") == "full"
        return cls.steps if full or cls.quick_steps is None else cls.quick_steps

    @pytest.fixture(scope="class")
    @classmethod
    def train(cls, tmp_path_factory: pytest.TempPathFactory) -> Train:
        """Return a function that trains on all backends with a number of workers, once, and then returns the same runs again."""
        out = tmp_path_factory.mktemp("runs")
        steps = cls.compared_steps()

        def trained(workers: int) -> Mapping[str, FinishedRun]:
            return cls.on_all(lambda backend: cls.run(out, backend=backend, nodes=workers, steps=steps, save_final=workers == 1))

        return cache(trained)

    @pytest.fixture(scope="class")
    @classmethod
    def passes(cls, tmp_path_factory: pytest.TempPathFactory) -> Passes:
        """Return the passes of each backend that can compute them by themselves; skips where the model reads no sequences."""
        info = open_dataset(cls.data).info
        if not reads_sequences(build_model(cls.model, info), info):
            pytest.skip(f"model {cls.model} reads no sequences")
        names = [name for name in cls.compared_backends() if hasattr(load_backend(name), "tensor_functions")]
        if not names:
            pytest.skip("no backend has `tensor_functions`, so that no forward function can be called by itself")
        folder = tmp_path_factory.mktemp("passes")
        return cls.on_all(lambda backend: sequence_passes(backend, cls.model, cls.data, folder / f"{backend}.npz"), names)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Say on how many workers losses are compared."""
        if "workers" in metafunc.fixturenames:
            soon = (1, self.quick_workers)
            metafunc.parametrize("workers", [pytest.param(n, marks=() if n in soon else pytest.mark.slow) for n in (1, 2, 3)])

    @pytest.mark.cluster
    def test_losses_agree(self, workers: int, train: Train) -> None:
        """All backends have the same losses, step by step; and the same as one worker has."""
        runs = train(workers)
        for run in runs.values():
            assert len(run.losses) == self.compared_steps()
            assert np.all(np.isfinite(run.losses))
        for names, ours, theirs in pairs(runs):
            assert relative_difference(ours.losses, theirs.losses) <= LOSS_TOLERANCE, names
        if self.equal_over_workers:
            first, *_ = runs
            assert relative_difference(runs[first].losses, train(1)[first].losses) <= LOSS_TOLERANCE

    @pytest.mark.cluster
    def test_gradients_agree(self, tmp_path: Path) -> None:
        """The gradient of the first global batch is what one step of plain SGD with the learning rate 1 subtracts.

        That step's running statistics, where the model keeps some, agree as well.
        """
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
        """Return the gradient of the mean loss of the first global batch, and the buffers after it."""
        run = cls.run(out, backend=backend, seed=seed, steps=1, optimizer="sgd", lr=1.0, momentum=0.0)
        initial = build_model(cls.model, open_dataset(cls.data).info).initial(seed)
        checkpoint, _ = find_checkpoint(run.path)
        return FirstStep({name: value - checkpoint.parameters[name] for name, value in initial.items()}, checkpoint.buffers)

    @pytest.mark.cluster
    def test_logits_agree(self, train: Train, tmp_path: Path) -> None:
        """All backends compute the same logits of the test split from one trained model."""
        if not build_model(self.model, open_dataset(self.data).info).classes:
            pytest.skip(f"model {self.model} is no classifier, so that there are no logits of examples to compare")
        run = next(iter(train(1).values()))
        found = self.on_all(lambda backend: self.logits(run, backend, tmp_path))
        for names, ours, theirs in pairs(found):
            assert norm_wise_difference({"logits": ours}, {"logits": theirs}) <= LOGITS_TOLERANCE, names
            assert np.all(np.isfinite(theirs)), names
            assert theirs.std() > 0, names

    @pytest.mark.cluster
    def test_logits_of_positions_agree(self, passes: Passes) -> None:
        """All backends compute the same of each position."""
        for found in passes.values():
            assert np.all(np.isfinite(found[PLAIN]))
            assert found[PLAIN].std() > 0
        for names, ours, theirs in pairs(passes):
            difference = norm_wise_difference({PLAIN: ours[PLAIN]}, {PLAIN: theirs[PLAIN]})
            assert difference <= LOGITS_TOLERANCE, (
                f"{names}: logits differ by {difference:.1e} of the norm; compare the two forward functions, layer by layer"
            )

    @pytest.mark.cluster
    def test_more_padding_changes_nothing(self, passes: Passes) -> None:
        """What stands behind the end of an example reaches no position of its own."""
        for backend, found in passes.items():
            difference = norm_wise_difference({PLAIN: found[PADDED]}, {PLAIN: found[PLAIN]})
            assert difference <= PADDING_TOLERANCE, (
                f"{backend}: logits differ by {difference:.1e} of the norm with more padding; look at what attends to positions"
                " behind an example's end or sums over them (`_lengths` says where that is)"
            )

    @pytest.mark.cluster
    def test_decoding_step_by_step_is_the_forward_pass(self, passes: Passes) -> None:
        """Of a model that translates: the logits of a piece after another are those of all of them at once."""
        if not any(STEPWISE in found for found in passes.values()):
            pytest.skip(f"model {self.model} does not translate {self.data}")
        for backend, found in passes.items():
            difference = norm_wise_difference({PLAIN: found[STEPWISE]}, {PLAIN: found[PLAIN]})
            assert difference <= LOGITS_TOLERANCE, (
                f"{backend}: logits of `decode_step` differ by {difference:.1e} of the norm from those of `forward`; look at the position"
                " that it counts from, at what its cache keeps, and at what `forward` lets a position see of those behind it"
            )

    @staticmethod
    def logits(run: FinishedRun, backend: str, out: Path) -> NDArray[np.float32]:
        """Return what a backend computes from the run's last checkpoint: logits float32 [examples, classes] of the test split."""
        path = out / f"{backend}.npz"
        done = trainer("evaluate", str(run.path), "--trust-run", "--backend", backend, "--predictions", str(path), "--json")
        assert done.returncode == 0, done.stderr
        with np.load(path) as found:
            logits: NDArray[np.float32] = found["logits"]
        return logits
