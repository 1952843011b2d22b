"""Suggestions for unknown names: what was meant, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crosstrain.cli.main import main
from crosstrain.core.job import Job
from crosstrain.core.plugins import BUILT_IN
from crosstrain.core.settings.job_fields import choices, flag_name
from crosstrain.core.settings.sources import resolve
from crosstrain.core.suggestions import OTHER_NAMES, nearest

FLAGS = [flag_name(field) for field in Job.model_fields]
RUN_ONLY = ["--config", "--json", "--node-rank", "--rendezvous", "--resume", "--repeats", "--print-config"]
VALUES = [name for field in Job.model_fields for name in choices(field)]
PLUGINS = [plugin.name for plugins in BUILT_IN.values() for plugin in plugins]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--target", "--until"),
        ("--target-accuracy", "--until"),
        ("--learning-rate", "--lr"),
        ("--learning_rate", "--lr"),
        ("--num-epochs", "--epochs"),
        ("--max-steps", "--steps"),
        ("--workers", "--procs-per-node"),
        ("--gpus", "--procs-per-node"),
        ("--num-nodes", "--nodes"),
        ("--nnodes", "--nodes"),
        ("--world-size", "--procs-per-node"),
        ("--optimiser", "--optimizer"),
        ("--optim", "--optimizer"),
        ("--dataset", "--data"),
        ("--output-dir", "--out"),
        ("--sched", "--schedule"),
        ("--epoch", "--epochs"),
        ("--batch", "--batch-size"),
        ("--batchsize", "--batch-size"),
        ("--BATCH_SIZE", "--batch-size"),
        ("--every", "--eval-every"),
        ("--gradient-clip", "--clip-norm"),
        ("--ema", "--ema-decay"),
        ("--gradient-accumulation-steps", "--accumulate"),
        ("--early-stopping", "--patience"),
    ],
)
def test_option_with_a_synonym_or_slip_has_a_suggestion(typed, meant):
    assert nearest(typed, FLAGS) == meant


@pytest.mark.parametrize("typed", ["--test", "--verbose", "--frobnicate", "-x", "--", "", "--q", "--zz"])
def test_distant_name_has_no_suggestion(typed):
    assert nearest(typed, FLAGS) is None


@pytest.mark.parametrize(
    ("field", "typed", "meant"),
    [
        ("backend", "tensorflow", "tf"),
        ("backend", "TensorFlow", "tf"),
        ("backend", "pytorch", "torch"),
        ("backend", "jax", None),
        ("optimizer", "AdamW", "adamw"),
        ("optimizer", "adam-w", "adamw"),
        ("optimizer", "rmsprop", None),
        ("optimizer", "momentum", "sgd"),
        ("device", "cuda", "gpu"),
        ("precision", "float16", "fp16"),
        ("mode", "asynchronous", "async"),
        ("data", "cifar", "cifar10"),
        ("augment", "flip+crop", "crop+flip"),
        ("model", "resnet", "resnet18"),
    ],
)
def test_value_with_a_synonym_has_a_suggestion(capsys, field, typed, meant):
    assert main(["run", flag_name(field), typed]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {flag_name(field)}: got {typed!r}; allowed: ")
    assert message.partition("Did you mean ")[2].strip() == (f"{meant!r}?" if meant else "")


def test_variable_and_key_with_a_synonym_have_a_suggestion(tmp_path):
    (tmp_path / "job.toml").write_text("learning_rate = 0.1\n")
    with pytest.raises(Exception, match=r"learning_rate \(in file .*Did you mean 'lr'\?"):
        resolve({}, {}, tmp_path / "job.toml")
    with pytest.raises(Exception, match=r"TRAINER_LEARNING_RATE: .*Did you mean 'TRAINER_LR'\?"):
        resolve({}, {"TRAINER_LEARNING_RATE": "0.1"})
    with pytest.raises(Exception, match=r"TRAINER_FOO: no setting has this environment variable\. `"):
        resolve({}, {"TRAINER_FOO": "0.1"})


def test_commands_suggest_their_own_options(capsys):
    assert main(["compare", "--targte", "x"]) == 2
    assert "Did you mean" not in capsys.readouterr().err
    assert main(["evaluate", "--dataset", "x"]) == 2
    assert "`trainer evaluate` has no such option. Did you mean '--data'?" in capsys.readouterr().err


def test_synonyms_are_unique_and_of_existing_names():
    known = {*Job.model_fields, *(name.removeprefix("--").replace("-", "_") for name in RUN_ONLY), *VALUES, *PLUGINS}
    assert set(OTHER_NAMES) <= known
    for ours, synonyms in OTHER_NAMES.items():
        for synonym in synonyms:
            assert nearest(synonym, [ours, "zzzzzzzzzzzz"]) == ours


@given(st.sampled_from(FLAGS), st.data())
def test_single_slip_in_a_name_has_a_suggestion(flag, data):
    place = data.draw(st.integers(2, len(flag) - 1))
    kind = data.draw(st.sampled_from(["out", "in", "swap"]))
    if kind == "swap":
        typed = flag[:place] + flag[place : place + 2][::-1] + flag[place + 2 :]
    else:
        typed = flag[:place] + ("q" if kind == "in" else "") + flag[place + (kind == "out") :]
    assume(len(flag) > 6)
    near = nearest(typed, FLAGS)
    assert near is not None
    assert near == flag or nearest(typed, [near]) == near


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=5))
def test_suggestion_is_an_allowed_value(typed, allowed):
    assert nearest(typed, allowed) in (None, *allowed)
    for name in allowed:
        if name.strip("-_ "):
            assert nearest(name, [name]) == name
