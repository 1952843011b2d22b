"""Does a store still hold what its manifest says? Cheap checks at every open, digests when something may have changed.

A stamp file remembers for which files (size, inode, times) the digests were found right, so that they are not computed again at
every open. It vouches for nothing that was changed through the file system since; rot under an unchanged inode is found by
``trainer data verify``, which always computes the digests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.drafts import replacing
from ...core.untrusted.bounded_json import UnreadableError, open_regular, read_json
from .manifest import MANIFEST, STAMP, StoreManifest, file_sha256

__all__ = ["STAMP", "FileCheck", "check_digests", "check_sizes", "digests_verified", "remember"]

_SETTLED_SECONDS = 0.1
"""A file as young as this is not stamped: a later change within one tick of the file system's clock (4 ms on Linux) would not show."""

Identity = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What was found about one file; `problem` is None where it is as the manifest says. `bytes` is None where it is missing."""

    name: str
    bytes: int | None
    problem: str | None


def check_sizes(folder: Path, manifest: StoreManifest) -> list[FileCheck]:
    """Compare existence and size of every file with the manifest."""
    checks: list[FileCheck] = []
    for name, entry in manifest.every_file.items():
        try:
            with open_regular(folder / name) as file:
                found = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            checks.append(FileCheck(name, None, "is missing"))
            continue
        except UnreadableError as error:
            checks.append(FileCheck(name, None, str(error)))
            continue
        checks.append(FileCheck(name, found, None if found == entry.bytes else f"has {found} bytes instead of {entry.bytes}"))
    return checks


def check_digests(folder: Path, manifest: StoreManifest) -> list[FileCheck]:
    """Compare the content of every file with the manifest (files of the wrong size are reported as such)."""
    return [
        check
        if check.problem or file_sha256(folder / check.name) == manifest.every_file[check.name].sha256
        else FileCheck(check.name, check.bytes, "differs from its sha256")
        for check in check_sizes(folder, manifest)
    ]


def identity(folder: Path, manifest: StoreManifest) -> Identity:
    """Return what changes when a file is replaced or written: size, inode, time of change of content and of status."""
    found: Identity = {}
    for name in (*manifest.every_file, MANIFEST):
        status = (folder / name).stat()
        found[name] = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return found


def digests_verified(folder: Path, now: Identity) -> bool:
    """Return whether the stamp says that the digests of exactly these files were found right."""
    try:
        stamp = read_json(folder / STAMP)
    except (FileNotFoundError, UnreadableError):  # no stamp or a torn one: compute the digests
        return False
    return bool(stamp == now)


def remember(folder: Path, verified: Mapping[str, list[int]]) -> None:
    """Write the stamp for files whose digests were just found right, `verified` being their identity before that.

    In a store that this user cannot write (a shared cache) no stamp is kept, and every open computes the digests.
    """
    youngest = max(times[-1] for times in verified.values())
    if time.time_ns() - youngest < _SETTLED_SECONDS * 1e9 or not os.access(folder, os.W_OK) or (folder / STAMP).is_dir():
        return
    with replacing(folder / STAMP) as draft:
        draft.write_text(json.dumps(verified), encoding="utf-8")
