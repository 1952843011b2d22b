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


def test_list_has_each_config_with_command():
    lines = run().output.splitlines()
    assert len(lines) == len(shipped())
    for line, config in zip(lines, describe_configs(), strict=True):
        assert line.startswith(f"{config.command} ")
        assert line.endswith(config.description)
        assert config.description.endswith((".", ":", "?"))
    assert [entry["name"] for entry in json.loads(run("--json").output)] == list(shipped())


@pytest.mark.parametrize("config", describe_configs(), ids=lambda config: config.name)
def test_listed_command_accepts_config(config):
    command, *rest = shlex.split(config.command)[1:]
    name = rest[-1]
    if command == "sweep":
        assert len(plan(read_grid(name), {}, {}, name)) > 1
    else:
        assert resolve({}, {}, name).job


def test_shown_config_is_readable_as_file(tmp_path):
    shown = run("show", "quickstart").output
    (tmp_path / "mine.toml").write_text(shown)
    assert read_config(tmp_path / "mine.toml")[1] == read_config("quickstart")[1]


def test_unknown_config_is_refused():
    wrong = run("show", "quickstrat").exception
    assert isinstance(wrong, UsageError)
    assert "Did you mean 'quickstart'?" in str(wrong)
    assert isinstance(run("--json", "show", "quickstart").exception, UsageError)
