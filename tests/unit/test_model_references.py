"""References to models: what is one, what they resolve to, and that nothing is imported."""

import os
import sys
from pathlib import Path

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.core.plugins import forward_backends, forward_plugin, is_reference, model_base
from crosstrain.launch.driver.resumption import foreign_settings
from crosstrain.launch.preflight.model_source import model_source
from crosstrain.models.build import canonical_model
from crosstrain.models.imported.reference import local_sources, named_files, read_reference

NETS = Path(__file__).parent.parent / "imported/nets.py"
MARK = "open({mark!r}, 'a').write('imported')\n"


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("logreg", "logreg"),
        ("transformer:big?dropout=0.1", "transformer"),
        ("transformr:big", "transformr"),
        ("nets.py:Net", "nets.py:Net"),
        ("./nets.py:Net?width=8", "./nets.py:Net"),
        ("/a:b/nets.py:Net", "/a:b/nets.py:Net"),
        ("torchvision:resnet18?width=2", "torchvision:resnet18"),
        ("json:decoder.JSONDecoder", "json:decoder.JSONDecoder"),
        ("own.module:Net?depth=3", "own.module:Net"),
        ("hf:bert.json?num_hidden_layers=2", "hf:bert.json"),
        ("hf:/a:b/bert", "hf:/a:b/bert"),
    ],
)
def test_model_base_of_text(text, base):
    assert model_base(text) == base
    assert is_reference(base) == (":" in base)


def test_module_with_forward_functions_takes_a_size(tmp_path, monkeypatch):
    (tmp_path / "specs/wide").mkdir(parents=True)
    (tmp_path / "specs/wide/torch.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_base("specs.wide:large") == "specs.wide"
    assert model_base("specs.narrow:Net") == "specs.narrow:Net"


def test_reference_is_read_without_import(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    package = tmp_path / "planted"
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text(MARK.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("planted:Net", "planted.inner:Net", f"{package}/inner.py:Net"):
        assert is_reference(text)
        assert forward_backends(text) == ["tf", "torch"]
        assert forward_plugin(text, "tf").target == "crosstrain.models.imported.tf.forward"
        assert foreign_settings({"model": text})
        assert model_source(text).digest
    assert not mark.exists()
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    "text", ["nets.py:Net", "/tmp/nets.py:Net?a=1", "torchvision:resnet18", "json:Net", "a.b:Net", "hf:/tmp/bert.json"]
)
def test_every_form_in_a_runs_files_is_foreign(text):
    assert foreign_settings({"model": text})


def test_file_is_recorded_by_its_absolute_path(monkeypatch):
    monkeypatch.chdir(NETS.parent)
    assert canonical_model("nets.py:Attentive?image_size=8") == f"{NETS}:Attentive?image_size=8"
    assert canonical_model("torchvision:resnet18") == "torchvision:resnet18"


def test_missing_file_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"there is no file '.*/net\.py'\. Did you mean 'nets\.py'\?"):
        read_reference(f"{NETS.parent}/net.py:Net")


def test_configuration_is_recorded_by_its_path_and_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert.json").write_text("{}")
    assert canonical_model("hf:bert.json?num_labels=2") == f"hf:{tmp_path}/bert.json?num_labels=2"
    before = model_source("hf:bert.json")
    (tmp_path / "bert.json").write_text('{"a": 1}')
    assert before.package == os.fspath(tmp_path / "bert.json")
    assert model_source("hf:bert.json").digest != before.digest
    with pytest.raises(UsageError, match=r"there is no file '.*/brt\.json'\. Did you mean 'bert\.json'\?"):
        read_reference("hf:brt.json")


@pytest.mark.parametrize("name", ["", "1st", "a b", "a..b", "a-b"])
def test_impossible_name_is_refused(name):
    with pytest.raises(UsageError, match="with the name of a class or function in it"):
        read_reference(f"{NETS}:{name}")


def test_local_sources_are_found_in_the_text(tmp_path):
    (tmp_path / "parts").mkdir()
    for name, text in {
        "net.py": "import blocks\nfrom parts import heads\nimport torch, os\n",
        "blocks.py": "from parts.heads import Head\nimport net\n",
        "parts/__init__.py": "",
        "parts/heads.py": "raise RuntimeError\n",
        "unused.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    assert sorted(local_sources(tmp_path / "net.py")) == ["blocks.py", "net.py", "parts/__init__.py", "parts/heads.py"]


@pytest.mark.parametrize("content", [b"def", b"\0", b"(" * 5000, b"\xff\xfe"])
def test_unreadable_source_is_refused(tmp_path, content):
    (tmp_path / "net.py").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as Python"):
        local_sources(tmp_path / "net.py")


def test_source_digest_changes_with_an_imported_file(tmp_path):
    (tmp_path / "net.py").write_text("import blocks\n")
    (tmp_path / "blocks.py").write_text("A = 1\n")
    before = model_source(f"{tmp_path}/net.py:Net")
    (tmp_path / "blocks.py").write_text("A = 2\n")
    after = model_source(f"{tmp_path}/net.py:Net")
    assert before.package == after.package == os.fspath(tmp_path / "net.py")
    assert before.digest != after.digest


def test_files_that_a_source_names_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    (tmp_path / "other.py").write_text("")
    source = tmp_path / "net.py"
    source.write_text("load('weights.safetensors')\nload('missing.pt')\nload('other.py')\nload('a\\0b.pt')\nload('.')\n")
    assert named_files(source) == [tmp_path / "weights.safetensors"]


def test_one_file_has_one_path(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text("")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert read_reference("../net.py:Net").place == str(tmp_path / "net.py")


def test_unknown_home_folder_is_refused():
    with pytest.raises(UsageError, match="no-such-user"):
        read_reference("~no-such-user/net.py:Net")


def test_relative_imports_of_a_package_are_sources(tmp_path):
    package = tmp_path / "parts"
    package.mkdir()
    (tmp_path / "net.py").write_text("from parts.heads import Head\n")
    (package / "__init__.py").write_text("")
    (package / "heads.py").write_text("from .common import width\nfrom . import more\n")
    for name in ("common.py", "more.py"):
        (package / name).touch()
    parts = [f"parts/{name}.py" for name in ("__init__", "common", "heads", "more")]
    assert sorted(local_sources(tmp_path / "net.py")) == ["net.py", *parts]
