"""Check pieces of LaTeX, by parsing and with pdflatex if it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_pdflatex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

_MATHEMATICS = re.compile(r"\$(?:-|\^|\{|\}|[0-9.]|\\[a-zA-Z]+)+\$")


def problems(latex: str) -> list[str]:
    """Return unbalanced groups and unescaped special characters of LaTeX without comments."""
    unescaped = re.sub(r"\\[^a-zA-Z]", "", latex)
    depth = 0
    for sign in unescaped:
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return ["a group ends that has not begun"]
    messages = ["a group does not end"] if depth else []
    rest = re.sub(r"\{[][*]\}", "", _MATHEMATICS.sub("", unescaped))
    messages += [f"raw {sign}" for sign in '$&#%_~^<>|"`[]*' if sign in rest]
    return messages + [f"raw {sign!r}" for sign in set(rest) if not " " <= sign <= "~" and sign != "\n"]


def compiled(folder: Path, body: str, packages: str = "booktabs") -> str:
    """Typeset a body with pdflatex; return the log. Raises AssertionError on failure."""
    source = folder / "paper.tex"
    source.write_text(f"\\documentclass{{article}}\n\\usepackage{{{packages}}}\n\\begin{{document}}\n{body}\n\\end{{document}}\n", "utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", source.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=120)
    log = done.stdout.decode(errors="replace")
    assert done.returncode == 0, log[-3000:]
    return log
