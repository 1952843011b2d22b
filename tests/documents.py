"""Documents as test material: their code blocks as files, and their commands."""

import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks in one language; "" are those without one."""
    matches = re.findall(r"^```([^\n]*)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [body for name, body in matches if name == language]


def write_package(document: Path, folder: Path) -> list[Path]:
    """Write each Python block that begins with its path (``# my_package/my_module.py``).

    Also entry points, as an installation would.
    """
    written = []
    for body in blocks(document, "python"):
        named = re.match(r"# ([\w/]+\.py)\n", body)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
            written.append(path)
    for path in written:
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    groups = entry_points(document)
    if groups:
        info = folder / "documented-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: documented\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in rows.items()) for group, rows in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return written


def entry_points(document: Path) -> dict[str, dict[str, str]]:
    """The entry points of the TOML blocks, by group."""
    tables: dict[str, dict[str, str]] = {}
    for body in blocks(document, "toml"):
        tables |= tomllib.loads(body).get("project", {}).get("entry-points", {})
    return tables


def shown_commands(document: Path) -> list[list[str]]:
    """The `trainer` commands that can be typed, from blocks without a language.

    Arguments without the command's name.
    """
    lines = [line for body in blocks(document, "") for line in body.splitlines()]
    typed = [re.search(r"(?:^|(?<=--no-python ))trainer (.*)", line) for line in lines]
    return [shlex.split(line[1], comments=True) for line in typed if line]


def mentioned_commands(document: Path) -> list[list[str]]:
    """The words of each `trainer …` in running text; they may hold placeholders."""
    return [text.split() for text in re.findall(r"`trainer ([^`\n]+)`", document.read_text(encoding="utf-8"))]
