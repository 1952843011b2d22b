"""Options that a user alone gives: by flag, by variable, or in a file of his own; never in a file of settings, nor in the files of a run.

Such files are handed around, and these options say which machines, programs and addresses are used. Each is declared here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..topics import Topic
from .job_fields import environment_name, flag_name
from .webhook_url import check_url, shown_url

__all__ = ["ALTERNATIVES", "PERSONAL_OPTIONS", "PersonalOption", "shown_command"]

MOST_CHARACTERS = 65_536
"""Of a value: room for a list of thousands of hosts."""


def _any_text(text: str) -> None:
    if "\0" in text or len(text) > MOST_CHARACTERS:
        raise ValueError(f"is longer than {MOST_CHARACTERS:,} characters, or has a zero byte")


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class PersonalOption:
    """An option whose flag, variable and key in the user's own file are made from its `name`; its `topic` groups it in help texts.

    `check` raises ValueError with what is wrong with a value. `is_path`: the value names a file here. `shown` is what is shown of a value,
    `recorded` what the files of a run have of it in place of what was typed.
    """

    name: str
    metavar: str
    help: str
    topic: Topic
    is_path: bool = False
    check: Callable[[str], None] = _any_text
    shown: Callable[[str], str] = _as_it_is
    recorded: Callable[[str], str] = _as_it_is

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return flag_name(self.name)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return environment_name(self.name)


PERSONAL_OPTIONS: Mapping[str, PersonalOption] = {
    option.name: option
    for option in (
        PersonalOption(
            "hosts",
            "HOST,HOST",
            "The nodes' hosts, reached by ssh unless --launcher says otherwise, in this order; also node[01-03]. node0:2 for two processes "
            "there; set ports in your ssh configuration.",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "hostfile",
            "PATH",
            "The same from a file: one host per line, as in an MPI hostfile; a host listed n times runs n processes.",
            Topic.CLUSTER,
            is_path=True,
        ),
        PersonalOption(
            "python",
            "PATH",
            "With hosts, Slurm, Ray or a package's launcher: the interpreter there. [default: the path of this one]",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "ray_address",
            "auto|HOST:PORT|ray://HOST:PORT",
            "The Ray cluster that gives the nodes: auto (the one of which this machine is a node), its head, or its client server. "
            "[default with --launcher ray, and in a Ray job: auto]",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "notify",
            "URL",
            "Post a JSON document to this http(s) address when the run fails, restarts, finishes, or is interrupted.",
            Topic.OUTPUT,
            check=check_url,
            shown=shown_url,
            recorded=shown_url,
        ),
        PersonalOption(
            "on_failure",
            "COMMAND",
            "Run this by the shell when the run has failed, with the same document on its standard input.",
            Topic.OUTPUT,
            recorded=lambda text: "...",
        ),
    )
}

ALTERNATIVES = (("hosts", "hostfile", "ray_address"),)
"""Options of which one is given: on a higher layer, one replaces the other of a lower layer."""


def shown_command(command: list[str]) -> list[str]:
    """Return a command line as the files of a run have it: addresses and commands that may hold a password are left out of it."""
    kept: list[str] = []
    recorded: Callable[[str], str] | None = None
    by_flag = {option.flag: option.recorded for option in PERSONAL_OPTIONS.values()}
    for word in command:
        flag, equals, value = word.partition("=")
        if recorded is not None:
            kept.append(recorded(word))
            recorded = None
        elif equals and flag in by_flag:
            kept.append(f"{flag}={by_flag[flag](value)}")
        else:
            recorded = by_flag.get(word)
            kept.append(word)
    return kept
