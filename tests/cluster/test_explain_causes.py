"""`trainer explain` on runs with a bottleneck that is certain by construction.

Sizes and limits are drawn at random. One cause on one backend in one mode, selected at random; all other combinations are slow. `--seed`
repeats a draw.
"""

import json
import os
import random
import sys

import psutil
import pytest
from bottlenecks import CAUSES, draw

from crosstrain.conformance.runs import run_job, trainer
from crosstrain.launch.virtual.cpu_quota import Hierarchy
from crosstrain.launch.virtual.namespaces import MissingCapabilityError
from crosstrain.launch.virtual.network import possible

SEED = int(os.environ["CROSSTRAIN_TEST_SEED"])
MAX_OTHERS = 0.3
"""Fraction of all cores. The drawn limits leave less than that; with more, other programs decide what a quick node gets."""

COMBINATIONS = [(backend, mode) for backend in ("tf", "torch") for mode in ("sync", "async")]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,  # limits of CPU decide what a run's bottleneck is
    pytest.mark.skipif(sys.platform != "linux", reason="virtual nodes need Linux"),
    pytest.mark.thorough,
]


def dealt():
    """(cause, backend, mode) of each run: one of them, drawn at random, is not slow.

    There, the slow node is PyTorch's: with part of a core for one of its workers, a run on TensorFlow takes half a minute.
    """
    rng = random.Random(SEED)
    causes = rng.sample([cause for cause in CAUSES if cause != "peers"], len(CAUSES) - 1)
    causes.insert(rng.choice([index for index, (backend, _) in enumerate(COMBINATIONS) if backend == "torch"]), "peers")
    dealt = list(zip(causes, COMBINATIONS, strict=True))
    quick = [rng.choice(dealt)]
    slow = [(cause, combination) for cause in CAUSES for combination in COMBINATIONS if (cause, combination) not in quick]
    cases = [(case, ()) for case in quick] + [(case, pytest.mark.slow) for case in slow]
    return [pytest.param(cause, *combination, marks=marks, id="-".join((cause, *combination))) for (cause, combination), marks in cases]


@pytest.fixture(scope="module", autouse=True)
def _needs_limited_nodes():
    if (lack := possible().missing.get("namespaces")) is not None:
        pytest.skip(str(lack))
    try:
        Hierarchy.find()
    except MissingCapabilityError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _needs_the_processor():
    """CPU limits decide only if other programs leave the cores alone."""
    load = psutil.cpu_percent(interval=0.5) / 100
    if load > MAX_OTHERS:
        pytest.skip(f"other programs use {load:.0%} of the processor, so that what holds a run back is not certain")


@pytest.mark.parametrize(("cause", "backend", "mode"), dealt())
def test_explain_finds_the_bottleneck(tmp_path, cause, backend, mode):
    options = draw(cause, backend, mode, SEED)
    run = run_job(tmp_path, environment={**os.environ, "TRAINER_CALIBRATE": "true"}, **options)
    done = trainer("explain", str(run.path), "--json")
    assert done.returncode == 0, done.stderr
    explanation = json.loads(done.stdout)
    seen = {key: explanation[key] for key in ("verdict", "candidates", "network_cause", "slow_node", "step_fractions", "text")}
    details = f"--seed {SEED} {options}\n{json.dumps(seen, indent=1)}\n{json.dumps(run.summary['time_shares'])}"
    assert explanation["verdict"] == cause, details
    if cause == "network":
        assert explanation["network_cause"] == "link", details
    if cause == "peers":
        cores = [float(part) for part in options["cores_per_node"].split(",")]
        assert explanation["slow_node"] == cores.index(min(cores)), details
