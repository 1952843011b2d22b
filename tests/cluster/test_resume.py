"""Resumed runs have equal curves for any framework, mode and number of workers."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import MarkedRun, wait_until

from crosstrain.checkpoint import find_checkpoint, list_checkpoints
from crosstrain.cli.main import main
from crosstrain.conformance.runs import read_run, relative_difference, run_job, trainer
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"
EXAMPLES = 1437
"""Of the digits, in one epoch."""


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


def run(out, name, **options):
    return run_job(out, name=name, tensorboard=False, monitor=False, **{"eval_every": "end", **options})


def resume(path, *arguments, code=0):
    """Resume a run; return its result and the command's messages."""
    done = trainer("run", "--quiet", "--resume", str(path), *map(str, arguments))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return read_run(path) if code == 0 else None, done.stderr


def stopped(out, signal_number, *arguments, after):
    """Start a run and signal its driver once `after` steps are saved.

    Return the run's path, the exit code, and stderr.
    """
    path = out / "stopped"
    options = ["--name", "stopped", "--out", str(out), "--no-monitor", "--eval-every", "end"]
    with MarkedRun(["run", "--quiet", *options, *map(str, arguments)], out) as process:

        def saved():
            return any(int(checkpoint.name.removeprefix("step-")) >= after for checkpoint in list_checkpoints(path))

        wait_until(lambda: saved() or process.process.poll() is not None, 90, "a checkpoint")
        assert process.process.poll() is None, process.stderr()
        os.kill(process.process.pid, signal_number)
        code = process.wait(30)
        wait_until(lambda: not process.alive(), 10, "the end of every process")
        return path, code, process.stderr()


def flags(**options):
    return [part for key, value in options.items() for part in ([f"--{key.replace('_', '-')}"] + ([] if value is True else [value]))]


def without_gap_or_double(records, steps):
    covered = [step for record in records for step in range(record.step, record.step + record.count)]
    assert sorted(covered) == list(range(steps))


ON_TWO = {"backend": "torch", "nodes": 2, "global_batch_size": 21, "steps": 400, "optimizer": "adam", "schedule": "cosine", "lr": 0.002}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody stopped."""
    return run(tmp_path_factory.mktemp("whole"), "whole", **ON_TWO)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_resume_torch_two_workers_is_bit_identical(tmp_path, whole, how):
    """Killed or stopped by a signal: losses and final weights equal an uninterrupted run's."""
    path, code, stderr = stopped(tmp_path, how, *flags(**ON_TWO, checkpoint_every="100steps", keep=2), after=100)
    assert code == (75 if how == signal.SIGTERM else -9)
    if how == signal.SIGTERM:
        assert "--resume" in stderr
        status = RunReader(path).status()
        assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    before = find_checkpoint(path)[0].meta.step
    assert 100 <= before < 400
    resumed, stderr = resume(path)
    assert f"from step {before:,}" in stderr
    without_gap_or_double(resumed.steps, 400)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], value)
    assert [(record.step, record.metrics["accuracy"]) for record in resumed.evals] == [
        (record.step, record.metrics["accuracy"]) for record in whole.evals
    ]
    assert resumed.summary["resumed"] == 1
    assert resumed.summary["updates_scheduled"] == resumed.summary["updates_applied"] == 400
    assert len(list_checkpoints(path)) <= 2


@pytest.mark.slow  # the conformance suite has a shorter one
def test_resume_tensorflow_deterministic_is_bit_identical(tmp_path):
    job = {"backend": "tf", "nodes": 2, "global_batch_size": 20, "optimizer": "sgd", "momentum": 0.9, "deterministic": True}
    whole = run(tmp_path, "whole", steps=200, **job)
    part = run(tmp_path, "part", steps=83, **job)
    resumed, _ = resume(part.path, "--steps", 200)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], value)


