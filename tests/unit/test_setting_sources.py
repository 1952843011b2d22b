"""Settings from flags over environment over file over defaults, and messages about errors."""

from __future__ import annotations

import sys

import pytest

from crosstrain.core.errors import MissingPackageError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import available
from crosstrain.core.settings.job_fields import allowed, environment_name, flag_name
from crosstrain.core.settings.sources import RESERVED_VARIABLES, resolve

SEE = "`trainer run --print-config` lists every setting."
RUNS = "and `trainer sweep` runs its points."


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return path

    return write


def message(flags=None, environ=None, config=None):
    with pytest.raises(UsageError) as caught:
        resolve(flags or {}, environ or {}, config)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_layers_override_lower_ones_and_are_recorded(config):
    path = config('batch_size = 1\nlr = 0.1\nseed = 1\nout = "here"\n')
    environ = {"TRAINER_BATCH_SIZE": "2", "TRAINER_LR": "0.2", "PATH": "/bin"}
    resolved = resolve({"batch_size": "3"}, environ, path)
    assert (resolved.job.batch_size, resolved.job.lr, resolved.job.seed, resolved.job.nodes) == (3, 0.2, 1, 1)
    sources = resolved.sources
    assert (sources["batch_size"], sources["lr"]) == ("flag", "environment TRAINER_LR")
    assert (sources["seed"], sources["nodes"]) == (f"file {path}", "default")
    assert list(sources) == list(Job.model_fields)


def test_fields_can_be_given_on_every_layer(config):
    values = Job.model_validate({"nodes": 2, "epochs": 3}).model_dump(mode="json", exclude_none=True)
    values |= {"backend": "torch"}
    environ = {
        environment_name(field): ",".join(map(str, value)) if isinstance(value, list) else str(value) for field, value in values.items()
    }
    toml = "\n".join(f"{field} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for field, value in values.items())
    from_environment, from_file = resolve({}, environ).job, resolve({}, {}, config(toml)).job
    assert from_environment == from_file == resolve(values, {}).job


def test_alternative_on_a_higher_layer_replaces_a_lower_one(config):
    path = config("epochs = 5\nbatch_size = 8\n")
    job = resolve({"steps": "100"}, {"TRAINER_GLOBAL_BATCH_SIZE": "24"}, path).job
    assert (job.epochs, job.steps, job.batch_size, job.global_batch_size) == (None, 100, None, 24)


def test_empty_variable_counts_as_unset():
    assert resolve({}, {"TRAINER_NODES": ""}).sources["nodes"] == "default"


@pytest.mark.parametrize("name", RESERVED_VARIABLES)
def test_reserved_variables_are_no_settings(name):
    assert set(resolve({"backend": "tf"}, {name: "off"}).sources.values()) == {"flag", "default"}


def test_shipped_configuration_is_found_by_name():
    resolved = resolve({"backend": "torch"}, {}, "quickstart")
    assert resolved.job.nodes == 3
    assert resolved.sources["nodes"] == "file quickstart.toml (shipped)"


def test_auto_selects_the_first_installed_backend():
    resolved = resolve({}, {})
    expected = next(name for name in ("tf", "torch") if available("backend")[name].installed)
    assert resolved.job.backend == expected
    assert resolved.sources["backend"] == "default (auto: the first installed of tf, torch)"
    assert resolved.notes == (f"backend: {expected} (the first installed of tf, torch; choose with --backend)",)


def test_missing_frameworks_name_the_packages(monkeypatch, tmp_path):
    kept = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [*kept, str(tmp_path)])
    with pytest.raises(MissingPackageError, match=r"crosstrain\[tf\].* or .*crosstrain\[torch\]"):
        resolve({}, {})


def test_auto_selects_third_party_backend_as_last_resort(monkeypatch, repository):
    kept = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [*kept, str(repository / "tests/toy")])
    resolved = resolve({}, {})
    assert resolved.job.backend == "toy"
    assert resolved.sources["backend"] == "default (auto: the first installed of tf, torch, toy)"


