"""Help of commands with many options: sections by topic, most used options first."""

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from crosstrain.cli.commands.manifest import manifest
from crosstrain.cli.commands.run import run
from crosstrain.cli.commands.submit import submit
from crosstrain.cli.commands.sweep import sweep
from crosstrain.cli.group import GroupedCommand, topic_option
from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import DECLARED, flag_name
from crosstrain.core.topics import Topic

COMMANDS = {"run": run, "sweep": sweep, "submit slurm": submit.commands["slurm"], "manifest kubernetes": manifest.commands["kubernetes"]}

COMMON_COMMANDS = ["--config", "--backend", "--mode", "--model", "--data", "--nodes", "--batch-size", "--epochs", "--lr", "--name"]


def sections(command, width=80):
    """Return the flags under each heading of a command's help, in order."""
    done = CliRunner().invoke(command, ["--help"], terminal_width=width)
    assert done.exit_code == 0
    flags_by_heading, heading = {}, None
    for line in done.output.splitlines():
        if re.fullmatch(r"\S.*:", line):
            heading = flags_by_heading.setdefault(line[:-1], [])
        elif heading is not None and (match := re.match(r"  (?:-h, )?(--[a-z0-9-]+)", line)):
            heading.append(match[1])
    return {name: flags for name, flags in flags_by_heading.items() if flags}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_listed_once_in_topic_order(name):
    listed_sections = sections(COMMANDS[name])
    headings = [topic.value for topic in Topic]
    assert list(listed_sections) == [heading for heading in headings if heading in listed_sections]
    flags = [flag for listed in listed_sections.values() for flag in listed]
    options = [parameter for parameter in COMMANDS[name].params if isinstance(parameter, click.Option)]
    assert sorted(flags) == sorted(["--help", *(option.opts[0] for option in options)])


def test_most_used_options_of_run_come_first():
    assert sections(run)["Most used"] == COMMON_COMMANDS


def test_run_and_sweep_list_settings_under_declared_topic():
    of_run, of_sweep = sections(run), sections(sweep)
    for field in Job.model_fields:
        assert flag_name(field) in of_run[DECLARED[field].topic.value], field
        assert flag_name(field) in of_sweep[DECLARED[field].topic.value], field


def test_option_without_topic_is_refused_at_definition():
    with pytest.raises(TypeError, match="--late of 'some' has no topic"):

        @click.command("some", cls=GroupedCommand)
        @topic_option(Topic.OUTPUT, "--early")
        @click.option("--late")
        def some(early, late):
            pass


def test_setting_without_topic_is_refused():
    from crosstrain.core.job import setting

    with pytest.raises(TypeError):
        setting("sgd", description="Update rule.")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_is_wrapped_and_aligned(width):
    text = CliRunner().invoke(run, ["--help"], terminal_width=width, max_content_width=width).output
    flags = re.compile(r" *(-h, )?--\S+( \S+)?")
    assert all(len(line) <= width or flags.fullmatch(line) for line in text.splitlines())
    starts = {len(match[0]) for line in text.splitlines() if (match := re.match(r"  --[a-z0-9-]+(?: \S+)?  +(?=\S)", line))}
    assert len(starts) == 1
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_help_imports_no_framework():
    code = (
        "import sys; from crosstrain.cli.main import main; assert main(['run', '--help']) == 0; "
        "print({'tensorflow', 'torch', 'scipy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
