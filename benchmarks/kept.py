"""Finished turns of a session in a folder, so that a session which was interrupted goes on where it was.

A turn is one repeat of a scene: everybody who takes part, one after the other. It is taken up again as a whole or not at all, since what is
compared has to be neighbours in time; and only where everything that its figures depend on is as it was: machine, versions, the source of
product and benchmark, settings, and the contestants themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.core import errors

from .figures import Measured

__all__ = ["Kept", "source_digest"]

NOT_COMPARED = ("load_before",)
"""Of the machine: what another moment changes."""

NOT_RUN = {"tests", "docs", "build", "dist", "runs"}


def source_digest() -> str:
    """Return the sha256 of all Python files of the product and of these benchmarks."""
    total = hashlib.sha256()
    for root in (Path(errors.__file__).parents[1], Path(__file__).parent):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in NOT_RUN and not name.startswith("."))
            for path in (Path(folder) / name for name in sorted(names) if name.endswith(".py")):
                total.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True)
class Kept:
    """Turns in `folder`. `circumstances` is what they have in common: machine, versions, source and settings, ready for JSON."""

    folder: Path
    circumstances: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> Kept:
        """Return those of a machine and a session's settings."""
        lasting = {name: value for name, value in machine.items() if name not in NOT_COMPARED}
        return cls(folder, {"machine": lasting, "settings": dict(settings), "source": source_digest()})

    def read(self, scene: str, repeat: int, contestants: Mapping[str, Any]) -> dict[str, Measured] | None:
        """Return the figures of a turn by contestant, or None where there is none of just these."""
        path = self._path(scene, repeat, contestants)
        if not path.exists():
            return None
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {name: Measured(**{**values, "losses": tuple(values["losses"])}) for name, values in runs.items()}

    def write(self, scene: str, repeat: int, contestants: Mapping[str, Any], runs: Mapping[str, Measured]) -> None:
        """Keep a turn in which no run failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(scene, repeat, contestants)
        document = {**self._identity(scene, repeat, contestants), "runs": {name: vars(run) for name, run in runs.items()}}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(document) + "\n", encoding="utf-8")
        partial.replace(path)

    def _path(self, scene: str, repeat: int, contestants: Mapping[str, Any]) -> Path:
        identity = json.dumps(self._identity(scene, repeat, contestants), sort_keys=True)
        return self.folder / f"turn-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"

    def _identity(self, scene: str, repeat: int, contestants: Mapping[str, Any]) -> dict[str, Any]:
        who: Sequence[tuple[str, str]] = [(name, repr(contestant)) for name, contestant in contestants.items()]
        return {"circumstances": self.circumstances, "scene": scene, "repeat": repeat, "contestants": [list(pair) for pair in who]}
