"""Help in which a command's options stand under the topics that they are declared with, the most used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..core.topics import Topic

__all__ = ["GroupedCommand", "topic_option"]

Function = TypeVar("Function", bound=Callable[..., Any])

_WIDEST = 30
"""An option with a longer name has its text on the lines below; click's own limit."""


class TopicOption(click.Option):
    """An option that says what it is about."""

    def __init__(self, *declarations: Any, topic: Topic, **attributes: Any) -> None:
        """`topic` is its own; all else is click's."""
        super().__init__(*declarations, **attributes)
        self.topic = topic


def topic_option(topic: Topic, *declarations: str, **attributes: Any) -> Callable[[Function], Function]:
    """Return what adds an option with a topic to a command; what follows the topic is as for `click.option`."""
    return click.option(*declarations, cls=TopicOption, topic=topic, **attributes)


class GroupedCommand(click.Command):
    """A command whose help has a section for each topic, in the order of `Topic`, in which options stand as they were added.

    Every option needs a topic; one without, such as `click.option` makes, is a TypeError when the command is made.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        """As click's."""
        super().__init__(*arguments, **attributes)
        for parameter in self.params:
            if isinstance(parameter, click.Option) and not isinstance(parameter, TopicOption):
                raise TypeError(f"{parameter.opts[0]} of {self.name!r} has no topic; declare it with topic_option")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, with the texts of all of them below each other."""
        sections: dict[Topic, list[tuple[str, str]]] = {topic: [] for topic in Topic}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:  # --help, which click adds by itself, has no topic
                sections[parameter.topic if isinstance(parameter, TopicOption) else Topic.OUTPUT].append(record)
        widest = min(max(len(names) for records in sections.values() for names, _ in records), _WIDEST)
        for topic, records in sections.items():
            if records:
                with formatter.section(topic.value):
                    formatter.write_dl([(names.ljust(widest), text) for names, text in records], col_max=_WIDEST)
