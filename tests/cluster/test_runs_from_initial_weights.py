"""Runs that begin with the weights of a file, and a torch state_dict of any content."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from own_models import own_cache
from safetensors.numpy import load_file, save_file

from crosstrain.checkpoint import find_checkpoint
from crosstrain.checkpoint.initial_weights import _state_dict
from crosstrain.conformance.cases import kill_task_once
from crosstrain.conformance.runs import norm_wise_difference, relative_difference, run_job, trainer
from crosstrain.core.errors import UsageError

pytestmark = pytest.mark.cluster
FOLDER = Path(__file__).parent.parent / "imported"
STANDING = {
    "data": "glyphs",
    "global_batch_size": 8,
    "steps": 1,
    "lr": 1e-30,
    "eval_every": "end",
    "tensorboard": False,
}  # one that changes no weight
MODEL = f"{FOLDER / 'weights.py'}:Tied"


def states(path):
    checkpoint = find_checkpoint(path)[0]
    return {**checkpoint.parameters, **checkpoint.buffers}


cache = pytest.fixture(scope="module", autouse=True)(own_cache)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """State_dicts of a module, fitting ones and hostile ones, and the values of the fitting one."""
    folder = tmp_path_factory.mktemp("written")
    subprocess.run([sys.executable, FOLDER / "weights.py", folder], check=True)
    return folder


MODES = {
    "torch": {"backend": "torch", "nodes": 2},
    "tf": {"backend": "tf", "nodes": 2},
    "torch direct": {"backend": "torch", "nodes": 2, "exchange": "direct"},
    "torch async": {"backend": "torch", "mode": "async", "nodes": 2, "ps": 2},
    "tf async": {"backend": "tf", "mode": "async", "nodes": 2, "ps": 2, "ema_decay": 0.9},
    "tf accumulate": {"backend": "tf", "accumulate": 2, "optimizer": "adam", "ema_decay": 0.9},
}


@pytest.mark.quick_cases("torch")
@pytest.mark.parametrize("name", MODES)
def test_module_begins_with_its_state_dict(written, tmp_path, name):
    run = run_job(tmp_path, model=MODEL, initial_weights=written / "fitting.pt", **STANDING, **MODES[name])
    expected, actual = np.load(written / "fitting.npz"), states(run.path)
    assert actual.keys() == {*expected.files} - {"tail.weight", "norm.num_batches_tracked"} | {"places"}
    assert actual["places"].tolist() == [0.0, 1.0, 2.0]
    for key, value in actual.items():
        if key in expected and not key.startswith("norm.running"):  # which the step moves
            np.testing.assert_allclose(value, expected[key], rtol=1e-6)
    recorded = json.loads((run.path / "job.json").read_text())["initial_weights"]
    assert recorded.startswith(f"{written / 'fitting.pt'}?sha256=")


@pytest.mark.thorough
def test_frozen_parameters_keep_their_initial_values(tmp_path):
    """Also after the warm-up of a sync rank."""
    buffers = states(run_job(tmp_path, model=MODEL, backend="torch", **STANDING).path)
    assert buffers["scale"].tolist() == [1.0, 1.0, 1.0]
    assert buffers["places"].tolist() == [0.0, 1.0, 2.0]


def test_export_is_a_round_trip_between_frameworks(tmp_path):
    learning = {**STANDING, "lr": 0.05, "steps": 6, "data": "digits"}
    run = run_job(tmp_path, backend="tf", **learning)
    done = trainer("export", str(run.path), "--format", "safetensors", "--output", str(tmp_path / "exported"))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "exported/model.safetensors"
    weights = load_file(file)
    begun = run_job(tmp_path, backend="torch", initial_weights=file, **{**STANDING, "data": "digits"})
    for name, value in states(begun.path).items():
        np.testing.assert_array_equal(value, weights[name])
    assert begun.evals[-1].loss == pytest.approx(run.evals[-1].loss, rel=1e-5)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A file of weights, and a run of ten steps from it."""
    folder = tmp_path_factory.mktemp("pretrained")
    draw = np.random.default_rng(1)
    weights = {"dense.weight": draw.normal(size=(10, 64)).astype(np.float32), "dense.bias": draw.normal(size=10).astype(np.float32)}
    save_file(weights, folder / "w.safetensors")
    options = {"global_batch_size": 32, "eval_every": "end", "tensorboard": False, "steps": 10}
    run = run_job(folder, backend="torch", initial_weights=folder / "w.safetensors", **options)
    return folder / "w.safetensors", run, options


