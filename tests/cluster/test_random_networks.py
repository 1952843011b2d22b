"""Whatever is built from the layers trains on both frameworks, with the same losses.

The same network by default; in `make conformance` a hundred more, drawn each time. A test's name has the seed, and
``pytest tests/cluster/test_random_networks.py --seed N`` repeats one.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from own_models import importable
from random_networks import draw, write_package

from crosstrain.conformance.runs import run_job

pytestmark = pytest.mark.cluster

CLASSES, INPUT_SHAPE = 10, (1, 8, 8)
"""Of the data "digits"."""

STEPS, TOLERANCE = 20, 1e-4

QUICK = 645
"""A seed whose network has convolutions, batch normalisation, pooling, dense and residual layers, with two threads on two workers."""

FULL = 100


def pytest_generate_tests(metafunc):
    requested = metafunc.config.getoption("seed")
    fresh = np.random.default_rng(int(os.environ["CROSSTRAIN_TEST_SEED"])).integers(2, 1 << 31, FULL).tolist()
    seeds = [pytest.param(seed, marks=pytest.mark.slow) for seed in (QUICK, 0, 1, *fresh)]
    metafunc.parametrize("seed", seeds if requested is None else [requested])


def test_random_network_trains_equally_on_both_backends(seed, tmp_path):
    random = np.random.default_rng([23, seed])
    threads, workers = (int(number) for number in random.integers(1, 3, 2))
    model = write_package(tmp_path, seed, CLASSES)
    environment = importable(tmp_path, Path(__file__).parents[1])
    print(f"seed {seed}: threads {threads}, workers {workers}, {draw(seed, INPUT_SHAPE, CLASSES).calls}")

    def trained(backend):
        return run_job(
            tmp_path / "runs", environment, backend=backend, model=model, data="digits", steps=STEPS, deterministic=True, seed=seed,
            threads=threads, nodes=workers, network="host", global_batch_size=48,
            lr=0.01, monitor=False, calibrate=False, tensorboard=False, eval_every="end", start_timeout=100,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(trained, ("tf", "torch"))
    assert len(ours.losses) == len(theirs.losses) == STEPS
    assert np.all(np.isfinite(ours.losses))
    assert np.max(np.abs(ours.losses - theirs.losses)) <= TOLERANCE
    assert ours.evals[-1].loss == pytest.approx(theirs.evals[-1].loss, abs=TOLERANCE)
