"""Are the original files that the user has the published ones? Compare checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...core.errors import UsageError

__all__ = ["expect_md5"]


def expect_md5(path: Path, expected: str) -> None:
    """Compare a file with its published checksum. Raises UsageError naming the file and both checksums where they differ."""
    with open(path, "rb") as handle:
        found = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise UsageError(
            f"data_dir: {str(path)!r} is not the published file: its md5 is {found}, not {expected}. "
            "It is damaged, not wholly downloaded, or another file of this name; get it again."
        )
