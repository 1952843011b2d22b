"""``trainer configs`` lists experiments with their commands, and shows one as written."""

import json
import shlex

import pytest
from click.testing import CliRunner

from crosstrain.cli.commands.configs import configs, describe_configs
from crosstrain.core.errors import UsageError
from crosstrain.core.settings.sources import read_config, resolve, shipped
from crosstrain.core.settings.sweeps import plan, read_grid


def run(*arguments):
    return CliRunner().invoke(configs, arguments, catch_exceptions=True)


def test_the_list_has_each_with_its_command():
    lines = run().output.splitlines()
    assert len(lines) == len(shipped())
    for line, config in zip(lines, describe_configs(), strict=True):
        assert line.startswith(f"{config.command} ")
        assert line.endswith(config.description)
        assert config.description.endswith((".", ":", "?"))
    assert [entry["name"] for entry in json.loads(run("--json").output)] == list(shipped())


@pytest.mark.parametrize("config", describe_configs(), ids=lambda config: config.name)
def test_the_command_is_one_that_takes_it(config):
    command, *rest = shlex.split(config.command)[1:]
    name = rest[-1]
    if command == "sweep":
        assert len(plan(read_grid(name), {}, {}, name)) > 1
    else:
        assert resolve({}, {}, name).job


def test_one_is_shown_as_a_file_to_begin_from(tmp_path):
    shown = run("show", "quickstart").output
    (tmp_path / "mine.toml").write_text(shown)
    assert read_config(tmp_path / "mine.toml")[1] == read_config("quickstart")[1]


def test_what_there_is_not_is_refused():
    wrong = run("show", "quickstrat").exception
    assert isinstance(wrong, UsageError)
    assert "Did you mean 'quickstart'?" in str(wrong)
    assert isinstance(run("--json", "show", "quickstart").exception, UsageError)
