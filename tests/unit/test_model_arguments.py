"""Model arguments, ``--model NAME[:SIZE][?key=value&key=value]``: one text per meaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from crosstrain.cli.commands.models import describe_models
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, forward_plugin, model_base
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.launch.driver.resumption import foreign_settings
from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.build import build_model, canonical_model, written_out
from crosstrain.records.store.run_directory import name_part

DIGITS = DataInfo.of_images("digits", {"train": 10, "test": 5}, ImageFeatures((1, 8, 8), 10, (0.5,), (0.25,)))

MODEL = '''
"""A dense layer of a chosen kind."""

import math
from typing import Annotated, Literal

from crosstrain.models.build import Range, Rate
from crosstrain.models.base import ModelSpec, ParameterSpec


def build(
    data, *, size: Literal["small", "large"] = "small",
    width: int = 2, rate: float = 0.5, biased: bool = True, note: str = "", top: float | None = None,
    share: Rate | None = None, heads: Annotated[int, Range(1, 17)] = 4
):
    shape = (data.classes, math.prod(data.input_shape))
    return ModelSpec("dense", (ParameterSpec("w", shape, bound=0.1),), data.input_shape, data.classes,
                     settings=(size, width, rate, biased, note, top, share, heads))
'''


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The name of a custom model with arguments of every kind."""
    package = tmp_path / "argued_models"
    (package / "dense").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "dense" / "__init__.py").write_text(MODEL)
    (package / "dense" / "torch.py").write_text("def forward(parameters, x, context): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "argued_models.dense"
    for name in [name for name in sys.modules if name.startswith("argued_models")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "canonical", "settings"),
    [
        ("", "", ("small", 2, 0.5, True, "", None)),
        (":small", "", ("small", 2, 0.5, True, "", None)),
        (":large", ":large", ("large", 2, 0.5, True, "", None)),
        ("?size=large", ":large", ("large", 2, 0.5, True, "", None)),
        ("?rate=0.10&width=03", "?width=3&rate=0.1", ("small", 3, 0.1, True, "", None)),
        ("?biased=false&rate=1", "?rate=1&biased=false", ("small", 2, 1.0, False, "", None)),
        (":large?top=.25", ":large?top=0.25", ("large", 2, 0.5, True, "", 0.25)),
        ("?width=2&rate=5e-1", "", ("small", 2, 0.5, True, "", None)),
        ("?note=a=b?c:d/e", "?note=a=b?c:d/e", ("small", 2, 0.5, True, "a=b?c:d/e", None)),
    ],
)
def test_one_canonical_text_per_meaning(model, arguments, canonical, settings):
    assert canonical_model(model + arguments) == model + canonical
    assert canonical_model(model + canonical) == model + canonical
    assert build_model(model + arguments, DIGITS).settings == build_model(model + canonical, DIGITS).settings == (*settings, None, 4)
    assert written_out(Job(model=model + arguments)).model == model + canonical


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (":huge", ["size of", "'huge'", "small, large"]),
        (":larg", ["Did you mean 'large'"]),
        ("?widht=3", ["argument of", "'widht'", "width=…", "Did you mean 'width'"]),
        ("?width=three", ["width of", "'three'", "a whole number"]),
        ("?width=1.5", ["a whole number"]),
        ("?rate=nan", ["rate of", "a number"]),
        ("?rate=much", ["a number"]),
        ("?rate=0_1", ["rate of", "'0_1'", "a number"]),
        ("?rate=٠.٥", ["a number"]),
        ("?rate=1e999", ["a number"]),
        ("?share=1", ["share of", "'1'", "a number from 0 up to, but not including, 1"]),
        ("?share=-0.1", ["a number from 0 up to, but not including, 1"]),
        ("?heads=0", ["a whole number from 1 up to, but not including, 17"]),
        ("?biased=yes", ["true or false"]),
        ("?width=3&width=4", ["'width' twice"]),
        (":large?size=large", ["'size' twice"]),
        ("?width", ["key=value"]),
        ("?width=", ["key=value"]),
        ("?width=3&", ["key=value"]),
        ("?", ["nothing follows '?'"]),
        (":", ["nothing follows ':'"]),
    ],
)
def test_invalid_argument_names_the_allowed_values(model, arguments, words):
    for refuse in (canonical_model, lambda text: build_model(text, DIGITS)):
        with pytest.raises(UsageError) as raised:
            refuse(model + arguments)
        for word in words:
            assert word in str(raised.value)


