"""A folder for the temporary files of a node's tasks; its name says which agent it belongs to.

An agent removes its folder when it ends. One that was killed cannot, so the next agent removes what it left.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ...core.process import pid_namespace, start_of

__all__ = ["make_scratch", "remove_scratch", "sweep"]

_NAME = re.compile(r"crosstrain-(\d+)-(\d+)-(\d+)-\w+")


def make_scratch() -> Path:
    """Make this process's folder, readable by its owner alone, after removing those of processes that are gone."""
    sweep()
    return Path(tempfile.mkdtemp(prefix=f"crosstrain-{pid_namespace()}-{os.getpid()}-{start_of(os.getpid())}-"))


def remove_scratch(folder: Path) -> None:
    """Remove a folder of temporary files; one that is gone already is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> list[Path]:
    """Remove this user's folders whose process has ended; return what was removed. Other process namespaces are left alone."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob("crosstrain-*-*-*-*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or int(name[1]) != pid_namespace() or start_of(int(name[2])) == int(name[3]):
            continue
        if _is_own_folder(folder):
            remove_scratch(folder)
            removed.append(folder)
    return removed


def _is_own_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another agent was faster
        return False
