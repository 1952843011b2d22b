"""Training from Python: each call runs the command ``trainer`` and returns its results.

It has a process of its own, so that neither a notebook's modules nor its signals, threads and memory meet those of a run.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.bounded_json import parse_json
from ..core.errors import InterruptedRunError, RunFailedError, TrainerError, UsageError
from ..core.job import Job
from ..core.process import command_ending_with_parent, python
from ..core.settings.sweeps import as_arguments, value_text
from .given_data import data_name
from .given_models import model_name
from .progress import Report, default_report
from .results import Result

HANDLED_AFTER_SECONDS = 1.0  # a new interpreter handles an interrupt in order once it has begun with the command
_ERROR = "error: "
_EXCEPTIONS: Mapping[int, type[TrainerError]] = {UsageError.exit_code: UsageError, RunFailedError.exit_code: RunFailedError}


def run(
    *,
    model: Any = None,
    data: Any = None,
    target: str | None = None,
    config: str | os.PathLike[str] | None = None,
    progress: bool | Report = True,
    **settings: Any,
) -> Result:
    """Train one job and return its results.

    `model` is a name, ``FILE.py:NAME``, or a class or function that makes a module; `data` a name, arrays ``(x, y)`` or ``(x, y, x_test,
    y_test)``, a Dataset or two, or a DataFrame with its column `target`. `progress`: False for none, or a function for each line. The
    other keywords are the settings of ``trainer run``, by their names in a file. Raises UsageError for a wrong request, RunFailedError,
    and KeyboardInterrupt once an interrupted run has ended in order.
    """
    document = _call("run", _arguments(model, data, target, config, settings), progress)
    return Result(document["path"])


def sweep(
    *,
    grid: Mapping[str, Sequence[Any]],
    repeats: int | None = None,
    model: Any = None,
    data: Any = None,
    target: str | None = None,
    config: str | os.PathLike[str] | None = None,
    progress: bool | Report = True,
    **settings: Any,
) -> list[Result]:
    """Train all combinations of a `grid` of settings, each `repeats` times.

    Return the results. The rest is as for `run`. Raises RunFailedError where a combination failed.
    """
    arguments = [part for name, values in grid.items() for part in ("--grid", f"{name}={_axis(name, values)}")]
    arguments += [] if repeats is None else ["--repeats", str(repeats)]
    document = _call("sweep", [*arguments, *_arguments(model, data, target, config, settings)], progress)
    return [Result(point["path"]) for point in document["points"]]


def _axis(name: str, values: Sequence[Any]) -> str:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"grid: {name} needs a list of values")
    texts = [value_text(model_name(value) if name == "model" else value) for value in values]
    return ";".join(texts) if any("," in text for text in texts) else ",".join(texts)


def _arguments(model: Any, data: Any, target: str | None, config: Any, settings: Mapping[str, Any]) -> list[str]:
    wrong = [name for name in settings if name not in Job.model_fields]
    if wrong:
        raise UsageError.of("setting", wrong[0], "a setting of trainer run", Job.model_fields)
    chosen = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        chosen["model"] = model_name(model)
    if data is not None:
        chosen["data"] = data_name(data, target)
    elif target is not None:
        raise UsageError("target: names a column of a DataFrame, and there is none; give data=")
    return [*as_arguments(chosen), *([] if config is None else ["--config", os.fspath(config)])]


def _call(command: str, arguments: Sequence[str], progress: bool | Report) -> Any:
    """Run a command of ``trainer`` and return its JSON document."""
    report = progress if callable(progress) else default_report()
    quiet = ["--quiet"] if progress is False else []
    with subprocess.Popen(
        command_ending_with_parent(python("crosstrain.cli.main", command, *arguments, "--json", *quiet), signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C reaches it through this process alone
    ) as child:
        output: list[str] = []
        began = time.monotonic()
        reader = threading.Thread(target=lambda: output.append(child.stdout.read() if child.stdout else ""), name="output")
        reader.start()
        try:
            problem = _forward_lines(child, report)
        except BaseException:
            time.sleep(max(0.0, began + HANDLED_AFTER_SECONDS - time.monotonic()))
            child.send_signal(signal.SIGINT)
            for line in _forward_lines(child, report):
                report(line)
            raise
        finally:
            child.wait()
            reader.join()
    if child.returncode:
        raise _exception(child.returncode, problem)
    return parse_json(output[0].encode())


def _forward_lines(child: subprocess.Popen[str], report: Report) -> list[str]:
    """Report the lines of standard error but those of an error, which are returned."""
    problem: list[str] = []
    for line in child.stderr or ():
        text = line.rstrip("\n")
        if text.startswith(_ERROR):
            problem = [text.removeprefix(_ERROR)]
        elif problem:
            problem.append(text)
        else:
            report(text)
    return problem


def _exception(code: int, problem: Sequence[str]) -> BaseException:
    text = "\n".join(problem) or f"trainer ended with exit code {code}"
    return KeyboardInterrupt() if code == 130 else _EXCEPTIONS.get(code, InterruptedRunError)(text)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature with each setting as a keyword, for help and completion."""
    signature = inspect.signature(function)
    fixed = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    taken = {parameter.name for parameter in fixed}
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=field.annotation)
        for name, field in Job.model_fields.items()
        if name not in taken
    ]
    return signature.replace(parameters=[*fixed, *settings])


for _function in (run, sweep):
    setattr(_function, "__signature__", _signature(_function))  # noqa: B010 - mypy knows no such attribute
