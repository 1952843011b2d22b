"""A cache of the commands' parameters for shell completion, as imports are too slow."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from ..core.console import json_text
from ..core.drafts import replacing

Described = dict[str, Any]  # a cached command: ``options`` and ``arguments`` with values, and ``commands`` by name
PLUGIN_KINDS: Mapping[str, Literal["backend", "model", "dataset", "launcher"]] = {  # by option or group that takes plug-in names
    "backend": "backend",
    "model": "model",
    "data": "dataset",
    "launcher": "launcher",
}
MAX_NAMES = 1000  # of suggested runs and files
_PLAIN = re.compile(r"[\w.,=+@%-]+", re.ASCII)  # names that need no quoting in a shell


def completing_command(name: str, load: Callable[[str], click.Command]) -> click.Command:
    """Return a command without function for completion; `load` imports it if not cached."""
    place, state = _cache_file(), _installation()
    cached = _read_cache(place, state)
    if name not in cached:
        cached[name] = _describe(load(name), name)
        with suppress(OSError):  # only slower without a cache
            _write_cache(place, {"state": state, "commands": cached})
    return _command(name, cached[name])


def _write_cache(place: Path, document: Mapping[str, Any]) -> None:
    if not place.is_absolute():
        raise FileNotFoundError(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as draft:
        draft.write_text(json_text(document), encoding="utf-8")


def _read_cache(place: Path, state: list[Any]) -> dict[str, Described]:
    try:
        document = json.loads(place.read_bytes())
        return dict(document["commands"]) if document["state"] == state else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _cache_file() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path(os.path.expanduser("~"), ".cache")
    return base / "crosstrain" / f"completion-{sha256(os.fsencode(sys.prefix)).hexdigest()[:16]}.json"


def _installation() -> list[Any]:
    package = Path(__file__).parents[2]
    files = [*(package / "cli").rglob("*.py"), *(package / "core").rglob("*.py"), *(package / "configs").glob("*.toml")]
    installed = [Path(entry) for entry in sys.path if os.path.isdir(entry) and entry != os.path.join(sys.prefix, "bin")]
    return [[str(path), os.stat(path).st_mtime_ns] for path in (*sorted(files), *installed)]


def _describe(command: click.Command, name: str) -> Described:
    described: Described = {
        "options": [_option(option, name) for option in command.params if isinstance(option, click.Option)],
        "arguments": [{"nargs": part.nargs, **_values(part, name)} for part in command.params if isinstance(part, click.Argument)],
        "commands": {key: _describe(sub, name) for key, sub in command.commands.items()} if isinstance(command, click.Group) else None,
    }
    listed = getattr(command, "default_command", None)  # a group with the options of one of its commands
    if listed is not None:
        described["options"] += described["commands"][listed]["options"]
    return described


def _option(option: click.Option, command: str) -> dict[str, Any]:
    names = ["/".join((*option.opts, *option.secondary_opts))] if option.secondary_opts else list(option.opts)
    facts = {"names": names, "flag": option.is_flag, "multiple": option.multiple, "nargs": option.nargs, "help": option.help}
    return {**facts, **_values(option, command)}


def _values(parameter: click.Parameter, command: str) -> dict[str, Any]:
    parts = (parameter.metavar or "").strip("[]").split("|")
    values = [part for part in parts if re.fullmatch(r"[a-z][\w+-]*", part)]
    is_argument = isinstance(parameter, click.Argument)
    kind = PLUGIN_KINDS.get(command if is_argument else parameter.name or "")
    if kind is not None:
        from ..core.plugins import available

        values += [*available(kind), *(["auto"] if "[default: auto]" in (getattr(parameter, "help", None) or "") else [])]
    if parameter.name == "config" or (command == "configs" and is_argument):
        from ..core.settings.sources import shipped

        values += shipped()
    if command == "export" and parameter.name == "format_name":
        values += _export_formats()
    if parameter.name == "checkpoint":
        return {"values": values, "completes": "checkpoint"}
    if any(part.startswith("RUN") for part in parts):
        return {"values": values, "completes": "run"}
    takes_files = isinstance(parameter.type, click.Path) or not {"PATH", "FILE", "FOLDER", "CONFIG"}.isdisjoint(parts)
    return {"values": values, "completes": "file" if takes_files else None}


def _export_formats() -> Iterator[str]:
    from ..backends.export import PLAIN_FORMATS
    from ..backends.loading import declared_capabilities
    from ..core.errors import UsageError
    from ..core.plugins import available

    yield from PLAIN_FORMATS
    for plugin in available("backend").values():
        with suppress(UsageError):
            yield from declared_capabilities(plugin).export_formats


def _command(name: str, described: Described) -> click.Command:
    parameters: list[click.Parameter] = []
    for number, option in enumerate(described["options"]):
        offered = None if option["flag"] else partial(_offer, option["values"], option["completes"])
        names = [f"option_{number}", *option["names"]]
        nargs = {} if option["flag"] else {"nargs": option["nargs"], "multiple": option["multiple"]}
        parameters.append(click.Option(names, is_flag=option["flag"], help=option["help"], shell_complete=offered, **nargs))
    for number, argument in enumerate(described["arguments"]):
        offered = partial(_offer, argument["values"], argument["completes"])
        parameters.append(click.Argument([f"argument_{number}"], nargs=argument["nargs"], required=False, shell_complete=offered))
    if described["commands"] is None:
        return click.Command(name, params=parameters)
    return click.Group(name, params=parameters, commands=[_command(*item) for item in described["commands"].items()])


def _offer(
    values: list[str], completes: str | None, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    offered = [value for value in values if value.startswith(incomplete)]
    if completes == "run":
        offered += islice(_runs(context, incomplete), MAX_NAMES)
    if completes == "checkpoint":
        return [CompletionItem(name) for name in _checkpoints(context, incomplete)]
    if completes is not None and offered:
        offered += sorted(islice(_entries(incomplete, folders_only=completes == "run"), MAX_NAMES))
    if completes is not None and not offered:
        return [CompletionItem(incomplete, type="file")]  # the shell completes paths itself
    return [CompletionItem(value) for value in dict.fromkeys(offered)]


def _runs(context: click.Context, incomplete: str) -> Iterator[str]:
    out = _folder_with_runs(context)
    folder = os.path.dirname(incomplete)
    with suppress(OSError, ValueError):
        for name in os.listdir(os.path.join(out, folder)):
            run = os.path.join(folder, name)
            marks = (os.path.join(out, run, mark) for mark in ("job.json", "status.json", "sweep.json"))
            if run.startswith(incomplete) and _PLAIN.fullmatch(name) and any(map(os.path.isfile, marks)):
                yield run


def _folder_with_runs(context: click.Context) -> str:
    typed = [context.params.get(parameter.name or "") for parameter in context.command.params if "--out" in parameter.opts]
    return str(typed[0]) if typed and typed[0] else os.environ.get("TRAINER_OUT") or "runs"


def _checkpoints(context: click.Context, incomplete: str) -> list[str]:
    typed = context.params.get("argument_0")
    for folder in (os.path.join(_folder_with_runs(context), str(typed)), str(typed)) if typed else ():
        with suppress(OSError, ValueError):
            names = sorted(os.listdir(os.path.join(folder, "checkpoints")), reverse=True)
            return [name for name in names if name.startswith(incomplete) and re.fullmatch(r"step-\d+", name)]
    return []


def _entries(incomplete: str, *, folders_only: bool) -> Iterator[str]:
    folder, begun = os.path.split(incomplete)
    with suppress(OSError, ValueError):
        for name in os.listdir(folder or "."):
            path = os.path.join(folder, name)
            if folders_only and not os.path.isdir(path):
                continue
            if name.startswith(begun) and (begun or not name.startswith(".")) and _PLAIN.fullmatch(name):
                yield path
