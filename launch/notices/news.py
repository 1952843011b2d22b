"""What is told of a run: one document, as JSON for an address or a command's input, and as variables for the command."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.errors import InterruptedRunError, TrainerError
from ...core.settings.reserved_variables import TOLD_VARIABLES
from ...core.untrusted.console import one_line

__all__ = ["POST_SECONDS", "Event", "NoticeError", "RunNews"]

Event = Literal["failed", "restarted", "finished", "interrupted"]

POST_SECONDS = 20.0
"""What posting it may take in all, whatever the other side does, or the resolving of its name."""

MOST_CAUSE_CHARACTERS = 2000

_SAID: Mapping[Event, str] = {
    "failed": "has failed",
    "restarted": "has restarted",
    "finished": "has finished",
    "interrupted": "was interrupted",
}


class NoticeError(Exception):
    """What was to be told could not be, and why."""


@dataclass(frozen=True, slots=True)
class RunNews:
    """That something has become of a run. None stands for what is not known, such as the path of a run that could not make its directory.

    `host` is that of the driver; `cause` is a line, `task` the one that failed first; `steps` are the updates done, and `seconds` what the
    run has taken, on its clock; `restarts` is number of restarts so far until now.
    """

    event: Event
    name: str | None
    path: Path | None
    cause: str | None
    task: str | None
    steps: int
    seconds: float
    exit_code: int | None
    restarts: int
    host: str = ""

    @classmethod
    def before_start(cls, name: str | None, error: BaseException) -> RunNews:
        """Return the news of a run that ended before its driver was there."""
        interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        code = error.exit_code if isinstance(error, TrainerError) else InterruptedRunError.exit_code if interrupted else 1
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return cls("interrupted" if interrupted else "failed", name, None, cause, None, 0, 0.0, code, 0)

    def document(self) -> dict[str, Any]:
        """Return it JSON-ready; texts, of which some are those of other hosts, are bounded and stay on their line."""
        cause = None if self.cause is None else one_line(self.cause)[:MOST_CAUSE_CHARACTERS]
        found = {
            **asdict(self),
            "path": None if self.path is None else one_line(str(self.path)),
            "name": None if self.name is None else one_line(self.name),
            "host": self.host or socket.gethostname(),
            "task": None if self.task is None else one_line(self.task),
            "cause": cause,
            "seconds": round(self.seconds, 3),
        }
        run = f"run {found['name']}" if found["name"] is not None else "a run"
        after = f"after {self.steps:,} steps and {self.seconds:.0f} s"
        found["text"] = f"{run} on {found['host']} {_SAID[self.event]} {after}{'' if cause is None else f': {cause}'}"
        return found

    def as_json(self) -> bytes:
        """Return the document as JSON, in ASCII, with a line end."""
        return json.dumps(self.document()).encode() + b"\n"

    def variables(self) -> dict[str, str]:
        """Return the document as environment variables; what is not known is empty."""
        found = self.document()
        return {name: "" if (value := found[name.removeprefix("TRAINER_RUN_").lower()]) is None else str(value) for name in TOLD_VARIABLES}
