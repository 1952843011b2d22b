"""Size of the product at some commits, with examples, without tests and documents.

Usage: `python tests/product_size.py [COMMIT ...]`.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
NOT_PRODUCT = ("tests", "benchmarks", "docs")
SHORT_LINES = 80


def sources(commit):
    """The product's Python files at a commit: text by path."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=tar", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        paths = [member for member in files.getmembers() if member.isfile() and member.name.endswith(".py")]
        product = [member for member in paths if PurePosixPath(member.name).parts[0] not in NOT_PRODUCT]
        return {member.name: files.extractfile(member).read().decode() for member in product}


def lines_of_docstrings(tree):
    numbers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.update(range(node.lineno, node.end_lineno + 1))
    return numbers


def comment_columns(text):
    """Start columns of comments, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}


def figures(commit):
    files = sources(commit)
    lines = bare = statements = docstrings = characters = 0
    for text in files.values():
        tree, source_lines = ast.parse(text), text.splitlines()
        without = lines_of_docstrings(tree)
        code = [line for number, line in enumerate(source_lines, 1) if line.strip() and number not in without]
        lines, bare = lines + len(source_lines), bare + len(code)
        statements += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
        docstrings += sum(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in ast.walk(tree))
        comments = comment_columns(text)
        characters += sum(len(line[: comments.get(number)].strip()) for number, line in enumerate(source_lines, 1) if number not in without)
    return {
        "lines": lines,
        "lines without blanks and docstrings": bare,
        "statements": statements,
        "characters of code, without comments, per statement that is no docstring": round(characters / (statements - docstrings), 2),
        "files": len(files),
        "folders": len({PurePosixPath(path).parent for path in files}),
        f"files under {SHORT_LINES} lines": sum(len(text.splitlines()) < SHORT_LINES for text in files.values()),
    }


def main(commits):
    sizes = [figures(commit) for commit in commits]
    print(f"| | {' | '.join(commits)} |\n|---|{'---|' * len(commits)}")
    for name in sizes[0]:
        print(f"| {name} | {' | '.join(f'{figures[name]:,}' for figures in sizes)} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
