"""Download a dataset into a folder: ``python -m crosstrain.data.sources.torchvision_download FOLDER NAME [PART…]``.

The files end up where torchvision's class puts them (mnist: ``FOLDER/MNIST/raw``).
Runs as a process of its own, because torchvision brings torch with it. It is started with a pipe as standard input and removes the
folder and ends when that closes: then whoever asked for the download is gone. On failure the last line of output is the cause.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from pathlib import Path

__all__ = ["main"]

_SILENCE_SECONDS = 30.0  # torchvision sets no time-out of its own: a server that says nothing for so long is given up


def main(folder: Path, name: str, *parts: str) -> int:
    """Download and return the exit code. `parts` are the splits of svhn."""
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
    while os.read(0, 1):  # not through sys.stdin: a thread inside a buffered read would break the interpreter's shutdown
        pass
    shutil.rmtree(folder, ignore_errors=True)  # nobody is left to be told
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