def test_deterministic_job_compiles_only_on_equal_request(tmp_path):
    file = tmp_path / "job.toml"

    def compile_setting(flags, environ=None, text=""):
        file.write_text(text)
        resolved = resolve(flags, environ or {}, file)
        return resolved.job.compile, [note for note in resolved.notes if "compile" in note.lower()]

    repeatable = {"deterministic": True, "backend": "torch"}
    assert compile_setting({**repeatable, "compile": "on"}) == ("on", [])
    assert compile_setting({"backend": "torch"}, text='deterministic = true\ncompile = "auto"') == ("auto", [])
    assert compile_setting({"backend": "torch"}, text='compile = "on"') == ("on", [])
    compiled, (note,) = compile_setting(repeatable, text='compile = "on"')
    assert compiled == "off"
    assert note == f"compile: on (from file {file}) is ignored with --deterministic; --compile on typed enables both"
    compiled, (note,) = compile_setting(repeatable, {"TRAINER_COMPILE": "auto"})
    assert compiled == "off"
    assert "TRAINER_COMPILE" in note
    assert compile_setting({**repeatable, "compile": "auto"}, {"TRAINER_COMPILE": "on"}, 'compile = "on"') == ("auto", [])


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({"batch_size": "0"}, {}, "--batch-size: got '0'; allowed: a whole number of at least 1 and at most 1000000000."),
        ({"batch_size": "ten"}, {}, "--batch-size: got 'ten'; allowed: a whole number of at least 1 and at most 1000000000."),
        ({"mode": "asinc"}, {}, "--mode: got 'asinc'; allowed: sync, async. Did you mean 'async'?"),
        ({"lr": "nan"}, {}, "--lr: got 'nan'; allowed: a number greater than 0 and at most 1e+30."),
        ({"lr": "1_0"}, {}, "--lr: got '1_0'; allowed: a number greater than 0 and at most 1e+30."),
        ({"lr": "١"}, {}, "--lr: got '١'; allowed: a number greater than 0 and at most 1e+30."),
        ({"lr": "1e999"}, {}, "--lr: got '1e999'; allowed: a number greater than 0 and at most 1e+30."),
        ({"batch_size": "1_0"}, {}, "--batch-size: got '1_0'; allowed: a whole number of at least 1 and at most 1000000000."),
        ({}, {"TRAINER_SEED": "1_0"}, "TRAINER_SEED: got '1_0'; allowed: a whole number of at least 0 and less than 9223372036854775808."),
        ({"eval_every": "١steps"}, {}, "--eval-every: got '١steps'; allowed: an interval such as 1epoch, 500steps or 30s, or end."),
        (
            {"checkpoint_every": "never"},
            {},
            "--checkpoint-every: got 'never'; allowed: an interval such as 1epoch, 500steps or 30s, or end. "
            "To save no checkpoint, give --no-save-final without --checkpoint-every.",
        ),
        (
            {"cores_per_node": "1,1_0", "nodes": "2"},
            {},
            "--cores-per-node: got '1,1_0'; allowed: one value or several with commas between, "
            "each a number of at least 0.05 and at most 4096.",
        ),
        ({"momentum": "1"}, {}, "--momentum: got '1'; allowed: a number of at least 0 and less than 1."),
        (
            {"cores_per_node": "2,x"},
            {},
            "--cores-per-node: got '2,x'; allowed: one value or several with commas between, "
            "each a number of at least 0.05 and at most 4096.",
        ),
        ({"bandwidth": "100"}, {}, "--bandwidth: got '100'; allowed: a positive number with kbit, mbit or gbit, such as 100mbit."),
        (
            {"name": "../x"},
            {},
            "--name: got '../x'; allowed: a folder name of visible characters, without slashes, that does not start with a dot or a dash.",
        ),
        (
            {"name": "-x"},
            {},
            "--name: got '-x'; allowed: a folder name of visible characters, without slashes, that does not start with a dot or a dash.",
        ),
        (
            {"name": "  "},
            {},
            "--name: got '  '; allowed: a folder name of visible characters, without slashes, that does not start with a dot or a dash.",
        ),
        ({"name": "n" * 300}, {}, f"--name: got '{'n' * 300}'; allowed: a folder name of at most 200 bytes (this one has 300)."),
        ({"seed": "-1"}, {}, "--seed: got '-1'; allowed: a whole number of at least 0 and less than 9223372036854775808."),
        ({}, {"TRAINER_EPOCHS": "two"}, "TRAINER_EPOCHS: got 'two'; allowed: a whole number of at least 1 and at most 1000000000."),
        ({}, {"TRAINER_PEER_MEMORY": "none"}, "TRAINER_PEER_MEMORY: got 'none'; allowed: on or off."),
        ({}, {"TRAINER_MONITOR": "maybe"}, "TRAINER_MONITOR: got 'maybe'; allowed: true or false."),
        ({"backend": "jax"}, {}, "--backend: got 'jax'; allowed: auto, tf, torch (`trainer backends` shows them)."),
        (
            {"data": "digit"},
            {},
            "--data: got 'digit'; allowed: digits, glyphs, glyphs28, synthetic-images, mnist, cifar10, svhn, image-folder, "
            "csv, npz, torch-dataset, jsonl, hf-dataset, parquet, numbers, parallel-text, debian-text "
            "(`trainer data list` shows them). Did you mean 'digits'?",
        ),
        (
            {"model": "no_package.net"},
            {},
            "--model: got 'no_package.net', but there is no such module; it has to be installed or to lie on PYTHONPATH.",
        ),
        (
            {"model": "with-dash.net"},
            {},
            "--model: got 'with-dash.net', but there is no such module; it has to be installed or to lie on PYTHONPATH.",
        ),
        ({"nodes": "3", "nesterov": True}, {}, "--nesterov: got 'true'; needs momentum greater than 0."),
        ({"epochs": "1", "steps": "2"}, {}, "--epochs and --steps: got '1' and '2'; give one of the two."),
        (
            {"optimizer": "adam"},
            {"TRAINER_MOMENTUM": "0.9"},
            "TRAINER_MOMENTUM: got '0.9'; belongs to optimizer sgd, not adam (which has beta1).",
        ),
    ],
)
def test_invalid_value_names_the_allowed_ones(flags, environ, expected):
    assert message(flags, environ) == expected


