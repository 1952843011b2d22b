"""The command ``trainer``, which imports a subcommand only when it is used."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..core.console import shown_streams
from ..core.errors import OutputError, TrainerError, UsageError
from ..core.suggestions import did_you_mean
from ..core.topics import Topic
from .interrupts import quiet_interrupts

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_OF_A_PATH = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EROFS, errno.ELOOP, errno.ENOTDIR}  # caused by the path
_NO_MEMORY = "there is not enough memory (ulimit -v also limits mapped files)."
SOURCES = "crosstrain.sources"  # key of the sources of settings in a command's context (`options.name_settings`)


COMMANDS: Mapping[str, str] = {  # summaries; a command is in the module of `commands` with its name
    "run": "Train one job and write a comparable run directory.",
    "sweep": "Run a parameter sweep and compare the results.",
    "submit": "Submit a run to a batch system (Slurm).",
    "manifest": "Generate Kubernetes manifests.",
    "watch": "Show live progress of a run, or its final status.",
    "runs": "List, show, delete and export runs.",
    "compare": "Compare finished runs and flag figures that are not comparable.",
    "diverge": "Find where two trainings part, and why.",
    "report": "Write one HTML page with plots and tables of runs.",
    "plot": "Write the report's plots as PNG, SVG or PDF.",
    "explain": "Explain a run's bottleneck.",
    "predict": "Predict scaling to other numbers of nodes and other links.",
    "export": "Export a trained model, or list a run's files.",
    "evaluate": "Evaluate a trained model on a dataset, on any backend.",
    "translate": "Translate lines of text with a trained model, on any backend.",
    "data": "List, prepare and verify datasets.",
    "backends": "List frameworks with versions and devices.",
    "models": "Show the models and the backends they run on, or check one.",
    "configs": "List or show the shipped experiments.",
    "doctor": "Check this machine and suggest fixes for problems.",
}


def load_command(name: str) -> click.Command:
    """Import a subcommand."""
    with quiet_interrupts():
        command: click.Command = getattr(importlib.import_module(f".commands.{name}", __package__), name)
    return command


def refuse_unknown_command(ctx: click.Context, args: Sequence[str], commands: Iterable[str]) -> None:
    """Raise click's UsageError, with a suggestion, if the first argument is no command."""
    if args and args[0] not in (known := list(commands)):
        hint = did_you_mean(args[0], known)
        raise click.UsageError(f"got {args[0]!r}; there is no such command; allowed: {', '.join(known)}.{hint}", ctx)