@pytest.mark.slow
def test_resume_sent_state_equals_read_state(tmp_path, monkeypatch):
    """From the task's memory here, in messages from others: equal files of many parts."""
    job = {"backend": "torch", "data": "synthetic-images:size=400,classes=10,train=8,test=2", "batch_size": 2, "momentum": 0.9}
    hashes = {}
    for way, setting in (("memory", ""), ("messages", "off")):
        monkeypatch.setenv("TRAINER_PEER_MEMORY", setting)
        done = run(tmp_path, way, steps=2, deterministic=True, **job)
        events = [record.detail for record in RunReader(done.path).events() if record.event == "checkpoint_saved"]
        assert [(event["step"], event["taken_from"]) for event in events] == [(2, way)]
        checkpoint, _ = find_checkpoint(done.path)
        hashes[way] = {path.name: hash_of(path) for path in checkpoint.path.glob("*.safetensors")}
    assert sorted(hashes["memory"]) == ["optimizer.safetensors", "parameters.safetensors"]
    assert hashes["memory"] == hashes["messages"]


def hash_of(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_from_tensorflow_to_torch_and_back(tmp_path):
    job = {"global_batch_size": 32, "optimizer": "adamw", "weight_decay": 0.01, "lr": 0.002}
    whole = run(tmp_path, "whole", backend="tf", steps=150, **job)
    part = run(tmp_path, "part", backend="tf", steps=50, **job)
    resume(part.path, "--backend", "torch", "--steps", "+50")
    resumed, _ = resume(part.path, "--backend", "tf", "--steps", "+50")
    without_gap_or_double(resumed.steps, 150)
    assert relative_difference(resumed.losses, whole.losses) <= 1e-3
    described = RunReader(part.path).job()
    assert described["backend"] == "tf"
    assert [segment["step"] for segment in described["segments"]] == [0, 50, 100]
    assert described["segments"][1]["changed"]["backend"] == ["tf", "torch"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_from_sync_to_async_and_back(tmp_path, backend):
    """The cursor carries over: three parts consume exactly the examples of the planned epochs."""
    part = run(tmp_path, "part", backend=backend, nodes=2, batch_size=10, steps=30, lr=0.02)
    resume(part.path, "--mode", "async", "--steps", "+101")
    meta = find_checkpoint(part.path)[0].meta
    assert meta.epoch * EXAMPLES + meta.examples == 30 * 20 + 101 * 10 - (10 - 7 if meta.epoch else 0)
    resumed, _ = resume(part.path, "--mode", "sync", "--epochs", "+1", "--eval-every", "1epoch")
    without_gap_or_double(resumed.steps, resumed.summary["steps"])
    assert resumed.summary["examples"] % EXAMPLES == 0
    assert resumed.summary["eval"]["accuracy"] > 0.85


@pytest.mark.slow  # without the marker tests/faults/test_resize.py resumes on two workers instead of three
@pytest.mark.parametrize("backend", ["toy", "torch"])
def test_from_three_workers_to_one_to_two(tmp_path, backend):
    job = {"backend": backend, "global_batch_size": 48, "optimizer": "adam", "lr": 0.002}
    whole = run(tmp_path, "whole", nodes=1, steps=90, **job)
    part = run(tmp_path, "part", nodes=3, steps=37, **job)
    resume(part.path, "--nodes", 1, "--steps", "+20")
    resumed, _ = resume(part.path, "--nodes", 2, "--steps", "+33")
    assert relative_difference(resumed.losses, whole.losses) <= 1e-3
    assert resumed.summary["workers"] == 2


@pytest.mark.thorough
def test_another_batch_size_consumes_the_rest_of_the_epoch(tmp_path):
    part = run(tmp_path, "part", backend="toy", steps=20, batch_size=32)
    resumed, _ = resume(part.path, "--batch-size", 50, "--epochs", 2, "--eval-every", "1epoch")
    assert resumed.summary["examples"] == 2 * EXAMPLES
    assert [record.epoch for record in resumed.evals if record.step > 20] == [1, 2]
    in_first = [record.examples for record in resumed.steps if record.epoch == 0]
    assert sum(in_first) == EXAMPLES


@pytest.mark.thorough
def test_resumed_records_have_no_gap_or_duplicate(tmp_path):
    job = flags(backend="toy", nodes=2, steps=200_000, checkpoint_every="300steps", sample_interval="0.1")
    path, code, _ = stopped(tmp_path, signal.SIGKILL, *(part for part in job), "--monitor", after=900)
    assert code == -9
    taken = find_checkpoint(path)[0].meta
    resumed, _ = resume(path, "--steps", taken.step + 500, "--eval-every", "100steps")
    without_gap_or_double(resumed.steps, taken.step + 500)
    times = [record.time_seconds for record in resumed.steps]
    assert times == sorted(times)
    assert all(record.time_seconds <= taken.run_seconds for record in resumed.steps if record.step < taken.step)
    assert all(record.time_seconds >= taken.run_seconds for record in resumed.steps if record.step >= taken.step)
    assert taken.run_seconds < resumed.summary["run_seconds"] < taken.run_seconds + 30
    assert resumed.summary["train_seconds"] <= resumed.summary["run_seconds"]
    node = resumed.summary["per_node"][0]
    assert 0 < node["cpu_seconds"] < 4 * resumed.summary["run_seconds"] + 2
    samples = list(RunReader(path).system())
    assert {record.part_began_seconds for record in samples} == {0.0, taken.run_seconds}
    trained = [record.time_seconds for record in samples if not record.initialising]
    assert trained == sorted(trained)
    events = [record.event for record in RunReader(path).events()]
    assert events.count("run_started") == events.count("run_resumed") == 1
    saved = [record.detail["step"] for record in RunReader(path).events() if record.event == "checkpoint_saved"]
    assert saved == sorted(set(saved))


@pytest.mark.thorough
def test_resume_rewrites_tensorboard(tmp_path):
    from crosstrain.records.loggers.tensorboard import _without_tensorflow

    _without_tensorflow()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    part = run_job(tmp_path, name="part", backend="toy", steps=100, eval_every="20steps", tensorboard=True)
    resume(part.path, "--steps", 160, "--tensorboard")
    accumulator = EventAccumulator(str(part.path / "tensorboard"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("eval/accuracy")] == list(range(20, 161, 20))


def test_best_checkpoint_is_kept_with_newest(tmp_path):
    options = {"eval_every": "20steps", "checkpoint_every": "100steps", "keep": 2, "keep_best": "loss"}
    done = run(tmp_path, "run", backend="toy", lr=1.5, steps=300, **options)
    best = min(done.evals, key=lambda record: record.loss)
    steps = {int(path.name.removeprefix("step-")) for path in list_checkpoints(done.path)}
    assert best.step in steps
    assert 2 <= len(steps) <= 3


@pytest.mark.thorough
def test_the_few_best_of_all_evaluations_are_kept(tmp_path):
    """They are not the last ones that improved; a resumed run knows them."""
    options = {"eval_every": "10steps", "checkpoint_every": "1000steps", "keep": 2, "keep_best": "loss", "keep_best_count": 4}

    def kept_and_best(done):
        ranked = sorted((record.loss, record.step) for record in done.evals)
        return {int(path.name.removeprefix("step-")) for path in list_checkpoints(done.path)}, {step for _, step in ranked[:4]}

    part = run(tmp_path, "run", backend="toy", lr=3.0, steps=200, **options)
    kept, best = kept_and_best(part)
    assert best <= kept
    assert 4 <= len(kept) <= 6
    resume(part.path, "--steps", "+200")
    kept, best = kept_and_best(read_run(part.path))
    assert best <= kept
    assert 4 <= len(kept) <= 6
    assert max(kept) == 400


@pytest.mark.thorough
def test_patience_stops_run_without_improvement(tmp_path):
    """The end is recorded; a resumed run counts its records, and more patience trains further."""
    options = {"eval_every": "10steps", "keep_best": "loss", "patience": 5}
    part = run(tmp_path, "run", backend="toy", lr=3.0, steps=5000, **options)
    losses = [record.loss for record in part.evals]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 5
    assert part.summary["steps"] == 10 * len(losses) < 5000
    expected = {"metric": "loss", "evaluations": 5, "without_improvement": 5, "exhausted": True, "best_step": 10 * (best + 1)}
    assert part.summary["patience"] == {**expected, "best": min(losses)}
    (event,) = [record for record in RunReader(part.path).events() if record.event == "patience_exhausted"]
    assert (event.detail["best_step"], event.detail["step"]) == (10 * (best + 1), part.summary["steps"])
    done, _ = resume(part.path, "--patience", 8)
    assert len(done.evals) > len(losses)
    assert done.summary["patience"]["without_improvement"] == 8 or done.summary["steps"] == 5000
    if done.summary["patience"]["best_step"] == 10 * (best + 1):  # no better one came: three evaluations more were allowed
        assert len(done.evals) == len(losses) + 3
    assert sum(record.event == "patience_exhausted" for record in RunReader(part.path).events()) == 2


def test_no_final_checkpoint_when_none_is_wanted(tmp_path):
    done = run(tmp_path, "run", backend="toy", steps=20, save_final=False)
    assert list_checkpoints(done.path) == []
    assert done.summary["checkpoints"] == {"saved": 0, "failed": 0, "stall_seconds": None, "write_seconds": None, "bytes": None}


@pytest.mark.thorough
def test_checkpoints_by_time(tmp_path):
    done = run(tmp_path, "run", backend="toy", steps=10_000, checkpoint_every="0.1s", keep=100)
    saves = done.summary["checkpoints"]["saved"]
    assert 2 <= saves <= done.summary["run_seconds"] / 0.1 + 1


@pytest.mark.thorough
def test_reached_target_does_not_stop_resumed_run(tmp_path):
    part = run(tmp_path, "part", backend="toy", until="accuracy>=0.85", epochs=20, eval_every="1epoch")
    assert part.summary["target_reached"] is True
    resumed, _ = resume(part.path, "--epochs", "+2")
    assert resumed.summary["epochs"] == pytest.approx(part.summary["epochs"] + 2)
    assert resumed.summary["time_to_target_seconds"] == part.summary["time_to_target_seconds"]


@pytest.mark.thorough
def test_new_target_stops_resumed_part_at_next_evaluation(tmp_path):
    """Also where an evaluation before had reached it.

    The time to the target is that of the first one, in every record.
    """
    part = run(tmp_path, "part", backend="toy", epochs=4, eval_every="1epoch", mllog=True)
    reached = part.evals[1]
    target = f"accuracy>={min(record.metrics['accuracy'] for record in part.evals[1:])}"
    resumed, message = resume(part.path, "--epochs", "+20", "--until", target)
    assert f"after step {reached.step:,} reached {target} already" in message
    assert resumed.summary["target_reached"] is True
    assert resumed.summary["time_to_target_seconds"] <= reached.time_seconds
    assert resumed.summary["epochs"] < 24
    assert resumed.evals[-1].metrics["accuracy"] >= float(target[10:])
    assert all(record.metrics["accuracy"] < float(target[10:]) for record in resumed.evals[4:-1])
    assert '"status": "success"' in (part.path / "mllog.txt").read_text().splitlines()[-1]


@pytest.mark.slow
def test_new_target_stops_part_after_an_interruption(tmp_path):
    """The target was given for a part that was interrupted before an evaluation.

    An evaluation before that part had reached it.
    """
    part = run(tmp_path, "part", backend="toy", epochs=2, eval_every="1epoch")
    target = f"accuracy>={part.evals[-1].metrics['accuracy'] - 0.02}"
    interrupted = ["--until", target, "--steps", "100000000", "--eval-every", "end", "--checkpoint-every", "100steps"]
    with MarkedRun(["run", "--quiet", "--resume", str(part.path), *interrupted], tmp_path) as process:
        newest = list_checkpoints(part.path)[0]
        wait_until(lambda: list_checkpoints(part.path)[0] != newest or process.process.poll() is not None, 60, "a checkpoint")
        process.process.send_signal(signal.SIGINT)
        assert process.wait(30) == 75, process.stderr()
    resumed, message = resume(part.path, "--eval-every", "1epoch")
    assert "this part ends at the next one that does" in message
    assert resumed.summary["target_reached"] is True
    assert resumed.summary["time_to_target_seconds"] < resumed.evals[-1].time_seconds


@pytest.mark.thorough
def test_interrupted_part_without_saves_names_earlier_checkpoint(tmp_path):
    part = run(tmp_path, "part", backend="toy", steps=20)
    with MarkedRun(["run", "--quiet", "--resume", str(part.path), "--steps", "100000000"], tmp_path) as process:
        steps = part.path / "steps.jsonl"
        size = steps.stat().st_size
        wait_until(lambda: steps.stat().st_size > size or process.process.poll() is not None, 60, "the first step")
        process.process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "interrupted by the user; saved last: step-000000020. To go on: trainer run --resume" in process.stderr()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])])}
    options = {"backend": "toy", "steps": 60, "checkpoint_every": "20steps", "optimizer": "adam", "tensorboard": False, "eval_every": "end"}
    return run_job(tmp_path_factory.mktemp("finished"), environment, name="part", **options).path


