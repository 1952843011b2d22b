"""Batches by tokens in real runs: equal on both frameworks, also in micro-batches.

A resumed run sees each example once.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from own_models import importable

from crosstrain.checkpoint import find_checkpoint
from crosstrain.conformance.runs import norm_wise_difference, read_run, run_job, trainer
from crosstrain.data.base import DataInfo
from crosstrain.data.batching import BucketedTokens
from crosstrain.data.sampler import Sampler, padding_share

pytestmark = pytest.mark.cluster

SLOW = pytest.mark.slow
ENVIRONMENT = importable(Path(__file__).parent.parent / "sequences")
JOB = {
    "model": "crosstrain_sequences.tagger",
    "data": "tagged",
    "procs_per_node": 2,
    "batch_tokens": 60,
    "lr": 5.0,
    "steps": 50,
    "eval_every": "end",
    "deterministic": True,
    "calibrate": False,
    "tensorboard": False,
    "threads": 1,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each backend, both at the same time: what takes long is that processes start."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool:
        started = {name: pool.submit(run_job, folder, name=name, backend=name, environment=ENVIRONMENT, **JOB) for name in ("torch", "tf")}
    return {name: run.result() for name, run in started.items()}


def examples_by_step(run):
    """Return examples consumed by the number of updates; groups differ between runs."""
    records = sorted(run.steps, key=lambda record: record.step)
    consumed = np.cumsum([record.examples for record in records])
    return {record.step + record.count: int(examples) for record, examples in zip(records, consumed, strict=True)}


@pytest.mark.thorough
def test_batch_tokens_give_equal_batches_on_both_backends(runs):
    torch_run, tf_run = runs["torch"], runs["tf"]
    np.testing.assert_allclose(torch_run.losses, tf_run.losses, rtol=2e-5)
    ends = [examples_by_step(run) for run in (torch_run, tf_run)]
    assert all(ends[0][step] == ends[1][step] for step in ends[0].keys() & ends[1].keys())
    assert max(ends[0].items()) == max(ends[1].items())
    assert 0 < torch_run.summary["padding_share"] < 0.15
    assert torch_run.summary["padding_share"] == tf_run.summary["padding_share"]
    assert torch_run.summary["global_batch_size"] == 2 * torch_run.summary["batch_size"]


def larger_batches(sentences, initial, steps, lr):
    """Train the tagger in float64 on whole batches of four budgets of 40 tokens.

    Return losses and weights.
    """
    lengths = np.array([len(tokens) for tokens, _ in sentences])
    batches = Sampler(300, 0, BucketedTokens(40, 4, "sync"), 4, lengths={"tokens": lengths}).whole(0, 0, steps)
    weights = {name: value.astype(np.float64) for name, value in initial.items()}
    losses = []
    for step in range(steps):
        examples = [sentences[index] for index in batches.batch(step)]
        current, wanted = (np.concatenate(parts).astype(int) for parts in zip(*examples, strict=True))
        before = np.concatenate([[0, *sequence[:-1]] for sequence, _ in examples]).astype(int)
        logits = weights["own"][current] + weights["before"][before]
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        places = np.arange(len(wanted))
        losses.append(-np.log(chances[places, wanted]).sum() / len(wanted))
        chances[places, wanted] -= 1.0
        for name, rows in (("own", current), ("before", before)):
            np.subtract.at(weights[name], rows, lr * chances / len(wanted))
    return np.array(losses), weights


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("torch", "sync"), ("tf", "sync"), pytest.param("torch", "async", marks=SLOW), pytest.param("tf", "async", marks=SLOW)],
)
def test_micro_batches_by_tokens_equal_update_of_whole_batch(backend, mode, tmp_path, monkeypatch):
    """Σ over the tokens of all workers and micro-batches / their number.

    Two workers with two micro-batches each, or one with four.
    """
    cluster = {"procs_per_node": 2, "accumulate": 2} if mode == "sync" else {"procs_per_node": 1, "accumulate": 4, "deterministic": False}
    changed = {**JOB, **cluster, "batch_tokens": 40, "steps": 10, "lr": 0.5, "mode": mode}
    run = run_job(tmp_path, name="run", backend=backend, environment=ENVIRONMENT, **changed)
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "sequences"))
    from crosstrain_sequences.data import DATASET
    from crosstrain_sequences.tagger import build

    sentences = [
        (block["tokens"].take(np.array([index])).values, block["tags"].take(np.array([index])).values)
        for block in DATASET.blocks("train")
        for index in range(len(block["tokens"].lengths))
    ]
    prepared = DATASET.load(None)
    initial = build(DataInfo(DATASET.name, {}, tuple(prepared.columns), prepared.features)).initial(0)
    losses, weights = larger_batches(sentences, initial, 10, 0.5)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-6)
    assert norm_wise_difference(run.weights, weights) < 1e-6
    lengths = {name: np.array([len(sentence[side]) for sentence in sentences]) for side, name in enumerate(("tokens", "tags"))}
    workers, parts = cluster["procs_per_node"], cluster["accumulate"]
    sampler = Sampler(300, 0, BucketedTokens(40, workers, mode, parts), workers, lengths=lengths)
    assert run.summary["padding_share"] == padding_share(sampler, parts) < padding_share(sampler, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("tf", ("--batch-tokens", "90", "--procs-per-node", "1")),
        ("torch", ("--batch-tokens", "45", "--mode", "async", "--no-deterministic")),
        ("torch", ("--batch-tokens", "45", "--accumulate", "2", "--mode", "async", "--no-deterministic")),
        pytest.param("torch", ("--batch-size", "7"), marks=pytest.mark.slow),
    ],
)
def test_resume_within_epoch_with_another_batch_size(backend, options, runs, tmp_path):
    path = shutil.copytree(runs["torch"].path, tmp_path / "copy")
    meta = find_checkpoint(path)[0].meta
    assert 0 < meta.examples < 300
    assert meta.arranged == ((0, 60, 2),)
    typed = ["--resume", str(path), "--backend", backend, "--epochs", str(meta.epoch + 2), "--checkpoint-every", "3steps", "--keep", "90"]
    done = trainer("run", *typed, *options, "--trust-run", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert read_run(path).summary["examples"] == 300 * (meta.epoch + 2)


def test_batch_tokens_without_text_is_refused(tmp_path):
    done = trainer("run", "--backend", "torch", "--batch-tokens", "100", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "the examples of 'digits' are no sequences of tokens" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_padding_fraction_is_recorded(runs):
    done = trainer("explain", str(runs["torch"].path), "--json", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert any("of the computed token positions were padding" in note for note in json.loads(done.stdout)["notes"])
