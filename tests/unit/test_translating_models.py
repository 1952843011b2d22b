"""A model whose quality does not fit its columns or logits is refused when it is built."""

import sys

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.models.build import build_model

MODEL = """
from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.decoding import TranslationQuality
from crosstrain.models.objectives import Objective


def build(data, *, source: str = "source", target: str = "target", inputs: str = "source target", logits: int = 40):
    objective = Objective(
        "translating", "loss", ("loss_sum", "target_tokens", "examples"), (), "target_tokens", TranslationQuality(source, target, "13a")
    )
    return ModelSpec(
        "said", (ParameterSpec("w", (40, 40), bound=0.1),), objective=objective, inputs=tuple(inputs.split()), target="target",
        logits_per_position=logits,
    )
"""
SIZES = {"source": 40, "target": 40, "other": 50}
COLUMNS = (*(ColumnSpec(name, "uint16", (None,)) for name in SIZES), ColumnSpec("mood", "float32"))
DATA = DataInfo("made", {"train": 10, "test": 10}, COLUMNS, TextFeatures(SIZES, ("en", "de")))


@pytest.fixture
def model(tmp_path, monkeypatch):
    package = tmp_path / "said_models"
    (package / "said").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "said" / "__init__.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "said_models.said"
    for name in [name for name in sys.modules if name.startswith("said_models")]:
        del sys.modules[name]


@pytest.mark.parametrize("arguments", ["", "?inputs=source", "?inputs=source other target&target=other&logits=50"])
def test_model_that_translates_its_columns_is_built(model, arguments):
    assert build_model(model + arguments, DATA).objective.translation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("?source=src", "has the source 'src', which the model does not read; its `inputs` are source, target"),
        ("?source=other", "has the source 'other', which the model does not read; its `inputs` are source, target"),
        ("?target=other", "has the target 'other', which the model does not read; its `inputs` and `target` are source, target"),
        ("?inputs=target", "has the source 'source', which the model does not read; its `inputs` are target"),
        ("?source=mood&inputs=mood target", "translates mood, of which 'made' has no vocabulary_sizes"),
        ("?logits=0", "has logits_per_position=0; a model that translates needs 40, a number for each piece of 'target'"),
        ("?logits=41", "has logits_per_position=41; a model that translates needs 40, a number for each piece of 'target'"),
    ],
)
def test_model_that_translates_other_columns_is_refused(model, arguments, message):
    with pytest.raises(UsageError) as caught:
        build_model(model + arguments, DATA)
    assert message in str(caught.value)
    assert repr(model + arguments) in str(caught.value)
    assert str(caught.value).startswith("model: ")
