"""From the text that a user gives as ``--data`` to a source, its full name and the folder of its original files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core import plugins
from ...core.errors import UsageError
from ...core.job import Job
from ...core.untrusted.path_names import is_text, spelled
from ..base import DatasetSource, HasFolder, HasVocabulary, TakesArguments
from .source_calls import of_source

__all__ = ["Resolved", "full_name", "resolve", "whole_path", "written_out"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A dataset that was asked for. `name` is the same for all ways of writing the same arguments.

    `data_dir` is the folder of the original files, `folder_in_name` whether it comes from the name.
    """

    name: str
    source: DatasetSource
    data_dir: Path | None
    folder_in_name: bool = False


def resolve(name: str, data_dir: Path | None = None) -> Resolved:
    """Find the source of a dataset, given as NAME or NAME:ARGUMENTS.

    Raises UsageError for an unknown name, arguments that are not allowed, a folder given twice, and what is not UTF-8.
    """
    found = _resolved(name, data_dir)
    for key, text in (("data", found.name), ("data_dir", str(found.data_dir))):
        if not is_text(text):
            raise UsageError(f"{key}: got '{spelled(text)}', which is not UTF-8; rename the folder, or give a link to it.")
    return found


def _resolved(name: str, data_dir: Path | None) -> Resolved:
    base, colon, text = name.partition(":")
    source: DatasetSource = plugins.load(plugins.find("dataset", base), "dataset")
    if not colon:
        return Resolved(base, source, data_dir)
    if not isinstance(source, TakesArguments):
        raise UsageError(f"data: got {name!r}, but {base!r} takes no arguments. Leave {colon + text!r} out.")
    given = of_source(base, source.with_arguments, text)
    full_name = _full_name(base, given)
    if not (isinstance(given, HasFolder) and given.folder):
        return Resolved(full_name, given, data_dir)
    if data_dir is not None:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {name!r} names a folder too; give one of the two.")
    return Resolved(full_name, given, given.folder, folder_in_name=True)


def _full_name(base: str, source: DatasetSource) -> str:
    """Return the name by which `resolve` finds a source with its arguments, whose plugin is called `base`."""
    rest = source.name.partition(":")[2]
    return f"{base}:{rest}" if rest else base


def whole_path(data_dir: Path) -> Path:
    """Return what a folder is called from any working directory."""
    return data_dir.expanduser().absolute()


def written_out(job: Job) -> Job:
    """Return the job with its dataset's full name and the whole path of its folder, which mean the same from any working directory.

    So is the size of a vocabulary that was asked for; from then on it is a part of the name. Raises UsageError as `resolve` does, for a
    vocabulary of what is no text, and for two of different sizes.
    """
    data_dir = None if job.data_dir is None else whole_path(job.data_dir)
    name = full_name(job.data, data_dir, job.vocabulary)
    return job.model_copy(update={"data": name, "data_dir": data_dir, "vocabulary": None})


def full_name(data: str, data_dir: Path | None, vocabulary: int | None) -> str:
    """Return a dataset's full name, with a vocabulary of so many pieces where one is asked for. Raises UsageError as `written_out` does."""
    name = resolve(data, data_dir).name
    if vocabulary is None:
        return name
    _refuse_another_size(data, vocabulary)
    return _with_vocabulary(name, vocabulary)


def _refuse_another_size(data: str, size: int) -> None:
    """Raise UsageError where a dataset's arguments, as they were typed, ask for a vocabulary of another size."""
    rest = data.partition(":")[2]
    arguments = rest.rpartition("?")[2] if "?" in rest else "" if ":" in rest else rest
    for argument in re.split("[&,]", arguments):
        key, _, value = (part.strip() for part in argument.partition("="))
        if key == "vocabulary" and value.isdecimal() and int(value) != size:
            raise UsageError(f"vocabulary: got {size}, but {data!r} asks for {value} pieces; give one of the two.")


_DUTIES = "Mend it: with_vocabulary has to return a source whose name says the size, and with_arguments to take that."


def _with_vocabulary(name: str, size: int) -> str:
    """Return the name of the same text with another vocabulary. Raises UsageError where there is none that would be found again."""
    source = resolve(name).source
    if not isinstance(source, HasVocabulary):
        raise UsageError(f"vocabulary: got {size}, but {name!r} is no text, or its vocabulary has one size. Choose text: trainer data list")
    base = name.partition(":")[0]
    if not isinstance(source, TakesArguments):
        raise UsageError(f"vocabulary: got {size}, but the source of {base!r} has no with_arguments to find it again by. {_DUTIES}")
    with _refused_as_vocabulary(size):
        named = _full_name(base, of_source(base, source.with_vocabulary, size))
    if named in _names_of_other_sizes(base, source, size):
        raise UsageError(f"vocabulary: got {size}, but {named!r} is the name that its source has with another size as well. {_DUTIES}")
    with _refused_as_vocabulary(size):
        found = resolve(named).name
    if found != named:
        raise UsageError(f"vocabulary: got {size}, but the name {named!r} that {base!r} has with it leads to {found!r}. {_DUTIES}")
    return named


@contextlib.contextmanager
def _refused_as_vocabulary(size: int) -> Iterator[None]:
    """Name the option in what a source says of a size, which knows its own argument alone."""
    try:
        yield
    except UsageError as error:
        allowed = str(error).partition("; allowed: ")[2]
        said = f"; allowed: {allowed}" if allowed else f", and its source refuses that: {str(error).removeprefix('data: ')}"
        raise UsageError(f"vocabulary: got {size}{said}") from error


def _names_of_other_sizes(base: str, source: HasVocabulary, size: int) -> Iterator[str]:
    """Yield what a source is called with some other sizes, as far as it can have them: of the default one its name may say nothing."""
    for other in (size - 1, size + 1):
        with contextlib.suppress(UsageError):
            yield _full_name(base, of_source(base, source.with_vocabulary, other))
