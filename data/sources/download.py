"""Downloads of datasets' original files, in a separate process.

So no framework enters this one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from ...core.console import note
from ...core.errors import MissingPackageError, UsageError
from ...core.plugins import DOWNLOADER
from ...core.process import python


def files_of(name: str, data_dir: Path | None, work: Path, seconds: float, files_hint: str, parts: tuple[str, ...] = ()) -> Path:
    """Return `data_dir`, or without one `work`, into which `parts` of a dataset are downloaded.

    Raises MissingPackageError or UsageError, with `files_hint` as the alternative.
    """
    if data_dir is not None:
        return data_dir
    if not DOWNLOADER.installed:
        raise MissingPackageError(
            f"data: {name!r} is not prepared, and downloading it needs {DOWNLOADER.name}, which is not installed. Either {files_hint}, "
            f"or install it with: {DOWNLOADER.install}"
        )
    note(f"data: downloading {name}, once, for at most {seconds / 60:.0f} minutes")
    command = python(DOWNLOADER.target, str(work), name, *parts)
    environment = {**os.environ, "TMPDIR": str(work)}  # frameworks leave folders in the temporary folder
    with tempfile.TemporaryFile() as output:
        # The child ends when its standard input closes, so that it cannot outlive this process, even after a kill -9.
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
    return work


def expect_md5(path: Path, expected: str) -> None:
    """Raise UsageError if a file differs from its published checksum."""
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest != expected:
        raise UsageError(
            f"data_dir: {str(path)!r} is not the published file: its md5 is {digest}, not {expected}. "
            "It is damaged, not wholly downloaded, or another file of this name; get it again."
        )


# The child process: ``python -m crosstrain.data.sources.download FOLDER NAME [PART…]``. The last line of output is the cause of failure.

_SILENCE_SECONDS = 30.0  # torchvision sets no timeout


def main(folder: Path, name: str, *parts: str) -> int:
    """Download into `folder`; return the exit code. `parts` are the splits of svhn."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    socket.setdefaulttimeout(_SILENCE_SECONDS)
    try:
        from torchvision import datasets

        if name == "svhn":
            for part in parts:
                datasets.SVHN(str(folder), split=part, download=True)
        else:
            {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name](str(folder), train=True, download=True)
    except (ImportError, RuntimeError, OSError) as error:
        sys.stdout.flush()
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return 1
    return 0


def _end_with_parent(folder: Path) -> None:
    while os.read(0, 1):  # not sys.stdin: a thread in a buffered read would break the interpreter's shutdown
        pass
    shutil.rmtree(folder, ignore_errors=True)  # no process is left to report errors to
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
