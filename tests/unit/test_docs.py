"""Names in the documents exist, and their examples work."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from comparison_samples import side_by_side
from documents import DOCUMENTS, blocks, entry_points, mentioned_commands, shown_commands, write_package
from run_samples import async_run, sync_run
from safetensors.numpy import save_file

from crosstrain.backends.torch import EXPORT_FORMATS
from crosstrain.cli.commands.run import run
from crosstrain.cli.group import COMMANDS, load_command
from crosstrain.cli.options import given_options
from crosstrain.core import plugins
from crosstrain.core.job import Job
from crosstrain.core.settings.sources import RESERVED_VARIABLES, ResumedRun, resolve
from crosstrain.data import base
from crosstrain.data.base import DataInfo, ImageFeatures, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.data.store.location import originals_fingerprint, written_out
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.launch.node.scratch import FIRST_PORT, LAST_PORT
from crosstrain.models.build import build_model
from crosstrain.models.decoding import TranslationQuality, refuse_unscorable
from crosstrain.models.layers import LayerSpecs, convolved
from crosstrain.models.layers.protocol import NetworkLayers, SequenceNetworkLayers
from crosstrain.records.store import schema
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.compare.run_tables import ACROSS_MODES


def arguments(function) -> str:
    """Return a function's arguments as the documents write them.

    Self and types are omitted; arguments such as images, features and logits are x.
    """
    taken = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"]
    names = [re.sub(r"^x_\w+$", "x", parameter.name) for parameter in taken]
    return ", ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default}"
        for name, parameter in zip(names, taken, strict=True)
    )


FOLDERS = (
    "core|metrics|monitor|records|benchmarks|data|models|checkpoint|exchange|backends|engine|launch|report|conformance|cli|configs"
    "|tests|docs"
)
OPTIONS_OF_OTHERS = {
    "--record-durations",
    "--batch",
    "--build-arg",
    "--from-file",
    "--address",
    "--job-name",
    "--open-mode",
    "--requeue",
    "--signal",
    "--logdir",
    "--mail-type",
    "--ntasks-per-node",
    "--nproc-per-node",
    "--no-kill",
    "--no-python",
    "--tail",
    "--usage",
    "--ruleset",
}


def options(command: click.Command) -> set[str]:
    """Return every option of a command and its subcommands."""
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return names.union(*map(options, below))


@pytest.fixture(scope="module")
def every_option():
    return {"--help", "--version"}.union(*(options(load_command(name)) for name in COMMANDS))


@pytest.fixture(scope="module")
def benchmark_options(repository):
    sources = [path.read_text(encoding="utf-8") for path in repository.glob("benchmarks/**/*.py")]
    return {name for source in sources for name in re.findall(r'"(--[a-z][a-z-]+)"', source)}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a folder on the path of this process and its children, and return it.

    Modules imported from it are removed again.
    """
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {path.stem for path in folder.iterdir()}:
            del sys.modules[name]


