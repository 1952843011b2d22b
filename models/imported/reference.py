"""References to models as people have them: ``FILE.py:NAME``, ``package.module:NAME``, ``torchvision:NAME``.

What stands there is an nn.Module class, or a function that returns a module. ``?key=value&…`` sets constructor arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.errors import UsageError
from ...core.suggestions import nearest

TORCHVISION = "torchvision"
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a model's class or function is: an absolute path, a module's dotted path, or torchvision."""

    kind: Literal["file", "module", "torchvision"]
    place: str
    attribute: str

    @property
    def text(self) -> str:
        """The reference as a run records it."""
        return f"{TORCHVISION if self.kind == TORCHVISION else self.place}:{self.attribute}"


def read_reference(base: str) -> Reference:
    """Read a reference without arguments. Raises UsageError where a file or name cannot be one."""
    place, _, attribute = base.rpartition(":")
    if not _ATTRIBUTE.fullmatch(attribute):
        raise UsageError(f"model: got {base!r}; write {place}:NAME, with the name of a class or function in it.")
    if place == TORCHVISION:
        return Reference("torchvision", "torchvision.models", attribute)
    if not place.endswith(".py"):
        return Reference("module", place, attribute)
    path = Path(place).expanduser().absolute()
    if not path.is_file():
        folder = path.parent
        near = nearest(path.name, [other.name for other in folder.glob("*.py")]) if folder.is_dir() else None
        hint = f" Did you mean {near!r}?" if near else ""
        raise UsageError(f"model: got {base!r}, but there is no file {str(path)!r}.{hint}")
    return Reference("file", str(path), attribute)