@pytest.mark.thorough
def test_losses_are_equal_on_both_frameworks(pretrained, tmp_path):
    file, run, options = pretrained
    same = run_job(tmp_path, backend="tf", initial_weights=file, **options)
    assert relative_difference(same.losses, run.losses) <= 1e-4
    seeded = run_job(tmp_path, backend="torch", **options)
    assert relative_difference(seeded.losses[:1], run.losses[:1]) > 0.1


@pytest.mark.thorough
def test_restart_without_a_checkpoint_begins_with_the_file_again(pretrained, tmp_path):
    file, run, options = pretrained
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill_task_once, tmp_path / "killed", "worker-0")
        long = {**options, "steps": 20_000, "checkpoint_every": "end", "max_restarts": 2}
        restarted = run_job(tmp_path, backend="torch", name="killed", initial_weights=file, **long)
        killed.result()
    assert [event["event"] for event in map(json.loads, (restarted.path / "events.jsonl").read_text().splitlines())].count(
        "run_restarted"
    ) == 1
    assert relative_difference(restarted.losses[:10], run.losses) <= 1e-5


def test_weights_that_do_not_fit_are_refused_before_a_run(written, tmp_path):
    done = trainer("run", "--backend", "torch", "--initial-weights", str(written / "fitting.pt"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --initial-weights: the tensors of ")
    assert "2 missing (dense.weight, dense.bias), 9 unexpected (" in done.stderr
    assert not (tmp_path / "out").exists()


PROBLEMS = {
    "code.pt": "is no state_dict that torch reads without running code",
    "module.pt": "is no state_dict that torch reads without running code",
    "nested.pt": "2 of its 3 entries are no tensors, such as 'epoch', 'optimizer'",
    "list.pt": "holds list, no state_dict",
    "truncated.pt": "is no state_dict that torch reads without running code",
    "random.pt": "is no state_dict that torch reads without running code",
    "expanded.pt": "has tensors of 4,000,000,000,000 bytes, and at most 1,000,000 fit the model",
    "sparse.pt": "has tensors that are no plain arrays",
}


CHECK = """
import json, sys
from pathlib import Path
from crosstrain.core.errors import UsageError
from crosstrain.models.imported.torch.state_dict import packed, read_state_dict
problems = {}
for name in sys.argv[2:]:
    try:
        packed(read_state_dict((Path(sys.argv[1]) / name).read_bytes(), 1_000_000))
    except UsageError as error:
        problems[name] = str(error)
print(json.dumps(problems))
"""


def test_hostile_state_dicts_are_refused(written):
    done = subprocess.run([sys.executable, "-c", CHECK, str(written), *PROBLEMS], text=True, check=True, stdout=subprocess.PIPE)
    problems = json.loads(done.stdout)
    assert {name: expected for name, expected in PROBLEMS.items() if expected not in problems.get(name, "")} == {}
    assert not any("\n" in problem for problem in problems.values())
    assert not (written / "mark").exists()


@pytest.mark.thorough
def test_memory_of_a_compressed_state_dict_is_bounded(written):
    path = written / "bomb.pt"
    with pytest.raises(UsageError, match="is no state_dict that torch reads without running code"):
        _state_dict(path.read_bytes(), path, 1_000_000)


@pytest.mark.thorough
def test_endless_state_dict_is_ended(written, monkeypatch):
    monkeypatch.setattr("crosstrain.checkpoint.initial_weights.MAX_SECONDS", 30.0)
    path = written / "endless.pt"
    with pytest.raises(UsageError, match="took longer than 30 s"):
        _state_dict(path.read_bytes(), path, 1_000_000)


@pytest.fixture(scope="module")
def decayed(pretrained, tmp_path_factory):
    """The weights after six updates with decay of the weight alone, on torch."""
    options = {**pretrained[2], "steps": 6, "weight_decay": 2.0, "weight_decay_except": "*.bias", "initial_weights": pretrained[0]}
    return options, run_job(tmp_path_factory.mktemp("decayed"), backend="torch", **options).weights


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
@pytest.mark.parametrize(
    "mode", [{"nodes": 2}, {"nodes": 2, "exchange": "direct"}, {"mode": "async", "ps": 2}], ids=["native", "direct", "async"]
)
def test_decay_exceptions_agree_in_every_mode(decayed, tmp_path, backend, mode):
    options, expected = decayed
    assert norm_wise_difference(run_job(tmp_path, backend=backend, **options, **mode).weights, expected) <= 1e-5


def test_pattern_without_a_match_is_refused(tmp_path):
    options = ["--backend", "torch", "--weight-decay", "0.1", "--weight-decay-except", "dense.bais", "--out", str(tmp_path / "out")]
    done = trainer("run", *options)
    assert done.returncode == 2
    assert "--weight-decay-except: 'dense.bais' matches none of the names, such as dense.bias and 1 more." in done.stderr
    assert not (tmp_path / "out").exists()
