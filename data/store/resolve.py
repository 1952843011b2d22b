"""From the text that a user gives as ``--data`` to a source, its full name and the folder of its original files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...core import plugins
from ...core.errors import UsageError
from ...core.job import Job
from ..base import DatasetSource, HasFolder, HasVocabulary, TakesArguments

__all__ = ["Resolved", "resolve", "whole_path", "written_out"]


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

    Raises UsageError for an unknown name, arguments that are not allowed, and a folder given twice.
    """
    base, colon, text = name.partition(":")
    source: DatasetSource = plugins.load(plugins.find("dataset", base), "dataset")
    if not colon:
        return Resolved(base, source, data_dir)
    if not isinstance(source, TakesArguments):
        raise UsageError(f"data: got {name!r}, but {base!r} takes no arguments. Leave {colon + text!r} out.")
    given = source.with_arguments(text)
    rest = given.name.partition(":")[2]
    full_name = f"{base}:{rest}" if rest else base
    if not (isinstance(given, HasFolder) and given.folder):
        return Resolved(full_name, given, data_dir)
    if data_dir is not None:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {name!r} names a folder too; give one of the two.")
    return Resolved(full_name, given, given.folder, folder_in_name=True)


def whole_path(data_dir: Path) -> Path:
    """Return what a folder is called from any working directory."""
    return data_dir.expanduser().absolute()


def written_out(job: Job) -> Job:
    """Return the job with its dataset's full name and the whole path of its folder, which mean the same from any working directory.

    So is the size of a vocabulary that was asked for; from then on it is a part of the name. Raises UsageError as `resolve` does, for a
    vocabulary of what is no text, and for two of different sizes.
    """
    data_dir = None if job.data_dir is None else whole_path(job.data_dir)
    name = resolve(job.data, data_dir).name
    if job.vocabulary is not None:
        _refuse_another_size(job.data, job.vocabulary)
        name = _with_vocabulary(name, job.vocabulary)
    return job.model_copy(update={"data": name, "data_dir": data_dir, "vocabulary": None})


def _refuse_another_size(data: str, size: int) -> None:
    """Raise UsageError where a dataset's arguments, as they were typed, ask for a vocabulary of another size."""
    rest = data.partition(":")[2]
    arguments = rest.rpartition("?")[2] if "?" in rest else "" if ":" in rest else rest
    for argument in re.split("[&,]", arguments):
        key, _, value = (part.strip() for part in argument.partition("="))
        if key == "vocabulary" and value.isdecimal() and int(value) != size:
            raise UsageError(f"vocabulary: got {size}, but {data!r} asks for {value} pieces; give one of the two.")


def _with_vocabulary(name: str, size: int) -> str:
    source = resolve(name).source
    if not isinstance(source, HasVocabulary):
        raise UsageError(f"vocabulary: got {size}, but {name!r} is no text, or its vocabulary has one size. Choose text: trainer data list")
    return source.with_vocabulary(size).name
