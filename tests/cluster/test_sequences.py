"""A custom model on data of varying length: losses are weighted by tokens globally.

On any number of workers.
"""

import json
import shutil
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from own_models import importable

from crosstrain.conformance.runs import run_job, trainer
from crosstrain.core.job import Job
from crosstrain.data.batching import batch_rule
from crosstrain.data.sampler import Sampler

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parent.parent
ENVIRONMENT = importable(TESTS / "sequences")
JOB = {
    "model": "crosstrain_sequences.tagger",
    "data": "tagged",
    "global_batch_size": 10,
    "lr": 5.0,
    "epochs": 2,
    "eval_every": "30steps",
    "checkpoint_every": "1epoch",
    "deterministic": True,
    "calibrate": False,
}


@pytest.fixture(scope="module")
def reference():
    """Losses and the last evaluation of stochastic gradient descent in float64, token by token."""
    sys.path.insert(0, str(TESTS / "sequences"))
    try:
        from crosstrain_sequences.data import DATASET, TAGS, VOCABULARY
        from crosstrain_sequences.tagger import build

        from crosstrain.data.base import DataInfo, TextFeatures
    finally:
        sys.path.pop(0)
    prepared = DATASET.load(None)
    examples = {split: [] for split in ("train", "test")}
    for split, block_examples in examples.items():
        for block in prepared.blocks[split]():
            block_examples += [(block["tokens"].example(i), block["tags"].example(i)) for i in range(len(block["tokens"]))]
    sizes = {split: len(block_examples) for split, block_examples in examples.items()}
    info = DataInfo("tagged", sizes, prepared.columns, TextFeatures({"tokens": VOCABULARY, "tags": TAGS}))
    values = {name: value.astype(np.float64) for name, value in build(info).initial(0).items()}

    def errors(tokens, tags):
        tokens = tokens.astype(np.int64)
        before = np.concatenate([[0], tokens[:-1]])
        logits = values["own"][tokens] + values["before"][before]
        log_sum = np.log(np.exp(logits).sum(1))
        slopes = np.exp(logits - log_sum[:, None])
        rows = np.arange(len(tokens))
        losses, right = log_sum - logits[rows, tags], (logits.argmax(1) == tags).sum()
        slopes[rows, tags] -= 1
        return losses.sum(), right, slopes, tokens, before

    job = Job(**{key: value for key, value in JOB.items() if key not in ("calibrate",)})
    sampler = Sampler(len(examples["train"]), 0, batch_rule(job), 1)
    losses = []
    for epoch in range(2):
        batches = sampler.whole(epoch, 0, sampler.steps_per_epoch)
        for step in range(len(batches)):
            gradients = {name: np.zeros_like(value) for name, value in values.items()}
            total, count = 0.0, 0
            for index in batches.batch(step):
                loss, _, slopes, current, before = errors(*examples["train"][index])
                np.add.at(gradients["own"], current, slopes)
                np.add.at(gradients["before"], before, slopes)
                total, count = total + loss, count + len(current)
            losses.append(total / count)
            for name, gradient in gradients.items():
                values[name] -= JOB["lr"] * gradient / count
    tested = [errors(*example)[:2] for example in examples["test"]]
    tokens = sum(len(tags) for _, tags in examples["test"])
    return losses, sum(loss for loss, _ in tested) / tokens, sum(right for _, right in tested) / tokens


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that makes a run on first use: sync on some workers, or async on two."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def made(backend, workers):
        options = {"mode": "async", "procs_per_node": 2, "deterministic": False, "calibrate": True}
        options = options if workers == "async" else {"procs_per_node": workers}
        return run_job(folder, name=f"{backend}-{workers}", backend=backend, environment=ENVIRONMENT, **{**JOB, **options})

    return made


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("backend", [pytest.param("tf", marks=pytest.mark.slow), "torch"])
def test_losses_are_weighted_by_tokens_on_any_number_of_workers(backend, workers, runs, reference):
    run = runs(backend, workers)
    losses, loss, accuracy = reference
    np.testing.assert_allclose(run.losses, losses, rtol=2e-5)
    last = run.evals[-1].metrics
    assert run.evals[-1].loss == pytest.approx(loss, rel=2e-5)
    assert last["tag_accuracy"] == pytest.approx(accuracy, abs=1e-3)
    assert last["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
    assert accuracy > 0.8


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [pytest.param("tf", marks=pytest.mark.slow), "torch"])
def test_sequences_async_workers_learn(backend, runs, reference):
    run = runs(backend, "async")
    assert len(run.losses) == 120
    assert run.evals[-1].metrics["tag_accuracy"] > 0.8
    assert run.evals[0].metrics["perplexity"] > run.evals[-1].metrics["perplexity"]


@pytest.mark.slow  # without the marker test_sequences_are_evaluated_on_both_backends below, and tests/cluster/test_resume.py with images
def test_a_checkpoint_goes_from_one_framework_to_the_other(runs, tmp_path):
    """And from three workers to one."""
    path = shutil.copytree(runs("tf", 3).path, tmp_path / "copy")
    done = trainer(
        "run",
        "--resume",
        str(path),
        "--backend",
        "torch",
        "--procs-per-node",
        "1",
        *("--epochs", "3", "--trust-run"),
        environment=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", 90)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_sequences_are_evaluated_on_both_backends(backend, runs, reference):
    done = trainer("evaluate", str(runs("torch", 3).path), "--backend", backend, "--trust-run", "--json", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tag_accuracy"] == pytest.approx(reference[2], abs=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "RUN", "--format", "torch", "--trust-run"], "only models of images and of translations are exported"),
        (["evaluate", "RUN", "--predictions", "new.npz", "--trust-run"], "has no classes"),
        (
            ["evaluate", "RUN", "--data", "digits", "--trust-run"],
            "has the columns image (uint8), label (int64), but the model was trained on",
        ),
    ],
)
def test_sequences_image_only_options_are_refused(arguments, words, runs, tmp_path):
    typed = [
        str(runs("torch", 3).path) if argument == "RUN" else str(tmp_path / argument) if argument.endswith(".npz") else argument
        for argument in arguments
    ]
    done = trainer(*typed, environment=ENVIRONMENT)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_sequences_are_in_tables_and_lists(runs):
    for arguments in (
        ["compare", str(runs("tf", 3).path), str(runs("torch", 3).path)],
        ["explain", str(runs("torch", "async").path)],
        ["data", "list"],
    ):
        done = trainer(*arguments, environment=ENVIRONMENT)
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--model", "cnn", "--data", "tagged"], "'tagged' has no images"),
        (["run", "--model", "crosstrain_sequences.tagger", "--data", "digits"], "'digits' has no column 'tokens'; it has image, label"),
        (["run", "--model", "crosstrain_sequences.tagger", "--data", "tagged", "--augment", "flip"], "has no images"),
    ],
)
def test_model_on_incompatible_data_is_refused(arguments, words, tmp_path):
    done = trainer(*arguments, "--backend", "torch", "--out", str(tmp_path), environment=ENVIRONMENT)
    assert done.returncode == 2
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
