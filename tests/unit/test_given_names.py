"""Errors about a setting name it as it was typed: option, variable, or key and file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.cli.main import main
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import environment_name, flag_name, is_boolean, schema
from crosstrain.core.settings.sources import named, resolve

TOYS = [str(Path(__file__).parent.parent / folder) for folder in ("toy", "least_toy")]

INVALID = {
    "data_dir": "/no/such/folder",
    "out": "/dev/null/runs",
    "name": "-x",
    "mlflow": "nowhere",
    "until": "soon",
    "bandwidth": "fast",
    "eval_every": "now",
    "checkpoint_every": "now",
    "mlflow_experiment": "x" * 501,
    "initial_weights_except": "head.*,",
    "weight_decay_except": "head.*,",
    "data": "no-such-data",
    "model": "no-such-model",
    "backend": "no-such-backend",
}
"""Invalid values of text and path fields; for others see `invalid`. None is empty, as empty variables count as unset."""


def invalid(field):
    if field in INVALID:
        return INVALID[field]
    return "maybe" if is_boolean(field) else "-1" if schema(field).get("type") in ("integer", "number") else "no-such-value"


@pytest.fixture(autouse=True)
def _only_toy_backends(monkeypatch, tmp_path):
    for folder in TOYS:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*TOYS, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TRAINER_") and name != "TRAINER_DATA_CACHE":
            monkeypatch.delenv(name)


def error_of_run(capsys, monkeypatch, source, settings, *more):
    """Return the error of a run with these settings, all from one source."""
    arguments = ["run", *more]
    if source == "flag":
        for field, value in settings.items():
            arguments += [f"--no-{flag_name(field)[2:]}" if value is False else flag_name(field)] if isinstance(value, bool) else []
            arguments += [] if isinstance(value, bool) else [flag_name(field), str(value)]
    elif source == "environment":
        for field, value in settings.items():
            monkeypatch.setenv(environment_name(field), str(value))
    else:
        Path("job.toml").write_text("".join(f"{field} = {json.dumps(value)}\n" for field, value in settings.items()))
        arguments += ["--config", "job.toml"]
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
    return err


def expected_beginning(source, field):
    """Return the beginning of a message about a field, and what else it must contain."""
    if source == "flag":
        return f"error: {flag_name(field)}: ", ""
    if source == "environment":
        return f"error: {environment_name(field)}: ", ""
    return f"error: {field}", "file job.toml"


SOURCES = ["flag", "environment", "file"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("field", [field for field in Job.model_fields if field not in ("backend",)])
def test_invalid_value_of_any_field_names_the_source(capsys, monkeypatch, source, field):
    if source == "flag" and is_boolean(field):
        return  # a switch has no invalid value
    more = [] if field == "backend" else ["--backend", "toy"]
    err = error_of_run(capsys, monkeypatch, source, {field: invalid(field)}, *more)
    start, has = expected_beginning(source, field)
    assert err.startswith(start)
    assert has in err


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("field", "settings", "words"),
    [
        ("name", {"name": "taken"}, "'taken' is taken in 'runs'"),
        ("model", {"model": "json.decoder"}, "has no forward function on backend 'least-toy'"),
        ("data", {"data": "digits:5"}, "'digits' takes no arguments"),
        ("data_dir", {"data_dir": "/tmp"}, "comes with scikit-learn"),
        ("augment", {"augment": "flip"}, "must not be mirrored"),
        ("cores_per_node", {"cores_per_node": "4000"}, "cores for a node, which is what this machine has"),
        ("momentum", {"momentum": 0.5, "optimizer": "adam"}, "belongs to optimizer sgd"),
        ("mode", {"mode": "async"}, "got 'async', which backend least-toy does not support; supported there: sync."),
        ("precision", {"precision": "bf16"}, "got 'bf16', which backend least-toy does not support; supported there: fp32."),
        ("device", {"device": "gpu"}, "got 'gpu', which backend least-toy does not support; supported there: auto, cpu."),
        ("augment", {"augment": "crop"}, "got 'crop', which backend least-toy does not support; supported there: none."),
        ("deterministic", {"deterministic": True}, "got 'true', which backend least-toy does not support; supported there: false."),
        ("profile", {"profile": 5}, "got '5', which backend least-toy does not support; supported there: 0."),
    ],
)
def test_later_errors_name_the_source(capsys, monkeypatch, source, field, settings, words):
    Path("runs/taken").mkdir(parents=True)
    err = error_of_run(capsys, monkeypatch, source, settings, "--backend", "least-toy")
    start, has = expected_beginning(source, field)
    assert err.startswith(start)
    assert has in err
    assert words in err


@pytest.mark.parametrize("source", SOURCES)
def test_conflict_with_torchrun_names_the_source(capsys, monkeypatch, source):
    contract = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in {**contract, "TRAINER_SECRET": "s" * 20}.items():
        monkeypatch.setenv(name, value)
    err = error_of_run(capsys, monkeypatch, source, {"nodes": 3}, "--backend", "toy")
    start, has = expected_beginning(source, "nodes")
    assert err.startswith(start)
    assert has in err
    assert "got 3, but torchrun says 2" in err
    monkeypatch.delenv("TRAINER_NODES", raising=False)
    err = error_of_run(capsys, monkeypatch, source, {"bandwidth": "1mbit"}, "--backend", "toy")
    assert err.startswith(expected_beginning(source, "bandwidth")[0])


TINY = """
from crosstrain.models.base import ModelSpec, ParameterSpec


