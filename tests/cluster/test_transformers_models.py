"""Models of transformers from configuration files: on torch, and translated."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from own_models import importable

from crosstrain.conformance.runs import relative_difference, run_job, trainer

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")]
TESTS = Path(__file__).parent.parent
TEXT = {"vocab_size": 30_522, "dtype": "bfloat16"}
CONFIGURATIONS = {
    "Bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **TEXT},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TEXT},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 50_256, **TEXT},
    "ViT": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 4},
}


def configuration(name):
    task = "Image" if name == "ViT" else "Sequence"
    return {"architectures": [f"{name}For{task}Classification"], "model_type": name.lower(), **CONFIGURATIONS[name]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {**importable(TESTS / "tables"), "TRAINER_DATA_CACHE": str(tmp_path_factory.mktemp("cache") / "data")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configurations")
    for name in CONFIGURATIONS:
        (folder / f"{name}.json").write_text(json.dumps(configuration(name)))
    return folder


@pytest.fixture(scope="module")
def passes(environment, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("passes")
    lines = "\n".join(f"{'digits' if name == 'ViT' else 'phrases'} hf:{files}/{name}.json" for name in CONFIGURATIONS)
    for framework in ("torch", "tf"):
        command = [sys.executable, TESTS / "imported/column_passes.py", framework, folder]
        subprocess.run(command, input=lines, text=True, check=True, env=environment)
    return {
        name: [np.load(folder / f"{framework}-{number}.npz") for framework in ("torch", "tf")] for number, name in enumerate(CONFIGURATIONS)
    }


def difference(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_translation_equals_configured_model(passes, name):
    expected, actual = passes[name]
    assert sorted(actual.files) == sorted(expected.files)
    assert difference(actual["evaluated"], expected["evaluated"]) <= 1e-5
    assert difference(actual["trained"], expected["trained"]) <= 1e-5
    gradients = [key for key in expected.files if key.startswith("gradient ")]
    flat = [np.concatenate([arrays[key].ravel() for key in gradients]) for arrays in (actual, expected)]
    assert difference(*flat) <= 1e-4


@pytest.mark.thorough
def test_runs_of_a_configuration_agree_on_both_frameworks(environment, files, tmp_path):
    options = {"model": f"hf:{files}/Bert.json?num_hidden_layers=1", "data": "phrases", "steps": 12, "global_batch_size": 9, "lr": 0.001}
    more = {"optimizer": "adam", "deterministic": True, "eval_every": "end", "tensorboard": False, "environment": environment}
    runs = [run_job(tmp_path, backend="torch", nodes=2, **options, **more), run_job(tmp_path, backend="tf", **options, **more)]
    assert relative_difference(runs[0].losses, runs[1].losses) <= 1e-4
    (files / "Bert.json").write_text(json.dumps({**configuration("Bert"), "hidden_dropout_prob": 0.5}))
    changed = trainer("evaluate", str(runs[0].path), "--trust-run", environment=environment)
    assert changed.returncode == 2
    assert "has changed since the checkpoint was saved" in changed.stderr


PROBLEMS = {
    "code": ({"auto_map": {"AutoModel": "model.Net"}}, {}, "has the field 'auto_map', which may import code or read files elsewhere"),
    "nested": ({"vision": [{"trust_remote_code": True}]}, {}, "has the field 'trust_remote_code'"),
    "kernels": ({"attn_implementation": "someone/kernels"}, {}, "has the field 'attn_implementation'"),
    "function": ({"architectures": ["pipeline"]}, {}, "has the architecture 'pipeline', which is no model class of transformers"),
    "unknown": ({"architectures": ["BertForSequenceClasification"]}, {}, "Did you mean 'BertForSequenceClassification'?"),
    "none": ({"architectures": None}, {}, "has the architecture None"),
    "other": ({"model_type": "gpt2"}, {}, "is of the model_type 'gpt2', and BertForSequenceClassification of 'bert'."),
    "wide": ({"hidden_size": 10**12}, {}, "has hidden_size=1000000000000; at most 16,777,216 is allowed."),
    "deep": ({"num_hidden_layers": 10**6}, {}, "has num_hidden_layers=1000000; at most 1,000 is allowed."),
    "large": ({"max_position_embeddings": 1 << 24, "hidden_size": 1 << 16}, {}, "fails: "),
    "odd": ({"num_attention_heads": 5}, {}, "fails: ValueError: The hidden size (32) is not a multiple"),
    "argument": ({}, {"num_layers": "2"}, "got 'num_layers'; allowed: a field of its configuration. Did you mean 'num_"),
    "text": ({}, {"num_hidden_layers": "two"}, "got 'two'; allowed: a whole number."),
    "sequence": ({"architectures": ["BertForMaskedLM"]}, {}, "returns a tensor of shape (4, 6, 30)"),
}
ASK = """
import json, sys
from crosstrain_tables import PHRASES
from crosstrain.data.base import DataInfo
from crosstrain.models.imported.importing import data_facts
from crosstrain.models.imported.requests import Request
from crosstrain.models.imported.torch.process import answer
facts = data_facts(DataInfo("phrases", {{}}, PHRASES.columns, PHRASES.load(None).features))
requests = json.load(sys.stdin)
problems = {{name: answer(Request(f"hf:{{path}}", given, facts, 3, 0, {out!r}, True)) for name, (path, given) in requests.items()}}
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    configurations = {}
    for name, (fields, arguments, _) in PROBLEMS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**configuration("Bert"), **fields}))
        configurations[name] = str(path), arguments
    for name, content in (("empty", b""), ("list", b"[1]"), ("nested", b"[" * 5000)):
        (folder / f"bytes-{name}.json").write_bytes(content)
        configurations[f"bytes-{name}"] = str(folder / f"bytes-{name}.json"), {}
    command = [sys.executable, "-c", ASK.format(out=str(tmp_path_factory.mktemp("described")))]
    done = subprocess.run(command, input=json.dumps(configurations), text=True, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROBLEMS)
def test_hostile_configuration_is_refused_in_a_sentence(problems, name):
    assert PROBLEMS[name][2] in problems[name]
    assert "\n" not in problems[name]


@pytest.mark.parametrize(("name", "problem"), [("empty", "cannot be read"), ("list", "is not a JSON object"), ("nested", "cannot be read")])
def test_file_that_is_no_configuration_is_refused(problems, name, problem):
    assert problem in problems[f"bytes-{name}"]