def leads_somewhere(document, link):
    """Whether a link's file exists (default: this document), with the linked heading, if any."""
    name, _, heading = link.partition("#")
    target = document.parent / name if name else document
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_exist(repository, document):
    path = repository / document
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if not leads_somewhere(path, link)]
    named = re.findall(rf"`((?:{FOLDERS})/[\w/.-]+\.(?:py|md|toml))`", text)
    missing += [name for name in named if not (repository / name).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_variable_and_command_exists(repository, document, every_option, benchmark_options):
    text = (repository / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    known = every_option | OPTIONS_OF_OTHERS | (benchmark_options if "python -m benchmarks" in text else set())
    assert named - known == set()
    variables = set(re.findall(r"\bTRAINER_[A-Z_]*[A-Z]\b", text))
    assert {
        name for name in variables if name not in RESERVED_VARIABLES and f"--{name[8:].lower().replace('_', '-')}" not in every_option
    } == set()
    words = [*shown_commands(repository / document), *mentioned_commands(repository / document)]
    assert {command for command, *_ in words if not command.startswith("-")} <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_shown_run_is_a_valid_job(repository, document, installed):
    """Each `trainer run …` is resolved as if typed, with the page's packages installed."""
    write_package(repository / document, installed)
    for command, *arguments in shown_commands(repository / document):
        if command != "run":
            continue
        with run.make_context("run", list(arguments)) as context:
            resumed = ResumedRun({}, "run", 100, 1, lambda fields: None) if context.params["resume"] else None
            resolve(given_options(context), {}, context.params["config"], resumed)


def test_firewall_ports_are_those_of_tasks(repository):
    text = (repository / "docs/clusters.md").read_text(encoding="utf-8")
    assert f"| {FIRST_PORT} to {LAST_PORT}: each node gives its tasks" in text
    assert f"tcp dport {{ {FIRST_PORT}-{LAST_PORT}, 32768-60999 }} drop" in text


def test_readme_shows_runs(repository):
    assert len([arguments for arguments in shown_commands(repository / "README.md") if arguments[0] == "run"]) >= 8


def test_shown_output_equals_printed_output(repository, tmp_path):
    """The same lines in the same order, and a value in each column."""
    (shown,) = (body for body in blocks(repository / "docs/comparing.md", "") if "state  " in body)
    summaries = [{**RunReader(make(tmp_path)).summary(), "nodes_sharing_cores": 3} for make in (sync_run, async_run)]  # as on the page
    printed = side_by_side(summaries)

    def labels(text):
        lines = [re.split(r"\s{2,}", line.strip()) for line in text.split(ACROSS_MODES.split("\n")[0])[0].splitlines() if line.strip()]
        return [re.sub(r"^node \d|(?<=^relative to ).*", "node", cells[0]) for cells in lines if len(cells) == 3]

    shown = shown[shown.index("\nstate  ") :]  # the conclusion is above the table
    assert labels(shown)
    assert list(dict.fromkeys(labels(shown))) == list(dict.fromkeys(labels(printed)))
    assert ACROSS_MODES in shown


def test_run_directory_page_lists_every_field(repository, tmp_path):
    text = (repository / "docs/run-directory.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", text)) | {"schema"}
    kinds = (schema.StepRecord, schema.EvalRecord, schema.EventRecord, schema.SystemRecord, schema.TaskSample)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    for make in (sync_run, async_run):
        path = make(tmp_path)
        fields |= set(json.loads((path / "status.json").read_text())) | set(json.loads((path / "summary.json").read_text()))
        fields |= {key for node in RunReader(path).summary()["per_node"] for key in node}
    assert fields - documented == set()


@pytest.fixture
def run_page(repository, tmp_path, monkeypatch):
    """Return a function that executes a page's Python block on a run.

    It returns the run's summary and the names of the block.
    """

    def execute(page, make):
        (code,) = blocks(repository / page, "python")
        (path,) = re.findall(r'"(runs/[^"]+)"', code)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        make(tmp_path).rename(tmp_path / path)
        names: dict[str, object] = {}
        exec(code, names)
        return RunReader(tmp_path / path).summary(), names

    return execute


def test_code_of_the_run_directory_page_runs(run_page, capsys):
    summary, names = run_page("docs/run-directory.md", sync_run)
    assert str(summary["examples_per_second"]) in capsys.readouterr().out
    assert len(names["losses"]) == summary["steps"]


UNNAMED_BLOCKS = {
    ("docs/adding-a-backend.md", "# test_conformance.py"),
    ("docs/adding-a-backend.md", "# conftest.py"),
    ("docs/adding-a-dataset.md", "    def load(self, data_dir: Path | None) -> PreparedBlocks:"),
    ("docs/adding-a-dataset.md", "    # from functools import partial"),
    ("docs/adding-a-dataset.md", "    def originals(self, data_dir: Path) -> list[Path]:"),
    ("docs/adding-a-launcher.md", "# test_netns.py"),
    ("docs/adding-a-model.md", "from crosstrain.metrics import Metric"),
    ("docs/adding-a-model.md", "def example_sums(logits_bk, y_b, context):  # on torch; TensorFlow's has the same form"),
    ("docs/checkpoints.md", "from safetensors.numpy import load_file"),
    ("docs/divergence.md", "from crosstrain import recorder"),
    ("docs/from-python.md", "import crosstrain as ct"),
    ("docs/report.md", "from pathlib import Path"),
    ("docs/run-directory.md", "from crosstrain.records.store.run_directory import RunReader"),
    ("docs/translation.md", "import sentencepiece"),
}
"""Python blocks that are not a package's file, by page and first line; tests here or in tests/cluster execute each."""

PACKAGE_BLOCKS = {
    "docs/adding-a-backend.md": {"crosstrain_toy"},
    "docs/adding-a-dataset.md": {"my_package"},
    "docs/adding-a-launcher.md": {"crosstrain_netns"},
    "docs/adding-a-model.md": {"my_models"},
}
"""Packages of the pages, whose files are executed as they are: below, and in tests/cluster/test_documented_*.py."""


def test_every_python_block_compiles_and_is_executed(repository):
    unnamed, packages = set(), {}
    for document in DOCUMENTS:
        for body in blocks(repository / document, "python"):
            compile(textwrap.dedent(body), document, "exec")
            first = body.partition("\n")[0]
            if (file := re.fullmatch(r"# (\w+)/[\w/]+\.py", first)) is not None:
                packages.setdefault(document, set()).add(file[1])
            else:
                unnamed.add((document, first))
    assert (unnamed, packages) == (UNNAMED_BLOCKS, PACKAGE_BLOCKS)


def test_code_of_the_checkpoints_page_reads_weights(repository, tmp_path, monkeypatch):
    (code,) = blocks(repository / "docs/checkpoints.md", "python")
    (path,) = re.findall(r'"(runs/[^"]+)"', code)
    monkeypatch.chdir(tmp_path)
    Path(path).parent.mkdir(parents=True)
    save_file({"dense.bias": np.arange(3.0)}, path)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["weights"]["dense.bias"].tolist() == [0, 1, 2]  # type: ignore[index]


def test_code_of_the_report_page_reads_curves(run_page, capsys):
    summary, _ = run_page("docs/report.md", async_run)
    assert capsys.readouterr().out.startswith(f"{summary['steps']} ")


def test_code_of_translation_page_equals_export(repository):
    """tests/cluster/test_text_export.py executes the code of an export's README."""
    (code,) = blocks(repository / "docs/translation.md", "python")
    assert code.splitlines() == EXPORT_FORMATS["torch"].text_usage.splitlines()


class TestAddingADataset:
    def test_blocks_and_columns_are_read_in_parts(self, repository):
        shown = blocks(repository / "docs/adding-a-dataset.md", "python")
        images, columns = (body for body in shown if "    def load(self, data_dir: Path | None) -> Prepared" in body and body[0] == " ")
        part = np.zeros((2, 3, 64, 64), np.uint8), np.zeros(2, np.int64)
        sentences = np.array([5, 6, 7], np.uint16), np.array([1, 2, 3], np.uint8), np.array([1, 2])
        names = {**vars(base), "Path": Path, "Iterator": Iterator, "Mapping": Mapping, "np": np, "partial": partial}
        names |= {"read_part": lambda folder, split, number: part, "read_sentences": lambda folder, split: [sentences]}
        exec(f"class Images:\n{images}", names)
        exec("class Sentences:\n" + columns.replace("    # from", "    from"), names)
        exec("from crosstrain.data.columns import Column, ColumnSpec", names)
        arrays = names["Images"]().load(None)
        assert (len(list(arrays.blocks["train"]())), arrays.input_shape) == (100, (3, 64, 64))
        (block,) = names["Sentences"]().load(None).blocks["test"]()
        assert (block["tokens"].values.tolist(), block["tags"].offsets.tolist()) == ([5, 6, 7], [0, 1, 3])

    def test_source_can_be_prepared_and_verified(self, repository, installed, tmp_path):
        assert write_package(repository / "docs/adding-a-dataset.md", installed)
        environment = {**os.environ, "TRAINER_DATA_CACHE": str(tmp_path / "cache")}
        for arguments in (["prepare", "stripes"], ["verify", "stripes"], ["list"]):
            command = [sys.executable, "-m", "crosstrain.cli.main", "data", *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
        assert re.search(r"^stripes +yes +5,000 +1,000 .*horizontal and vertical stripes", done.stdout, re.MULTILINE)

    def test_its_translation_has_requested_vocabulary(self, repository, installed, tmp_path, monkeypatch):
        monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
        write_package(repository / "docs/adding-a-dataset.md", installed)
        name = written_out(Job(data="spelled", vocabulary=60)).data
        data = open_dataset(name)
        refuse_unscorable(data, TranslationQuality("source", "target", data.info.text.bleu_tokenizer))
        assert (name, data.info.text.vocabulary_sizes) == ("spelled:vocabulary=60", {"source": 60, "target": 60})

    def test_two_project_files_register_the_package(self, repository, tmp_path):
        for body in blocks(repository / "docs/adding-a-dataset.md", "python"):
            if body.startswith("# my_package/"):
                (tmp_path / "my_package").mkdir(exist_ok=True)
                (tmp_path / body[2:].partition("\n")[0]).write_text(body, encoding="utf-8")
        (script,) = blocks(repository / "docs/adding-a-dataset.md", "bash")
        shown = f"set -e\n{script}\n{shlex.quote(sys.executable)} -m crosstrain.cli.main data list"
        done = subprocess.run(["bash", "-c", shown], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert re.search("^stripes .*horizontal and vertical stripes", done.stdout, re.MULTILINE), done.stderr

    def test_source_without_files_refuses_folder(self, repository, installed, tmp_path):
        write_package(repository / "docs/adding-a-dataset.md", installed)
        with pytest.raises(plugins.UsageError, match="'stripes' reads no files; remove --data-dir"):
            open_dataset("stripes", tmp_path)

    def test_missing_listed_file_is_named(self, repository, tmp_path):
        (method,) = (body for body in blocks(repository / "docs/adding-a-dataset.md", "python") if body.startswith("    def originals("))
        names: dict[str, object] = {"Path": Path}
        exec("class Listed:\n    name = 'listed'\n" + method, names)
        (tmp_path / "train.bin").touch()
        with pytest.raises(plugins.UsageError, match=rf"'listed' needs files that do not exist: {tmp_path}/test\.bin\."):
            originals_fingerprint(names["Listed"](), tmp_path)  # type: ignore[operator]
        (tmp_path / "test.bin").touch()
        assert originals_fingerprint(names["Listed"](), tmp_path)  # type: ignore[operator]

    def test_arrays_are_reproducible(self, repository, installed):
        write_package(repository / "docs/adding-a-dataset.md", installed)
        source = plugins.load(plugins.find("dataset", "stripes"), "dataset")
        first, second = source.load(None), source.load(None)
        assert (first.images["train"] == second.images["train"]).all()
        assert (first.mean, first.std) == (second.mean, second.std)


class TestAddingAModel:
    def test_its_entry_points_register_it(self, repository, installed):
        write_package(repository / "docs/adding-a-model.md", installed)
        assert plugins.available("model")["perceptron"].target == "my_models.perceptron:build"
        done = subprocess.run([sys.executable, "-m", "crosstrain.cli.main", "models"], capture_output=True, text=True, timeout=60)
        assert re.search(
            r"^perceptron +A perceptron with one hidden layer\. 2,410 parameters on digits; backends: tf, torch$", done.stdout, re.MULTILINE
        )

    def test_tables_of_layers_are_their_signatures(self, repository):
        """Every function is listed, with its arguments in order and their defaults."""
        text = (repository / "docs/adding-a-model.md").read_text(encoding="utf-8")
        documented = sorted(re.findall(r"^\| `(\w+\([^)]*\))` \|", text, re.MULTILINE))
        layers = [
            method
            for kind in (LayerSpecs, NetworkLayers, SequenceNetworkLayers)
            for method in vars(kind).values()
            if inspect.isfunction(method)
        ]
        public = [convolved, *(method for method in layers if not method.__name__.startswith("_"))]
        assert documented == sorted(f"{function.__name__}({arguments(function)})" for function in public)

    def test_parameters_of_its_layers_fit(self, repository, installed):
        write_package(repository / "docs/adding-a-model.md", installed)
        build = plugins.load(plugins.find("model", "my_models.convolutional"), "model")
        spec = build(DataInfo.of_images("d", {"train": 1, "test": 1}, ImageFeatures((3, 9, 7), 5, (0.0,) * 3, (1.0,) * 3)))
        assert {parameter.name: parameter.shape for parameter in spec.parameters} == {
            "conv.weight": (8, 3, 3, 3),
            "conv.bias": (8,),
            "output.weight": (5, 8 * 4 * 3),
            "output.bias": (5,),
        }
        assert spec.multiply_adds == 9 * 7 * 8 * 3 * 9 + 8 * 4 * 3 * 5

    def test_tagger_refuses_text_without_its_columns(self, repository, installed):
        write_package(repository / "docs/adding-a-model.md", installed)
        columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("tags", "uint16", (None,))
        data = DataInfo("pairs", {"train": 1, "test": 1}, columns, TextFeatures({"source": 9, "tags": 9}))
        with pytest.raises(plugins.UsageError, match="'pairs' has no column 'tokens'; it has source, tags"):
            build_model("my_models.tagger", data)

    @pytest.mark.thorough
    def test_its_other_metric_is_computed_from_sums(self, repository):
        objective, sums = (body for body in blocks(repository / "docs/adding-a-model.md", "python") if "correct_in_5" in body)
        check = (
            "import torch\n"
            "sums = example_sums(torch.arange(10.0).repeat(3, 1), torch.tensor([9, 5, 4]), None)\n"
            "assert sums['correct_in_5'].tolist() == [True, True, False]\n"
            "assert RANKING.metrics[0].value({'correct_in_5': 2, 'examples': 4}) == 0.5\n"
        )
        done = subprocess.run([sys.executable, "-c", objective + sums + check], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def test_model_for_one_backend_names_it(self, repository, installed):
        write_package(repository / "docs/adding-a-model.md", installed)
        (installed / "my_models/perceptron/tf.py").unlink()
        with pytest.raises(plugins.UsageError, match=r"it has one on: torch\. Choose --backend torch"):
            plugins.forward_plugin("my_models.perceptron", "tf")


class TestAddingABackend:
    def test_its_package_is_the_toy(self, repository):
        """Every file, so that the suite covers the page.

        tests/cluster/test_documented_backend.py runs the page itself.
        """
        toy = repository / "tests/toy"
        files = {
            f"# {path.relative_to(toy).as_posix()}\n{path.read_text(encoding='utf-8')}" for path in (toy / "crosstrain_toy").glob("*.py")
        }
        shown = {body for body in blocks(repository / "docs/adding-a-backend.md", "python") if body.startswith("# crosstrain_toy/")}
        assert len(files) == 2
        assert shown == files

    def test_its_entry_points_are_the_toys(self, repository, monkeypatch):
        monkeypatch.syspath_prepend(str(repository / "tests/toy"))
        shown = entry_points(repository / "docs/adding-a-backend.md")
        assert {plugins.GROUPS[kind] for kind in ("backend", "forward")} <= shown.keys()
        assert all(shown.values())
        for group, rows in shown.items():
            kind = next(kind for kind, name in plugins.GROUPS.items() if name == group)
            assert {name: plugins.available(kind)[name].target for name in rows} == rows

    def test_its_suite_is_that_of_the_toy(self, repository):
        (suite,) = (body for body in blocks(repository / "docs/adding-a-backend.md", "python") if "BackendConformance" in body)
        _, test_case = suite.split("\n\n\n")
        assert test_case.startswith("class ")
        assert test_case in (repository / "tests/cluster/test_toy_backend.py").read_text(encoding="utf-8")

    def test_its_conftest_shares_a_process_pool(self, repository, monkeypatch):
        (code,) = (body for body in blocks(repository / "docs/adding-a-backend.md", "python") if body.startswith("# conftest.py"))
        names: dict[str, Any] = {}
        exec(code, names)
        variable, closing = names["LENT_SERVERS_VARIABLE"], []
        monkeypatch.setenv(variable, "")  # so that it is restored in any case
        monkeypatch.delenv(variable)
        names["pytest_configure"](SimpleNamespace(add_cleanup=closing.append))
        (close,) = closing
        assert os.environ[variable]
        close()