class TestRefusals:
    @pytest.fixture
    def copy(self, finished, tmp_path):
        return Path(shutil.copytree(finished, tmp_path / "part"))

    @pytest.mark.quick_cases("arguments6---steps", "arguments4---name")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--seed", 4, "--steps", "+5"], "seed is 4 instead of 0"),
            (["--data", "glyphs28", "--steps", "+5"], "data is 'glyphs28' instead of 'digits'"),
            ([], "has done 60 steps"),
            (["--steps", 50], "has done 60 steps"),
            (["--name", "other", "--steps", "+5"], "--name"),
            (["--steps", "+0"], "60 steps"),
            (["--steps", "+x"], "--steps"),
        ],
    )
    def test_resume_mismatch_is_named_and_changes_nothing(self, copy, monkeypatch, capsys, arguments, message):
        """In this process, since none starts another."""
        monkeypatch.syspath_prepend(str(TOY))
        before = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
        assert main(["run", "--quiet", "--resume", str(copy), *map(str, arguments)]) == 2
        stderr = capsys.readouterr().err
        assert message in stderr
        assert "Traceback" not in stderr
        assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == before

    @pytest.mark.thorough
    def test_resume_refused_by_task_leaves_run_unchanged(self, copy):
        names = ("job.json", "env.json", "summary.json")
        before, state = [(copy / name).read_bytes() for name in names], RunReader(copy).status()["state"]
        _, stderr = resume(copy, "--backend", "torch", "--precision", "fp16", "--steps", "+5", code=2)
        assert "fp16" in stderr
        assert [(copy / name).read_bytes() for name in names] == before
        assert RunReader(copy).status()["state"] == state == "succeeded"
        resume(copy, "--steps", "+5")
        assert RunReader(copy).job()["precision"] == "fp32"
        assert RunReader(copy).job()["backend"] == "toy"

    @pytest.mark.thorough
    def test_resume_force_continues(self, copy):
        resumed, stderr = resume(copy, "--seed", 4, "--steps", "+5", "--force")
        assert "seed is 4 instead of 0" in stderr
        assert resumed.summary["steps"] == 65

    @pytest.mark.thorough
    def test_resume_older_checkpoint_keeps_its_settings(self, copy):
        resume(copy, "--seed", 4, "--steps", "+5", "--force")
        older = str(copy / "checkpoints/step-000000040")
        again = trainer("run", "--quiet", "--resume", older, "--steps", "+5")
        assert again.returncode == 0, again.stderr
        assert RunReader(copy).job()["seed"] == 0
        refused = trainer("run", "--quiet", "--resume", older, "--steps", "+5", "--seed", "4")
        assert "seed is 4 instead of 0" in refused.stderr

    @pytest.mark.thorough
    def test_a_run_has_a_name(self, copy, monkeypatch):
        monkeypatch.setenv("TRAINER_OUT", str(copy.parent))
        done = trainer("run", "--quiet", "--resume", "part/checkpoints/step-000000020", "--steps", "30")
        assert done.returncode == 0, done.stderr
        done = trainer("run", "--quiet", "--resume", "part", "--steps", "+5")
        assert done.returncode == 0, done.stderr
        done = trainer("run", "--quiet", "--resume", "prat", "--steps", "+5")
        assert done.returncode == 2
        assert "Did you mean 'part'?" in done.stderr

    @pytest.mark.thorough
    def test_resume_another_optimizer_reports_dropped_slots(self, copy):
        resumed, stderr = resume(copy, "--optimizer", "sgd", "--steps", "+5")
        assert "first_moment, second_moment" in stderr
        assert not [key for key in find_checkpoint(copy)[0].arrays if key.startswith("slots/")]
        assert resumed.summary["steps"] == 65

    @pytest.mark.thorough
    def test_resume_another_optimizer_resets_sgd_options(self, copy):
        resume(copy, "--optimizer", "sgd", "--momentum", "0.9", "--steps", "+5")
        resumed, stderr = resume(copy, "--optimizer", "adam", "--steps", "+5")
        assert "momentum of the one before is dropped" in stderr
        assert resumed.summary["steps"] == 70

    @pytest.mark.thorough
    @pytest.mark.parametrize(("further", "total"), [(["--steps", 70], 70), ([], 60)])
    def test_resume_damaged_checkpoint_uses_previous_one(self, copy, further, total):
        newest = list_checkpoints(copy)[0]
        weights = newest / "parameters.safetensors"
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
        resumed, stderr = resume(copy, *further)
        assert newest.name in stderr
        assert "parameters.safetensors" in stderr
        assert "from step 40" in stderr
        assert "checkpoint_damaged" in {record.event for record in RunReader(copy).events()}
        without_gap_or_double(resumed.steps, total)

    def test_resume_without_sound_checkpoint_names_each(self, copy):
        for path in list_checkpoints(copy):
            (path / "checkpoint.json").unlink()
        _, stderr = resume(copy, "--steps", 70, code=2)
        assert all(f"step-0000000{step}" in stderr for step in (20, 40, 60))

    @pytest.mark.thorough
    def test_an_older_checkpoint_can_be_chosen(self, copy):
        done = trainer("run", "--quiet", "--resume", str(copy / "checkpoints/step-000000020"), "--steps", "30")
        assert done.returncode == 0, done.stderr
        assert "their records and step-000000040, step-000000060 are removed" in done.stderr
        assert [path.name for path in list_checkpoints(copy)] == ["step-000000030", "step-000000020"]
        without_gap_or_double(read_run(copy).steps, 30)

    @pytest.mark.thorough
    def test_resume_of_active_run_is_refused(self, tmp_path):
        arguments = flags(backend="toy", steps=10_000_000, checkpoint_every="1000steps", eval_every="end", name="busy", out=str(tmp_path))
        with MarkedRun(["run", "--quiet", *map(str, arguments)], tmp_path) as busy:
            wait_until(lambda: list_checkpoints(tmp_path / "busy"), 60, "a checkpoint")
            _, stderr = resume(tmp_path / "busy", "--steps", "+5", code=2)
            assert "still at work" in stderr
            assert busy.process.poll() is None

    @pytest.mark.thorough
    def test_plus_without_resume_is_refused(self, tmp_path):
        done = trainer("run", "--backend", "toy", "--epochs", "+1", "--out", str(tmp_path))
        assert done.returncode == 2
        assert "--resume" in done.stderr


