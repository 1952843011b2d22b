"""Run batches of ``trainer`` commands, each in a process forked after all imports.

    python hostile_server.py    < a JSON object per line: folder, commands, limit_seconds    > a line of results per line

Evaluating, exporting and resuming are real up to where a framework would start.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from crosstrain.backends.export import PLAIN, export_weights
from crosstrain.cli.commands import evaluate as evaluate_command
from crosstrain.cli.commands import export as export_command
from crosstrain.cli.group import COMMANDS, invoke, load_command

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
MAX_MEMORY_BYTES = 3 << 30
"""A process that takes more ends with an error, before the machine suffers."""


class StartsFrameworkError(Exception):
    """Raised where a framework would start."""


def evaluate(*_arguments, **_options):
    raise StartsFrameworkError


def export(_backend, format_name, chosen, folder):
    export_weights(PLAIN, format_name, chosen, Path(folder))


def run(command):
    """Run a command in this process and return its result."""
    began = time.process_time()
    sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    problem = None
    try:
        code = invoke(command)
    except StartsFrameworkError:
        code = 0
    except BaseException:  # noqa: BLE001 — the traceback is the finding
        code, problem = None, traceback.format_exc()
    texts = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="replace"))
    if problem is None and "Traceback (most recent" in texts[1]:
        problem = texts[1]
    if problem is None and (match := OBEYED.search("".join(texts))):
        problem = f"sent {match[0]!r}"
    return {
        "code": code,
        "seconds": time.process_time() - began,  # of CPU: waits are ended by the limit, and others use the processors, too
        "problem": problem,
        "error": texts[1][-500:],
        "written": sum(map(len, texts)),
    }


def serve(request):
    """Run the request's commands in a child; return their results and its peak memory."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(request["limit_seconds"])
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        os.chdir(request["folder"])
        with os.fdopen(writer, "w") as answer:
            for command in request["commands"]:
                answer.write(json.dumps(run(command)) + "\n")
                answer.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        results = [json.loads(line) for line in answers]
    _, status, used = os.wait4(child, 0)
    return {"results": results, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None, "memory_bytes": used.ru_maxrss * 1024}


def main():
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    evaluate_command.Evaluator.evaluate = evaluate
    export_command._run_exporter = export
    for name in COMMANDS:
        load_command(name)
    for module in (
        "matplotlib.backends.backend_svg",
        "matplotlib.backends.backend_agg",
        "scipy.optimize",
        "crosstrain.launch.driver.resumption",
    ):
        importlib.import_module(module)
    for line in requests:
        answers.write(json.dumps(serve(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
