"""A foreign run directory decides neither what code runs nor which files or hosts are used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from model_checkpoints import save_model

from crosstrain.checkpoint import list_checkpoints
from crosstrain.checkpoint.files import digest_of, read_manifest, write_manifest
from crosstrain.cli.group import invoke
from crosstrain.conformance.runs import run_job, trainer
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job, with_digest
from crosstrain.core.settings.job_fields import choices, schema
from crosstrain.core.settings.personal import PERSONAL_OPTIONS
from crosstrain.core.settings.sweeps import Grid
from crosstrain.launch.driver.outcome import resume_hint
from crosstrain.launch.driver.resumption import CONFIG, foreign_settings, links_outside, load_resumption
from crosstrain.launch.sweep_folder import Request, SweepFolder
from crosstrain.launch.sweep_runner import _typed as typed_of_a_point
from crosstrain.records.store.run_directory import RunReader

TOY = Path(__file__).parent.parent / "toy"

PAYLOAD = """
import os
open(os.environ["PAYLOAD_MARK"], "a").write("executed ")
from crosstrain.models.logreg import build
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A real run of a few steps; tests change copies of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TOY))
        return run_job(tmp_path_factory.mktemp("made"), backend="toy", steps=6, name="run", eval_every="end", monitor=False).path


@pytest.fixture
def place(tmp_path, made, monkeypatch):
    """The folder in which a user unpacked the foreign run `evilrun`, with it on PYTHONPATH."""
    shutil.copytree(made, tmp_path / "evilrun")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), str(tmp_path)]))
    monkeypatch.setenv("PAYLOAD_MARK", str(tmp_path / "mark"))
    monkeypatch.syspath_prepend(str(TOY))
    return tmp_path


def alter(run, **settings):
    """Change settings in all files of a run, and sign its manifests again.

    `data_dir` is also changed in the description of the data.
    """
    job = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps({**job, **settings}))
    for folder in list_checkpoints(run):
        described = json.loads((folder / "checkpoint.json").read_text())
        described["job"] |= settings
        described["data"] |= {key: value for key, value in settings.items() if key == "data_dir"}
        (folder / "checkpoint.json").write_text(json.dumps(described))
        write_manifest(folder, {name: digest_of(folder / name) for name in read_manifest(folder)})


def plant(place):
    """Put the payload, a working model, next to the run's files and have them name it."""
    package = place / "evilrun/payload"
    package.mkdir()
    (package / "__init__.py").write_text(PAYLOAD)
    (package / "toy.py").write_text("from crosstrain_toy.logreg import *\n")
    alter(place / "evilrun", model="evilrun.payload")