@pytest.mark.slow
def test_repeats_give_mean_and_spread(tmp_path):
    arguments = ["--repeats", "5", "--backend", "toy", "--epochs", "2", "--seed", "3", "--name", "many", "--out", str(tmp_path), "--quiet"]
    done = trainer("run", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"many-r{number}" for number in range(1, 6)]
    assert [RunReader(path).job()["seed"] for path in sorted(tmp_path.iterdir())] == [3, 4, 5, 6, 7]
    assert len(together["dropped"]) == 2
    assert together["figures"]["accuracy"]["values"] == 3
    assert 0.8 < together["figures"]["accuracy"]["mean"] < 1


@pytest.mark.slow
def test_diverged_repeats_are_reported_in_their_mean(tmp_path):
    diverging = ["--lr", "1e30", "--weight-decay", "1e6", "--steps", "20", "--on-nan", "continue"]
    done = trainer("run", "--repeats", "2", "--backend", "toy", *diverging, "--name", "bad", "--out", str(tmp_path), "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout, parse_constant=pytest.fail)["figures"]
    assert figures["loss"] == {"mean": "NaN", "sigma": None, "values": 2}
    compared = trainer("compare", str(tmp_path), "--json")
    (row,) = json.loads(compared.stdout)["rows"]
    assert (row["figures"]["eval_loss"], row["sigma"].get("eval_loss")) == ("NaN", None)
