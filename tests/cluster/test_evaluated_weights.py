"""With --ema-decay evaluations and translations use the moving average.

On both backends, in both modes. A run's records are compared with its last checkpoint, for the average and for the trained weights.
"""

import json

import pytest
from digit_pairs import lines, text

from crosstrain.checkpoint.files import digest_of, write_manifest
from crosstrain.conformance.runs import run_job, trainer

pytestmark = pytest.mark.cluster
SLOW = pytest.mark.slow


@pytest.mark.thorough
def test_evaluate_non_finite_logits_are_counted_without_accuracy(tmp_path):
    run = run_job(tmp_path, model="logreg", data="digits", steps=2, eval_every="end", calibrate=False, checkpoint_every="end")
    checkpoint = sorted((run.path / "checkpoints").iterdir())[-1]
    path = checkpoint / "parameters.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    write_manifest(checkpoint, {file.name: digest_of(file) for file in (path, checkpoint / "checkpoint.json")})
    done = trainer("evaluate", str(checkpoint), "--json")
    assert (done.returncode, done.stderr) == (0, "the logits of 360 of 360 examples are not finite\n")
    assert [json.loads(done.stdout)[name] for name in ("loss", "accuracy")] == ["NaN", "NaN"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("torch", "async"), *(pytest.param(*case, marks=SLOW) for case in (("tf", "async"), ("torch", "sync"), ("tf", "sync")))],
)
def test_a_run_evaluates_and_translates_with_the_average(backend, mode, tmp_path):
    """While the weights still change fast, so that their average translates differently."""
    for language in ("en", "de"):
        (tmp_path / f"digits.{language}").write_text(text(lines(language)))
    data = f"parallel-text:{tmp_path}/digits:en-de?vocabulary=320,held-out=24"
    updates = {"batch_size": 32, "optimizer": "adam", "lr": 0.01, "warmup_steps": 30, "steps": 30, "ema_decay": 0.99, "calibrate": False}
    model = {"model": "transformer:tiny?dropout=0", "data": data, "eval_every": "end", "beam": 1, "eval_sentences": 24}
    run = run_job(tmp_path, backend=backend, mode=mode, network="host", **model, **updates)
    recorded = run.evals[-1]
    results = {}
    for weights in ("ema", "trained"):
        done = trainer("evaluate", str(run.path), "--weights", weights, "--backend", "torch", "--trust-run", "--json")
        assert done.returncode == 0, done.stderr
        results[weights] = json.loads(done.stdout)
    average, trained = results["ema"], results["trained"]
    assert recorded.loss == pytest.approx(average["loss"], rel=1e-5)
    assert abs(trained["loss"] - average["loss"]) > 0.01 * average["loss"]
    assert recorded.metrics["chrf"] == pytest.approx(average["chrf"], abs=0.5)
    assert run.summary["translated"]["chrf"] == pytest.approx(average["chrf"], abs=0.5)
    assert abs(trained["chrf"] - average["chrf"]) > 1