def build(data):
    return ModelSpec("tiny", (ParameterSpec("scale", ()), ParameterSpec("shift", (1,))), data.input_shape, data.classes)
"""


@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_too_many_parameter_servers_name_the_source(capsys, monkeypatch, tmp_path, backend):
    package = tmp_path / f"own_{backend}/tiny"
    package.mkdir(parents=True)
    for file in ("../__init__.py", f"{backend}.py"):
        (package / file).touch()
    (package / "__init__.py").write_text(TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"mode": "async", "ps": 3, "model": f"own_{backend}.tiny", "network": "host"}
    err = error_of_run(capsys, monkeypatch, "file", settings, "--backend", backend)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == [
        f"error: ps (in file job.toml): got '3'; allowed: at most 2, as the model 'own_{backend}.tiny' has 2 numbers in all, and a server "
        "needs one to hold."
    ]
    assert not Path("runs").exists()


def test_sweep_names_its_options(capsys):
    Path("runs/taken").mkdir(parents=True)
    Path("runs/taken/file").touch()
    assert main(["sweep", "--backend", "toy", "--grid", "lr=0.1,0.2", "--name", "taken", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: --name: 'taken' is taken in 'runs'")


@given(st.text(max_size=40), st.dictionaries(st.sampled_from(sorted(Job.model_fields)), st.sampled_from(["flag", "default"])))
def test_only_messages_about_known_fields_change(message, sources):
    assert named(message, sources) == message or message.partition(": ")[0] in {
        *sources,
        *(f"{a} and {b}" for a in sources for b in sources),
    }


@given(st.sampled_from(sorted(Job.model_fields)), st.text(max_size=40))
def test_each_source_has_its_form(field, rest):
    message = f"{field}: {rest}"
    assert named(message, {}) == message
    for origin, key in (
        ("flag", flag_name(field)),
        ("default (auto: the first installed of tf, torch)", flag_name(field)),
        (f"environment {environment_name(field)}", environment_name(field)),
        ("file a b.toml", f"{field} (in file a b.toml)"),
        ("run mine", f"{field} (from run mine)"),
    ):
        assert named(message, {field: origin}) == f"{key}: {rest}"
        assert named(named(message, {field: origin}), {field: origin}) == f"{key}: {rest}"


def test_invalid_value_of_two_fields_names_both():
    with pytest.raises(UsageError, match=r"^TRAINER_NESTEROV: got 'true'; needs momentum greater than 0\.$"):
        resolve({"backend": "toy"}, {"TRAINER_NESTEROV": "true"})
