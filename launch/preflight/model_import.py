"""Can a user's own model be imported here? It is imported in a process of its own: what it does there is its own affair, and ends with it.

``python -m crosstrain.launch.preflight.model_import MODEL BACKEND`` prints as JSON why not, or null.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ...core.errors import UsageError
from ...core.plugins import BUILT_IN, find, forward_plugin, load, model_base
from ...core.process import command_ending_with_parent, python, there_to_work_in
from ...core.untrusted.bounded_json import UnreadableError, parse_json

__all__ = ["import_problem", "main"]


def import_problem(model: str, backend: str) -> str | None:
    """Say why a model, named as in a job, cannot be imported with its forward function on a backend; None where it can, or is one of ours.

    That imports the one framework, which takes seconds, but not this process. For the main thread, with which the import ends.
    """
    if model_base(model) in {plugin.name for plugin in BUILT_IN["model"]}:
        return None
    command = command_ending_with_parent(python(__name__, model, backend))
    said: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    child = subprocess.run(command, check=False, cwd=there_to_work_in(), **said)
    if child.returncode == 0:
        with suppress(UnreadableError):  # the model's own code has the process to itself, and may have ended it in its own way
            problem = parse_json(child.stdout.encode())
            if problem is None or isinstance(problem, str):
                return problem
    how = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"ended with code {child.returncode}"
    lines = child.stderr.strip().splitlines()
    return f"model: importing {model_base(model)!r} fails: it {how}{f': {lines[-1]}' if lines else ''}"


def main(model: str, backend: str) -> None:
    """Import in this process. What is printed meanwhile goes to standard error, so that standard output is JSON alone."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    problem = None
    try:
        load(find("model", model), "model")
        load(forward_plugin(model, backend), "forward")
    except UsageError as error:
        problem = str(error)
    with os.fdopen(answer_to, "w", encoding="utf-8") as stream:
        json.dump(problem, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
