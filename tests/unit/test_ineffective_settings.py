"""An ineffective setting is refused if typed for a run, and noted if from elsewhere."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import TAKES_EFFECT, environment_name, flag_name, idle_settings, is_boolean, requirement_flags
from crosstrain.core.settings.sources import ResumedRun, resolve, shipped
from crosstrain.core.settings.sweeps import Grid, plan
from crosstrain.launch.sweep_folder import Entry, Request
from crosstrain.launch.sweep_runner import point_arguments
from crosstrain.report.runs.run import repeat_command

VALUES = {
    "mlflow_experiment": "mine",
    "keep_best_count": "3",
    "base_batch_size": "64",
    "sample_interval": "0.7",
    "min_nodes": "1",
    "spare_processes": "true",
    "exchange": "direct",
    "patience": "3",
    "distributed": "always",
    "ps": "1",
    "save_final": "true",
    "initial_weights_except": "head.*",
    "weight_decay_except": "*.bias",
}
WITHOUT = {
    "sample_interval": {"monitor": "false"},
    "exchange": {"mode": "async"},
    "distributed": {"mode": "async"},
    "patience": {"eval_every": "end"},
    "save_final": {"checkpoint_every": "end"},
}
"""What makes a setting idle that is not by default."""


WITH = {"schedule_coefficient": {"warmup_steps": "4"}}
"""Requirements of the other setting."""


def json_value(text):
    """Return a value as in a settings file."""
    return text == "true" if text in ("true", "false") else text


def make_options(fields):
    """Return the command-line options for values of settings."""
    return [f"--no-{name}" if value == "false" else f"{flag_name(name)}={value}" for name, value in fields.items()]


def sample_value(field):
    return VALUES.get(field, "0.5")


@pytest.fixture(autouse=True)
def _installed_framework(monkeypatch):
    monkeypatch.setenv("TRAINER_BACKEND", "torch")


def enabling(field):
    """Return every value of the other setting with which this one has an effect."""
    needed = TAKES_EFFECT[field]
    values_by_field = {
        "keep_best": "loss",
        "max_restarts": "3",
        "eval_every": "5steps",
        "checkpoint_every": "5steps",
        "weight_decay": "0.1",
    }
    values = needed.values or (values_by_field.get(needed.field, "sqlite:///x.db"),)
    return [{needed.field: str(value).lower() if isinstance(value, bool) else value, **WITH.get(field, {})} for value in values]


@pytest.mark.parametrize("field", TAKES_EFFECT)
def test_typed_ineffective_setting_is_refused_with_remedy(field, capsys):
    more = make_options(WITHOUT.get(field, {}))
    typed, shown = ([flag_name(field)], "True") if is_boolean(field) else ([flag_name(field), sample_value(field)], sample_value(field))
    assert invoke(["run", "--print-config", *typed, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {flag_name(field)}: got '{shown}', which does nothing, as ")
    assert captured.err.endswith(f"; it belongs to {requirement_flags(TAKES_EFFECT[field])}.\n")


@pytest.mark.parametrize("field", TAKES_EFFECT)
def test_effective_setting_is_accepted(field):
    for settings in enabling(field):
        resolved = resolve({field: sample_value(field), **settings}, {"TRAINER_BACKEND": "torch"})
        assert resolved.idle == {}
        resolved.refuse_idle_flags()


@pytest.mark.parametrize("field", TAKES_EFFECT)
def test_ineffective_setting_from_file_or_variable_is_noted(field, tmp_path):
    path = tmp_path / "job.toml"
    text = sample_value(field)
    needed = [f"{name} = {json.dumps(json_value(value))}" for name, value in WITHOUT.get(field, {}).items()]
    path.write_text("\n".join([f"{field} = {text if text[0].isdigit() else repr(text)}", *needed]) + "\n")
    for environ, config, key in (({environment_name(field): text}, None, environment_name(field)), ({}, path, field)):
        resolved = resolve({}, {"TRAINER_BACKEND": "torch", **WITHOUT_ENVIRON.get(field, {}), **environ}, config)
        resolved.refuse_idle_flags()
        (note,) = resolved.idle_notes()
        assert note.startswith(f"{key}: got '{text}'")
        assert (str(path) in note) == (config is not None)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"save_final": "false"}, True),
        ({}, False),
        *(({"save_final": "false", field: value}, False) for field, value in (("checkpoint_every", "5steps"), ("keep_best", "loss"))),
        ({"save_final": "false", "max_restarts": "1"}, False),
    ],
)
def test_keep_needs_a_run_that_saves_checkpoints(settings, idle):
    resolved = resolve({"keep": "3", "backend": "torch", **settings}, {})
    if idle:
        with pytest.raises(UsageError, match=r"--keep: got '3', which does nothing, as checkpoint_every is not given; it belongs to"):
            resolved.refuse_idle_flags()
    else:
        assert resolved.idle == {}


WITHOUT_ENVIRON = {field: {environment_name(name): value for name, value in needed.items()} for field, needed in WITHOUT.items()}


def test_ineffective_setting_of_resumed_run_is_accepted():
    fields = Job(schedule_gamma=0.5, monitor=False, backend="torch").model_dump()
    resolved = resolve({"steps": "+5"}, {}, None, ResumedRun(fields, "earlier", 10, 1, lambda fields: None))
    assert resolved.idle == {}
    typed = resolve({"steps": "+5", "schedule_gamma": "0.5"}, {}, None, ResumedRun(fields, "earlier", 10, 1, lambda fields: None))
    with pytest.raises(UsageError, match=r"--schedule-gamma: got '0\.5', which does nothing, as schedule is constant"):
        typed.refuse_idle_flags()


@pytest.mark.parametrize("name", shipped())
def test_shipped_configurations_have_no_ineffective_settings(name):
    assert resolve({"backend": "torch"}, {}, name).idle == {}


def test_sweep_notes_ineffective_settings_and_passes_others(tmp_path, capsys):
    grid = ["--grid", "schedule=constant,step", "--schedule-gamma", "0.5", "--beta1", "0.5", "--out", str(tmp_path)]
    assert invoke(["sweep", *grid, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-2:] == [
        "beta1: does nothing in 2 of 2 points; it belongs to --optimizer adam or adamw",
        "schedule_gamma: does nothing in 1 of 2 points; it belongs to --schedule step",
    ]
    constant, step = captured.out.splitlines()
    assert "--schedule-gamma 0.5" in step
    assert "--schedule-gamma" not in constant
    assert "--beta1" not in captured.out


settings_of_jobs = st.fixed_dictionaries(
    {
        "backend": st.just("torch"),
        "schedule": st.sampled_from(["constant", "step", "cosine"]),
        "schedule_gamma": st.sampled_from([0.1, 0.5]),
        "scale_lr": st.sampled_from(["none", "linear"]),
        "base_batch_size": st.sampled_from([32, 64]),
        "optimizer": st.sampled_from(["sgd", "adam", "adamw"]),
        "beta1": st.sampled_from([0.5, 0.9]),
        "epsilon": st.sampled_from([1e-8, 1e-6]),
        "monitor": st.booleans(),
        "sample_interval": st.sampled_from([0.5, 1.0]),
    }
)


def typed(words):
    """Return the options of a command as `resolve` takes them."""
    flags, iterator = {}, iter(words)
    for word in iterator:
        name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        flags[name] = word.startswith("--no-") is False if name == "monitor" else next(iterator)
    return flags


@given(settings_of_jobs)
def test_generated_commands_are_accepted_and_equivalent(fields):
    job = Job.model_validate(fields)
    (point,) = plan(Grid({"seed": [0]}), {name: str(value) for name, value in fields.items()}, {}, None)
    commands = [
        shlex.split(repeat_command(job.model_dump(mode="json")))[2:],
        point_arguments(Entry(point), Request(None, fields, Grid({"seed": [0]})), job.out)[1:],
    ]
    for command in commands:
        resolved = resolve(typed(command), {})
        resolved.refuse_idle_flags()
        assert effective(resolved.job) == effective(job)


def effective(job):
    values = job.model_dump()
    return {field: value for field, value in values.items() if field != "name" and field not in idle_settings(values)}