class LazyGroup(click.Group):
    """A group with names and summaries of its subcommands, none imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; for completion return one with the same parameters."""
        if cmd_name not in COMMANDS:
            return None
        if ctx.resilient_parsing:
            from .completion import completing_command

            return completing_command(cmd_name, load_command)
        return load_command(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, without importing them, or options."""
        from click.shell_completion import CompletionItem

        offered = [CompletionItem(name, help=summary) for name, summary in COMMANDS.items() if name.startswith(incomplete)]
        return offered + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; errors name settings as given."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # in the context, which knows whether the output is a copy
            return result
        except click.UsageError as error:
            name = ctx.invoked_subcommand
            if error.ctx is None and name is not None and name in COMMANDS:  # click's parser does not know the subcommand
                error.ctx = click.Context(load_command(name), ctx, name)
            raise
        except TrainerError as error:
            if SOURCES in ctx.meta:
                from ..core.settings.sources import named

                error.args = (named(str(error), ctx.meta[SOURCES]), *error.args[1:])
            raise

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a name if the command is unknown."""
        if not args or not args[0].startswith("-"):
            refuse_unknown_command(ctx, args, COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="crosstrain", message="trainer %(version)s")
def trainer() -> None:
    """Train one job on TensorFlow or PyTorch, with results that can be compared.

    Training is synchronous or asynchronous, on one or many nodes.

    Data goes to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the run failed, 2 the request was wrong,
    130 interrupted, 75 interrupted with a checkpoint to resume from. Where output cannot be printed, commands that write files end as
    their work does, and all others with 1.

    Shell completion: eval "$(_TRAINER_COMPLETE=bash_source trainer)" (or zsh_source; fish: _TRAINER_COMPLETE=fish_source trainer | source).
    """


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; only our own bugs give a traceback."""
    with shown_streams():
        return _invoke_shown(list(sys.argv[1:] if arguments is None else arguments))


def _invoke_shown(arguments: list[str]) -> int:
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except OutputError as error:  # from the last flush
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno == errno.ENOENT and not os.path.isabs(error.filename or "") and _misses_working_directory():
            return _fail("this needs the working directory.", UsageError.exit_code)
        if error.errno in _OF_A_PATH and error.filename is not None:  # `Path.is_file` and others raise these too
            return _fail(f"{os.fsdecode(error.filename)!r}: {error.strerror}.", UsageError.exit_code)
        if error.errno == errno.ENOMEM:
            return _fail(_NO_MEMORY, TrainerError.exit_code)
        if not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads it, also not what is flushed at exit
        return 1
    except MemoryError:
        return _fail(_NO_MEMORY, TrainerError.exit_code)
    except Exception as error:
        from ..core.plugins import plugin_problem

        if (problem := plugin_problem(error)) is None:
            raise
        return _fail(problem, TrainerError.exit_code)
    return code


def _invoke(arguments: list[str]) -> int:
    try:
        result: Any = trainer.main(args=arguments, prog_name="trainer", standalone_mode=False, obj=tuple(arguments), color=True)
    except TrainerError as error:
        return _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True, color=True)
        return error.exit_code
    except click.UsageError as error:
        return _fail(_usage_message(error), error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    return result if isinstance(result, int) else 0


def _usage_message(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "trainer"
    more = f" See `{command} --help`."
    if isinstance(error, click.NoSuchOption):
        hint = did_you_mean(error.option_name, _long_options(error.ctx))
        return f"{error.option_name}: `{command}` has no such option.{hint}{more}"
    message = error.format_message()
    return f"{message if message.endswith(('.', '?')) else f'{message}.'}{more}"


def _long_options(ctx: click.Context | None) -> list[str]:
    parameters = ctx.command.get_params(ctx) if ctx else []
    return [name for option in parameters for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]


def _misses_working_directory() -> bool:
    from ..core.process import child_working_directory

    return child_working_directory() != "."


def _fail(message: str, code: int) -> int:
    if code == UsageError.exit_code and _misses_working_directory():
        message = f"{message} The working directory has been removed: change to one that exists, or give absolute paths."
    click.echo(f"error: {message}", err=True, color=True)  # click would drop colour sequences instead of showing them
    return code


Function = TypeVar("Function", bound=Callable[..., Any])
_WIDEST = 30  # click's limit: the help of a longer option starts on the next line


class TopicOption(click.Option):
    """An option with a topic."""

    def __init__(self, *declarations: Any, topic: Topic, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.topic = topic


def topic_option(topic: Topic, *declarations: str, **attributes: Any) -> Callable[[Function], Function]:
    """Return a decorator that adds an option with a topic; the rest is as for `click.option`."""
    return click.option(*declarations, cls=TopicOption, topic=topic, **attributes)


class GroupedCommand(click.Command):
    """A command whose help has a section per topic; an option without one is a TypeError."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        for parameter in self.params:
            if isinstance(parameter, click.Option) and not isinstance(parameter, TopicOption):
                raise TypeError(f"{parameter.opts[0]} of {self.name!r} has no topic; declare it with topic_option")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections with all texts in one column."""
        sections: dict[Topic, list[tuple[str, str]]] = {topic: [] for topic in Topic}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:  # click's own --help has no topic
                sections[parameter.topic if isinstance(parameter, TopicOption) else Topic.OUTPUT].append(record)
        widest = min(max(len(names) for records in sections.values() for names, _ in records), _WIDEST)
        for topic, records in sections.items():
            if records:
                with formatter.section(topic.value):
                    formatter.write_dl([(names.ljust(widest), text) for names, text in records], col_max=_WIDEST)
