"""Which code a run was made by: releases of all packages, and the commits of the folder it was typed in and of crosstrain's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["installed_packages", "provenance", "work_tree"]

GIT_SECONDS = 3.0
"""How long a question to git may take; a very large tree on a slow disk takes longer, and then it is not known whether it was changed."""

MOST_PACKAGES = 5_000
LONGEST_CHARACTERS = 200

_INSTALLED = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(dist-info|egg-info)")

_RUNS_PROGRAMS = r"^(core\.(fsmonitor|worktree)|filter\..*|include\..*|includeif\..*|extensions\.worktreeconfig)$"
"""Settings by which a tree's own configuration would have git start a program, or look elsewhere: a tree may come from anybody."""


def provenance(typed_in: Path) -> dict[str, Any]:
    """Return ``packages``, the releases of what is installed here, and for ``typed_in`` and ``crosstrain`` what `work_tree` tells."""
    return {
        "packages": installed_packages(sys.path),
        "typed_in": work_tree(typed_in),
        "crosstrain": work_tree(Path(__file__).resolve().parent),
    }


def installed_packages(folders: Iterable[str]) -> dict[str, str]:
    """Return the release of each distribution in some folders, by its name, as the names of their metadata tell; the first one counts."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:  # an archive, or a folder that there is not
            continue
        for entry in entries:
            match = _INSTALLED.fullmatch(entry)
            if match is not None and len(entry) <= LONGEST_CHARACTERS and len(found) < MOST_PACKAGES:
                found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return dict(sorted(found.items()))


def work_tree(folder: Path) -> dict[str, Any] | None:
    """Return the ``commit`` of the git work tree that a folder is in, and whether tracked files were ``changed``; never what was changed.

    None where it is in none, or there is no git. `changed` is None where that is not known: git did not answer in time, or the tree's own
    configuration would have it start a program.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or re.fullmatch("[0-9a-f]{40,64}", commit) is None:
        return None
    own = _git(folder, "config", "--local", "--no-includes", "--name-only", "--get-regexp", _RUNS_PROGRAMS, ends=(0, 1))
    status = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") if own == "" else None
    return {"commit": commit, "changed": None if status is None else status != ""}


def _git(folder: Path, *arguments: str, ends: tuple[int, ...] = (0,)) -> str | None:
    """Return what git says in a folder; None where it fails, takes too long, or is not there."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**variables, "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode in ends else None