def test_unknown_model_names_the_models():
    text = message({"model": "alexnett"})
    assert text.startswith("--model: got 'alexnett'; allowed: ")
    assert all(name in text for name in available("model"))


def test_model_without_forward_function_is_refused():
    assert "'json.decoder' has no forward function on backend 'torch'" in message({"model": "json.decoder", "backend": "torch"})


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            "batchsize = 3",
            "batchsize (in file {path}): no setting has this name. Did you mean 'batch_size'? " + SEE,
        ),
        ('"" = 1', "'' (in file {path}): no setting has this name. " + SEE),
        ("epochs = true", "epochs: got 'true' (from file {path}); allowed: a whole number of at least 1 and at most 1000000000."),
        ("lr = -1", "lr: got '-1' (from file {path}); allowed: a number greater than 0 and at most 1e+30."),
        ("name = 5", "name: got '5' (from file {path}); allowed: text."),
        ('mode = "asinc"', "mode: got 'asinc' (from file {path}); allowed: sync, async. Did you mean 'async'?"),
        (
            "nodes = 2\ncores_per_node = [1, 2, 3]",
            "cores_per_node: got '1,2,3' (from file {path}); give one number or one for each of the 2 nodes, not 3.",
        ),
        ("lr = [0.1, 0.01]", "lr (in file {path}): several values of it make a sweep; write it into a table [sweep.grid], " + RUNS),
        ("grid = {lr = [0.1, 0.01]}", "grid (in file {path}): it describes a sweep; write its settings into a table [sweep.grid], " + RUNS),
        ("[[cases]]\nlr = 0.1", "cases (in file {path}): it describes a sweep; write each of its tables as [[sweep.cases]], " + RUNS),
        ("repeats = 3", "repeats (in file {path}): it describes a sweep; write it into a table [sweep], " + RUNS),
    ],
)
def test_invalid_value_in_a_file_names_the_file(config, toml, expected):
    path = config(toml)
    assert message(config=path) == expected.format(path=path)


def test_file_may_begin_with_a_byte_order_mark(tmp_path):
    """As editors of other systems write it."""
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert resolve({"backend": "torch"}, {}, tmp_path / "job.toml").job.steps == 3


def test_invalid_files_are_refused(tmp_path, config):
    error_message = message(config="quickstrt")
    assert ", or a shipped one: cs744-alexnet, cs744-alexnet-2-vs-3, " in error_message
    assert error_message.endswith(" Did you mean 'quickstart'?")
    assert "is not valid TOML: " in message(config=config("nodes = "))
    assert message(config=tmp_path) == f"--config: file {tmp_path} cannot be read: Is a directory."


def test_a_list_of_workers_per_node_in_a_file_is_one_value(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('backend = "torch"\nnodes = 2\nprocs_per_node = [1, 2]\n')
    assert resolve({}, {}, path).job.procs_per_node == (1, 2)
    path.write_text('backend = "torch"\nnodes = [1, 2]\n')
    with pytest.raises(UsageError, match="several values of it make a sweep"):
        resolve({}, {}, path)


def test_unknown_variable_and_flag_suggest_the_nearest():
    assert message(environ={"TRAINER_BATCHSIZE": "3"}) == (
        "TRAINER_BATCHSIZE: no setting has this environment variable. Did you mean 'TRAINER_BATCH_SIZE'? " + SEE
    )
    assert message({"batchsize": "3"}).startswith("--batchsize: no such option. Did you mean '--batch-size'?")


def test_fields_describe_allowed_values():
    for field in Job.model_fields:
        assert allowed(field)
        assert "{" not in allowed(field)
        assert flag_name(field).startswith("--")
