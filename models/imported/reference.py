"""References to models: classes and functions in files and modules, and configurations.

``FILE.py:NAME``, ``package.module:NAME`` and ``torchvision:NAME`` are an nn.Module class, a Keras model, or a function that returns one;
``hf:CONFIG.json`` a configuration of transformers. ``?key=value&…`` sets constructor arguments or fields.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from ...core.errors import UsageError
from ...core.suggestions import nearest

TORCHVISION, HF = "torchvision", "hf"
MAX_SOURCE_BYTES = 4 << 20  # of one file
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of a class or function: a file, a module's dotted path, or torchvision.

    Of "hf" it is a configuration file, and there is no attribute.
    """

    kind: Literal["file", "module", "torchvision", "hf"]
    place: str
    attribute: str

    @property
    def text(self) -> str:
        """The reference as a run records it."""
        if self.kind == HF:
            return f"{HF}:{self.place}"
        return f"{TORCHVISION if self.kind == TORCHVISION else self.place}:{self.attribute}"

    @property
    def package(self) -> str:
        """The top-level package that the class comes from; "" for a file."""
        return {"file": "", HF: "transformers"}.get(self.kind, self.place.partition(".")[0])

    def sources(self) -> dict[str, Path]:
        """Return the user's files that it names or imports, by name. Raises UsageError."""
        if self.kind == HF:
            return {Path(self.place).name: Path(self.place)}
        return local_sources(Path(self.place)) if self.kind == "file" else {}

    def imports(self) -> frozenset[str]:
        """Return the top-level packages that its sources import, as far as their text shows.

        Raises UsageError for a file that is not Python. Nothing is imported.
        """
        sources = self.sources() if self.kind == "file" else _module_sources(self.place) if self.kind == "module" else {}
        absolute = {module for path in sources.values() for module, level in _imported_modules(_tree(path)) if not level}
        return frozenset(module.partition(".")[0] for module in (*absolute, self.package) if module)


def _module_sources(place: str) -> dict[str, Path]:
    """Return the file of an installed module and what it imports next to it, if found."""
    top, *rest = place.split(".")
    try:
        spec = PathFinder.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return {}
    folders = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    candidates = [path for folder in folders for path in (folder.with_suffix(".py"), folder / "__init__.py")]
    file = next((path for path in candidates if path.is_file()), None if rest else spec.origin and Path(spec.origin))
    return local_sources(file) if file and file.suffix == ".py" else {}


def read_reference(base: str) -> Reference:
    """Read a reference without arguments. Raises UsageError where a file or name cannot be one."""
    if base.startswith(f"{HF}:"):
        return Reference("hf", str(_existing(base, base.removeprefix(f"{HF}:"))), "")
    place, _, attribute = base.rpartition(":")
    if not _ATTRIBUTE.fullmatch(attribute):
        raise UsageError(f"model: got {base!r}; write {place}:NAME, with the name of a class or function in it.")
    if place == TORCHVISION:
        return Reference("torchvision", "torchvision.models", attribute)
    if not place.endswith(".py"):
        return Reference("module", place, attribute)
    return Reference("file", str(_existing(base, place)), attribute)


def _existing(base: str, place: str) -> Path:
    """Return the absolute path of a reference's file. Raises UsageError if there is none."""
    try:
        path = Path(os.path.abspath(Path(place).expanduser()))  # without "..": one file has one path
    except RuntimeError as error:  # of an unknown user's home
        raise UsageError(f"model: got {base!r}: {error}.") from error
    if not path.is_file():
        folder = path.parent
        near = nearest(path.name, [file.name for file in folder.glob(f"*{path.suffix}")]) if folder.is_dir() and not path.exists() else None
        hint = f" Did you mean {near!r}?" if near else ""
        raise UsageError(f"model: got {base!r}, but there is no file {str(path)!r}.{hint}")
    return path


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
        for module, level in _imported_modules(_tree(file)):
            folder = file.parents[level - 1] if level else path.parent
            parts = module.split(".") if module else []
            packages = [folder.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
            modules = [*packages, folder.joinpath(*parts).with_suffix(".py")] if parts else []
            waiting += [source for source in modules if source.is_file() and source.is_relative_to(path.parent)]
    return sources


MAX_NAMED_FILES, MAX_PATH = 100, 4096


def named_files(source: Path) -> list[Path]:
    """Return the files that a source names, such as weights, which libraries open unseen."""
    files: list[Path] = []
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < MAX_PATH and "\0" not in node.value:
            path = os.path.abspath(os.path.expanduser(node.value))
            if os.path.splitext(path)[1] not in ("", ".py") and os.path.isfile(path) and len(files) < MAX_NAMED_FILES:
                files.append(Path(path))
    return files


def _tree(file: Path) -> ast.AST:
    """Read a file of Python. Raises UsageError for anything else."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_SOURCE_BYTES + 1)
        if len(text) > MAX_SOURCE_BYTES:
            raise UsageError(f"model: {str(file)!r} is larger than {MAX_SOURCE_BYTES >> 20} MiB; is it Python?")
        return ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"model: {str(file)!r} cannot be read as Python: {error}.") from error


def _imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file may import, and the level of the import: 0 if absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            yield ".".join(base), node.level
            yield from ((".".join([*base, alias.name]), node.level) for alias in node.names)