COMMANDS = {
    "export": ["export", "evilrun", "--format", "safetensors"],
    "evaluate": ["evaluate", "evilrun"],
    "evaluate-on-other-data": ["evaluate", "evilrun", "--data", "digits", "--backend", "toy"],
    "resume": ["run", "--resume", "evilrun", "--steps", "+2"],
    "resume-forced": ["run", "--resume", "evilrun/checkpoints/step-000000006", "--steps", "+2", "--force", "--data", "glyphs"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_untrusted_run_executes_no_code(place, arguments):
    plant(place)
    done = trainer(*arguments)
    assert not (place / "mark").exists()
    assert done.returncode == 2
    assert done.stderr.startswith("error: run: the files of '")
    assert "run the code of the module 'evilrun.payload'" in done.stderr
    assert "add --trust-run" in done.stderr
    assert "or type --model yourself" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", PERSONAL_OPTIONS)
def test_trusted_run_still_names_no_hosts_or_programs(place, name, capsys):
    path = place / "evilrun/job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: f"touch {place}/mark"}))
    assert invoke([*COMMANDS["resume"], "--trust-run"]) == 2
    assert f"job.json' has {name}, which the files of a run never decide" in capsys.readouterr().err
    assert not (place / "mark").exists()


@pytest.mark.quick_cases("evaluate-typed")
@pytest.mark.parametrize(
    "arguments",
    [
        [*COMMANDS["export"], "--trust-run"],
        [*COMMANDS["evaluate"], "--trust-run"],
        [*COMMANDS["resume"], "--trust-run"],
        *([*COMMANDS[name], "--model", "evilrun.payload"] for name in ("export", "evaluate", "resume")),
    ],
    ids=["export", "evaluate", "resume", "export-typed", "evaluate-typed", "resume-typed"],
)
def test_trusted_run_executes_its_code(place, arguments):
    plant(place)
    done = trainer(*arguments)
    assert done.returncode == 0, done.stderr
    assert (place / "mark").exists()


@pytest.mark.quick_cases("evaluate-besides2")
@pytest.mark.parametrize(
    ("command", "besides"),
    [
        ("export", ["--trust-run"]),
        ("export", ["--model", "own.mlp"]),
        ("evaluate", ["--trust-run"]),
        ("evaluate", ["--model", "own.mlp"]),
        ("evaluate", ["--model", "own.mlp", "--backend", "toy"]),
    ],
)
def test_missing_module_is_named(place, command, besides):
    alter(place / "evilrun", model="own.mlp")
    done = trainer(*COMMANDS[command], *besides)
    assert done.returncode == 2
    name = "--model" if "--model" in besides else f"model (from checkpoint {list_checkpoints(place / 'evilrun')[0].name})"
    assert done.stderr == f"error: {name}: got 'own.mlp', but there is no such module; it has to be installed or to lie on PYTHONPATH.\n"


@pytest.mark.thorough
def test_typed_model_is_used_for_the_checkpoint(place):
    for command in ("export", "evaluate"):
        done = trainer(*COMMANDS[command], "--model", "cnn")
        assert done.returncode == 2
        assert done.stderr == "error: --model: got 'cnn', but the checkpoint is of 'logreg'; type that, or leave --model out.\n"
    assert trainer("export", "evilrun", "--describe", "--model", "logreg").stderr.startswith("error: --model: belongs to --format")


FOREIGN = {
    "model": ("somebody.model", "run the code of the module 'somebody.model'"),
    "data": ("image-folder:/somewhere?size=8", "read what 'image-folder:/somewhere?size=8' names"),
    "data_dir": ("/somewhere/else", "read the folder '/somewhere/else'"),
    "initial_weights": ("/somewhere/w.pt", "read the weights in '/somewhere/w.pt'"),
    "mlflow": ("http://somebody.example:5000", "send its records to 'http://somebody.example:5000'"),
}


def test_changed_initial_weights_are_refused_on_resume(place):
    file = place / "w.safetensors"
    file.write_bytes(b"as it was")
    recorded = with_digest(file, hashlib.sha256(b"as it was").hexdigest())
    alter(place / "evilrun", initial_weights=str(recorded))
    resumed = partial(load_resumption, Path("evilrun"), environ={}, config=None)
    typed = {"steps": "+2", "initial_weights": str(file)}
    assert resumed(flags=typed, force=False).resolved.job.initial_weights == recorded
    file.write_bytes(b"as it is")
    for flags, trusted in ((typed, False), ({"steps": "+2"}, True)):
        with pytest.raises(UsageError, match="is not the initial weights that the run began with"):
            resumed(flags=flags, force=False, trusted=trusted)
    assert resumed(flags={"steps": "+2"}, force=True, trusted=True).resolved.job.initial_weights == recorded


@pytest.mark.parametrize("field", FOREIGN)
def test_untrusted_settings_are_refused_unless_typed(place, field):
    value, words = FOREIGN[field]
    alter(place / "evilrun", **{field: value})
    resumed = partial(load_resumption, Path("evilrun"), environ={}, config=None, force=False)
    with pytest.raises(UsageError) as refused:
        resumed(flags={"steps": "+2"})
    assert words in str(refused.value)
    assert f"or type --{field.replace('_', '-')} yourself" in str(refused.value)
    instead = {"model": "logreg", "data": "digits", "data_dir": str(place), "initial_weights": str(place / "w.pt"), "mlflow": ""}[field]
    by_variable, by_file = {f"TRAINER_{field.upper()}": instead}, _file(place, field, instead)
    for typed in ({"flags": {field: instead}}, {"environ": by_variable}, {"config": by_file}):
        if field == "mlflow" and "environ" in typed:
            continue  # an empty variable counts as unset
        with pytest.raises(UsageError) as second:  # with the typed setting the run differs, or is complete
            resumed(**{"flags": {}, **typed})
        assert "--trust-run" not in str(second.value)


def _file(place, field, value):
    (place / "mine.toml").write_text(f"{field} = {json.dumps(value)}\n")
    return str(place / "mine.toml")


def test_several_untrusted_settings_are_named_and_escaped(place):
    alter(place / "evilrun", mlflow="http://a\x1b[31m/", data_dir="/x")
    with pytest.raises(UsageError) as refused:
        load_resumption(Path("evilrun"), {}, {}, None, force=False)
    assert r"read the folder '/x' and send its records to 'http://a\x1b[31m/'" in str(refused.value)
    assert "or type --data-dir and --mlflow yourself" in str(refused.value)


def test_data_folder_of_an_evaluation_may_be_typed(place, capsys):
    alter(place / "evilrun", data_dir="/somewhere/else")
    for same in ([], ["--data", "digits"]):  # the same data would use the folder of the run
        assert invoke(["evaluate", "evilrun", *same]) == 2
        message = capsys.readouterr().err
        assert "read the folder '/somewhere/else'" in message
        assert "or type --data-dir yourself" in message
    assert invoke(["evaluate", "evilrun", "--data-dir", "own"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --data-dir: {str(place / 'own')!r} is no folder")


@pytest.mark.parametrize("name", ["system.jsonl", "heartbeat", "logs/stacks.txt", "checkpoints/more"])
def test_run_with_a_pipe_is_refused_immediately(place, capsys, name):
    path = place / "evilrun" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert invoke(["run", "--resume", "evilrun", "--steps", "+2"]) == 2
    assert f"{name!r} in " in (message := capsys.readouterr().err)
    assert "is neither a file nor a folder" in message


def test_link_out_of_a_run_is_not_written_through(place, capsys):
    mine = place / "mine.txt"
    mine.write_text("precious")
    run = place / "evilrun"
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(mine)
    (run / "inside").symlink_to("checkpoints")
    assert list(links_outside(run)) == ["events.jsonl"]
    assert invoke(["run", "--resume", "evilrun", "--steps", "+2"]) == 2
    assert "write through the link 'events.jsonl'" in capsys.readouterr().err
    (run / "exports").symlink_to(place / "elsewhere")
    (place / "elsewhere").mkdir()
    assert invoke(["export", "evilrun", "--format", "safetensors"]) == 2
    assert "write through the link 'exports'" in capsys.readouterr().err
    assert list((place / "elsewhere").iterdir()) == []
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(
    "request_",
    [
        {"flags": {"model": "somebody.model", "backend": "toy"}, "grid": {"axes": {"seed": [1]}}},
        {"grid": {"axes": {"model": ["logreg", "somebody.model"]}}},
        {"grid": {"axes": {"seed": [1]}, "cases": [{"data_dir": "/somewhere"}]}},
        {"config": "/somewhere/job.toml", "grid": {"axes": {"seed": [1]}}},
    ],
    ids=["flags", "axes", "cases", "config"],
)
def test_foreign_sweep_is_not_resumed(place, capsys, request_):
    grid = {"axes": {}, "cases": [], "repeats": None, **request_["grid"]}
    document = {
        "schema": 1,
        "request": {"config": None, "flags": {}, **request_, "grid": grid},
        "points": [],
        "created_at": "2024-05-06T07:08:09+00:00",
    }
    (place / "sweep").mkdir()
    (place / "sweep/sweep.json").write_text(json.dumps(document))
    assert invoke(["sweep", "--resume", "sweep"]) == 2
    assert "add --trust-run" in capsys.readouterr().err
    invoke(["sweep", "--resume", "sweep", "--trust-run", "--dry-run"])
    assert "add --trust-run" not in capsys.readouterr().err


@pytest.mark.parametrize("link", ["seed=3", ".earlier"])
def test_foreign_sweep_does_not_write_through_links(place, capsys, link):
    request = Request(None, {"backend": "toy"}, Grid({"seed": [3]}))
    (place / "sweep").mkdir()
    with SweepFolder(place / "sweep", request, request.plan({}), ["trainer", "sweep"]):
        pass
    (place / "sweep" / link).symlink_to(place / "evilrun")
    before = sorted((path, path.stat().st_mtime_ns) for path in (place / "evilrun").rglob("*"))
    assert invoke(["sweep", "--resume", "sweep"]) == 2
    assert f"write through the link '{link}'" in capsys.readouterr().err
    assert sorted((path, path.stat().st_mtime_ns) for path in (place / "evilrun").rglob("*")) == before


@pytest.mark.thorough
def test_sweep_passes_typed_settings_to_its_points(place):
    """A point with a custom model resumes when the sweep is typed again."""
    plant(place)
    typed = ["sweep", "--backend", "toy", "--model", "evilrun.payload", "--grid", "seed=3", "--steps", "6", "--checkpoint-every", "2steps"]
    typed += ["--name", "s", "--eval-every", "end", "--no-monitor"]
    assert trainer(*typed).returncode == 0
    run = place / "runs/s/seed=3"
    for folder in list_checkpoints(run)[:2]:  # as if it had been killed earlier
        shutil.rmtree(folder)
    (run / "summary.json").unlink()
    (run / "status.json").write_text(json.dumps({**RunReader(run).status(), "state": "failed"}))
    again = trainer(*typed)
    assert again.returncode == 0, again.stderr
    assert RunReader(run).summary()["resumed"] == 1
    assert not (place / "runs/s/.earlier").exists()


def test_variable_is_not_put_on_a_command_line(monkeypatch):
    job = Job(model="my.model", mlflow="http://me:secret@host/")
    assert typed_of_a_point(job) == ["--model", "my.model", "--mlflow", "http://me:secret@host/"]
    monkeypatch.setenv("TRAINER_MLFLOW", "http://me:secret@host/")
    assert typed_of_a_point(job) == ["--model", "my.model"]


def test_data_of_a_point_are_typed_as_recorded():
    job = Job(data="parallel-text:/mine/talks:en-de", vocabulary=400)
    assert typed_of_a_point(job) == ["--data", "parallel-text:/mine/talks:en-de?vocabulary=400"]


def test_resume_command_works(tmp_path):
    save_model(tmp_path, "logreg", (1, 8, 8))
    assert resume_hint(Job(), tmp_path).endswith(f"--resume {tmp_path}")
    assert resume_hint(Job(data_dir=Path("/mine")), tmp_path).endswith(f"--resume {tmp_path} --trust-run")


def test_trust_option_requires_resume(capsys):
    for command, owners in ((["run"], "--resume or --like"), (["sweep", "--grid", "seed=1,2"], "--resume")):
        assert invoke([*command, "--trust-run"]) == 2
        assert capsys.readouterr().err == f"error: --trust-run: belongs to {owners}\n"


@pytest.mark.parametrize(
    ("field", "value", "is_foreign"),
    [
        ("model", "logreg", False),
        ("model", "os.path", True),
        ("model", "crosstrain.models.logreg", True),
        ("data", "digits", False),
        ("data", "synthetic-images:size=64", False),
        ("data", "image-folder:/x?size=8", True),
        ("data", "image-folder:pictures", True),
        ("data", "image-folder:?size=8", False),
        ("data", "image-folder:~nobody-has-this-name/x", True),
        ("data", "somebodys:/x", True),
        ("data_dir", "x", True),
        ("data_dir", None, False),
        ("initial_weights", "w.pt", True),
        ("mlflow", "sqlite:///x.db", True),
        ("mlflow", "", False),
        (CONFIG, "quickstart", False),
        (CONFIG, "quickstart.toml", True),
        ("batch_size", 8, False),
    ],
)
def test_foreign_settings_are_recognised(field, value, is_foreign):
    assert foreign_settings({field: value}) == ({field: value} if is_foreign else {})


def test_settings_that_name_external_things_are_listed():
    """A new setting of text or path: if it names code, hosts or files, `trust` has to list it."""
    texts = {field for field in Job.model_fields if schema(field).get("type") == "string" and not choices(field)}
    harmless = {
        "backend",
        "launcher",
        "until",
        "eval_every",
        "checkpoint_every",
        "bandwidth",
        "out",
        "name",
        "mlflow_experiment",
        "keep_best",
        "loss",
        "initial_weights_except",
        "weight_decay_except",
    }
    assert texts - harmless == set(FOREIGN)


def test_request_yields_all_its_settings():
    request = Request("x.toml", {"lr": 1}, Grid({"seed": [1, 2]}, ({"nodes": 2},)))
    assert list(request.settings()) == [{CONFIG: "x.toml"}, {"lr": 1}, {"seed": 1}, {"seed": 2}, {"nodes": 2}]
