"""Stored results of earlier calls, so a long table can be made in parts.

A stored result is one repeat of a whole scene, since ratios compare neighbours in time. It is reused only if machine, versions, code,
settings and definitions of all contestants are the same: they are in its file, whose name is their digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crosstrain.core.errors import UsageError

from .contestants import Contestant
from .figures import Measured

NOT_CONDITIONS = ("load_before",)
"""Facts about the machine that differ from call to call and hinder nothing."""

REPOSITORY = Path(__file__).parents[1]


def code_digest() -> str:
    """Return the digest of all Python files except the tests: sha256, in hexadecimal."""
    digest = hashlib.sha256()
    packages = [folder for folder in REPOSITORY.iterdir() if (folder / "__init__.py").exists() and folder.name != "tests"]
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class KeptFiles:
    """Results as files in a folder, named by the digest of their definition.

    Without a folder there are none.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any], **settings: Any) -> None:
        """Take the machine's `facts` (`machine.describe`) and all settings that change a result."""
        self._folder = folder
        self._conditions: dict[str, Any] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            kept = {name: value for name, value in facts.items() if name not in NOT_CONDITIONS}
            self._conditions = {**kept, **settings, "code": code_digest()}

    def find(self, definition: Mapping[str, Any]) -> Any | None:
        """Return the stored JSON value of a definition, or None.

        Raises UsageError for an invalid file.
        """
        if self._folder is None:
            return None
        path = self._file(definition)
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))["runs"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"benchmarks: {str(path)!r} is no kept result ({error}); delete it to measure again.") from error

    def keep(self, definition: Mapping[str, Any], runs: Any) -> None:
        """Write a result, a JSON value."""
        if self._folder is None:
            return
        path = self._file(definition)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"conditions": self._conditions, **definition, "runs": runs}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def _file(self, definition: Mapping[str, Any]) -> Path:
        assert self._folder is not None
        text = json.dumps({"conditions": self._conditions, **definition}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class KeptResults:
    """The results in a folder, or none without a folder.

    `facts` are those of `machine.describe`; `shorter` divides steps.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any], shorter: int) -> None:
        self._files = KeptFiles(folder, facts, shorter=shorter)

    def find(self, scene: Mapping[str, Contestant], repeat: int) -> dict[str, Measured] | None:
        """Return the stored figures of a scene's contestants in a repeat, or None.

        Raises UsageError for an invalid file.
        """
        runs = self._files.find(_definition(scene, repeat))
        try:
            return runs and {name: Measured(**{**runs[name], "losses": tuple(runs[name]["losses"])}) for name in scene}
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"benchmarks: what is kept of {', '.join(scene)} is no result ({error}); delete it to measure again."
            ) from error

    def keep(self, scene: Mapping[str, Contestant], repeat: int, runs: Mapping[str, Measured | None]) -> None:
        """Write a repeat of a scene, unless a run of it has failed."""
        measured = {name: vars(run) for name, run in runs.items() if run is not None}
        if len(measured) == len(runs):
            self._files.keep(_definition(scene, repeat), measured)


def _definition(scene: Mapping[str, Contestant], repeat: int) -> dict[str, Any]:
    return {"repeat": repeat, "contestants": {name: asdict(contestant) for name, contestant in scene.items()}}
