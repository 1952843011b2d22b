"""References to models: ``FILE.py:NAME``, ``package.module:NAME``, ``torchvision:NAME``.

NAME is an nn.Module class, or a function that returns a module. ``?key=value&…`` sets constructor arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.errors import UsageError
from ...core.suggestions import nearest

TORCHVISION = "torchvision"
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of a class or function: a file, a module's dotted path, or torchvision."""

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
        near = nearest(path.name, [file.name for file in folder.glob("*.py")]) if folder.is_dir() else None
        hint = f" Did you mean {near!r}?" if near else ""
        raise UsageError(f"model: got {base!r}, but there is no file {str(path)!r}.{hint}")
    return Reference("file", str(path), attribute)


def local_sources(path: Path) -> dict[str, Path]:
    """Return a file and the modules next to it that it imports, by name.

    They are found in the text; nothing is imported. Raises UsageError for a file that is not Python.
    """
    sources: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(path.parent).as_posix()
        if name in sources:
            continue
        sources[name] = file
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            raise UsageError(f"model: {str(file)!r} cannot be read as Python: {error}.") from error
        for module in _imported_modules(tree):
            place = path.parent.joinpath(*module.split("."))
            waiting += [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return sources


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