@pytest.mark.parametrize(("arguments", "settings"), [("?share=0&heads=1", (0.0, 1)), ("?share=.99&heads=16", (0.99, 16)), ("", (None, 4))])
def test_argument_within_its_range_is_accepted(model, arguments, settings):
    assert build_model(model + arguments, DIGITS).settings[-2:] == settings


@pytest.mark.parametrize("argument", ["dropout=-0.1", "dropout=1", "dropout_attention=2", "smoothing=-1"])
def test_invalid_rate_is_refused_without_data(argument):
    name, _, value = argument.partition("=")
    with pytest.raises(UsageError, match=rf"model: {name} of 'transformer': got '{value}'; allowed: a number from 0 up to, but not"):
        canonical_model(f"transformer:tiny?{argument}")


@pytest.mark.parametrize("arguments", [":18", "?width=3"])
def test_model_without_arguments_refuses_any(arguments):
    with pytest.raises(UsageError, match="'logreg' takes no arguments"):
        canonical_model("logreg" + arguments)
    with pytest.raises(UsageError, match="'logreg' takes no arguments"):
        build_model("logreg" + arguments, DIGITS)


@pytest.mark.parametrize(
    ("parameter", "word"),
    [("width: int", "default"), ("width=3", "annotation"), ("width: list = ()", "list"), ("width: 'Missing' = 3", "Missing")],
)
def test_unsupported_declaration_names_the_requirement(tmp_path, monkeypatch, parameter, word):
    (tmp_path / "odd_models").mkdir()
    (tmp_path / "odd_models" / "__init__.py").touch()
    (tmp_path / "odd_models" / "odd.py").write_text(f"def build(data, *, {parameter}): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=word):
        build_model("odd_models.odd", DIGITS)
    for name in ("odd_models", "odd_models.odd"):
        sys.modules.pop(name, None)


def test_model_with_arguments_is_found(model):
    assert model_base(f"{model}:large?rate=0.1") == model
    assert find("model", f"{model}?rate=0.1") == find("model", model)
    assert forward_plugin(f"{model}:large?rate=0.1", "torch") == forward_plugin(model, "torch")
    assert find("model", "cnn:wide").name == "cnn"


def test_dots_in_arguments_name_no_module(model):
    assert not foreign_settings({"model": "logreg?rate=0.1"})
    assert foreign_settings({"model": f"{model}?width=3"}) == {"model": f"{model}?width=3"}


def test_folder_names_have_no_shell_characters():
    assert name_part("transformer:tiny?norm=post&dropout=0.1") == "transformer_tiny_norm_post_dropout_0.1"
    assert name_part("/home/me/nets/net.py:Net?path=/a/b") == "net.py_Net_path__a_b"
    assert len(name_part("m?note=" + 300 * "x")) == 80


def test_command_shows_and_refuses_arguments(model, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def trainer(*arguments):
        return subprocess.run([sys.executable, "-m", "crosstrain.cli.main", *arguments], capture_output=True, text=True, env=environment)

    done = trainer("run", "--model", f"{model}:larg", "--backend", "torch", "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'large'" in done.stderr
    assert not (tmp_path / "out").exists()
    shown = trainer("run", "--model", f"{model}?width=02", "--backend", "torch", "--print-config", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["model"]["value"] == model


def test_every_argument_is_shown_with_its_default():
    (transformer,) = (row for row in describe_models() if row.name == "transformer")
    assert "norm: pre, post [default: pre]" in transformer.arguments
    assert "dropout: a number from 0 up to, but not including, 1 [default: that of the size]" in transformer.arguments
    assert all("[default: " in argument for argument in transformer.arguments)


@pytest.mark.parametrize(
    ("parameters", "buffers", "says"),
    [
        (("w", "w"), (), "two parameters or buffers called 'w'"),
        (("w",), ("w",), "two parameters or buffers called 'w'"),
        (("a", "a.b"), (), "has 'a' and 'a.b'"),
        (("a.b.c",), ("a.b",), "has 'a.b' and 'a.b.c'"),
        *(((name,), (), "allowed: letters") for name in ("", "b é", "w:0", "a..b", ".a", "a.", "_a", "a\n", "a b", 3)),
    ],
)
def test_parameter_names_that_no_export_holds_are_refused(parameters, buffers, says):
    with pytest.raises(UsageError, match=says):
        ModelSpec(
            "own", tuple(ParameterSpec(name, (1,)) for name in parameters), buffers=tuple(ParameterSpec(name, (1,)) for name in buffers)
        )


def test_parameter_names_may_share_a_prefix():
    names = ("a.b", "a.c", "ab", "a-b", "9", "x/0_.y-z")
    assert ModelSpec("own", tuple(ParameterSpec(name, (1,)) for name in names)).size == len(names)
