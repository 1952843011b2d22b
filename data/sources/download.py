"""Downloading original files of datasets, in a process of its own so that no framework enters this one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from ...core.errors import MissingPackageError, UsageError
from ...core.plugins import DOWNLOADER
from ...core.process import python
from ...core.untrusted.console import note

__all__ = ["download", "expect_md5"]


def download(name: str, folder: Path, seconds: float, files_hint: str, parts: tuple[str, ...] = ()) -> None:
    """Let `core.plugins.DOWNLOADER` download the dataset `name` (of which `parts`) into `folder`, within `seconds`.

    Raises MissingPackageError or UsageError; `files_hint` completes "either …" with the way to do without.
    """
    if not DOWNLOADER.installed:
        raise MissingPackageError(
            f"data: {name!r} is not prepared, and downloading it needs {DOWNLOADER.name}, which is not installed. Either {files_hint}, "
            f"or install it with: {DOWNLOADER.install}"
        )
    note(f"data: downloading {name}, once, for at most {seconds / 60:.0f} minutes")
    command = python(DOWNLOADER.target, str(folder), name, *parts)
    environment = {**os.environ, "TMPDIR": str(folder)}  # frameworks leave folders of their own in the temporary folder
    with tempfile.TemporaryFile() as output:
        # The child ends when its standard input does, so that it cannot outlive this process, not even after a kill -9.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment) as child:
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired as error:
                child.kill()
                raise UsageError(f"data: {name!r} was not downloaded within {seconds:g} s. Try again later, or {files_hint}.") from error
            except BaseException:
                child.kill()
                raise
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if code:
        cause = lines[-1] if lines else f"the download ended with exit code {code}"
        raise UsageError(f"data: {name!r} could not be downloaded: {cause}. Try again with a network, or {files_hint}.")


def expect_md5(path: Path, expected: str) -> None:
    """Compare a file with its published checksum. Raises UsageError naming the file and both checksums where they differ."""
    with open(path, "rb") as handle:
        found = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise UsageError(
            f"data_dir: {str(path)!r} is not the published file: its md5 is {found}, not {expected}. "
            "It is damaged, not wholly downloaded, or another file of this name; get it again."
        )
