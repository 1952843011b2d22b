"""Integer options of all commands accept only decimal digits."""

import click
import pytest

from crosstrain.cli.group import trainer
from crosstrain.cli.options import IntegerRange


def commands(group, *before):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield (*before, name), command


FOUND = [
    pytest.param(option.type, id=f"{' '.join(path)} {option.opts[-1]}")
    for path, command in commands(trainer)
    for option in command.params
    if isinstance(option.type, click.types.IntParamType)
]


@pytest.mark.parametrize("kind", FOUND)
def test_option_accepts_only_decimal_digits(kind):
    assert isinstance(kind, IntegerRange)
    for text in ("1_0", "١", " 1", "1.0", "0x1", "", "9" * 5000):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)
    within = 1 if kind.min is None else kind.min
    assert kind.convert(f"+{within}", None, None) == within


@pytest.mark.parametrize(("path", "command"), list(commands(trainer)))
def test_help_shows_no_range_without_bounds(path, command):
    assert "None]" not in command.get_help(click.Context(command, info_name=" ".join(path)))
