"""Notifications about a run, by webhook or command.

Training does not wait for them, and its result does not depend on them.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from ...core.console import one_line
from ...core.errors import DiskError, InterruptedRunError, TrainerError
from ...core.process import command_ending_with_parent, public_environment
from ...core.settings.personal import GivenOption
from ...core.settings.sources import NOTIFICATION_VARIABLES
from ...records.store.jsonl import LineFile
from ...records.store.run_directory import RunState
from ...records.store.schema import EventRecord

if TYPE_CHECKING:
    import urllib.request


POST_SECONDS = 20.0  # for all attempts, including name resolution
ANSWER_SECONDS = 8.0
RETRY_SECONDS = 1.0  # before the second attempt
PERHAPS = "it may have arrived all the same"
BUSY = frozenset({429, *range(500, 600)})  # HTTP status codes to retry


class NoticeError(Exception):
    """A notification failed; the message has the reason."""


@dataclass(slots=True)
class _Refusal:
    why: str
    again: bool  # a retry cannot notify twice


def post(url: str, body: bytes) -> None:
    """Post a JSON document. Raises NoticeError if that fails twice, or takes too long."""
    refusals: list[_Refusal | None] = []
    try:
        opener = _opener()  # in this thread, as the environment may change later
    except OSError:  # invalid certificates of the system
        raise NoticeError("the request could not be made") from None

    def work() -> None:
        refusals.append(_try(opener, url, body))
        if (first := refusals[0]) is not None and first.again:
            time.sleep(RETRY_SECONDS)
            refusals.append(_try(opener, url, body))

    thread = threading.Thread(target=work, name="webhook", daemon=True)
    thread.start()
    thread.join(POST_SECONDS)
    if thread.is_alive():
        raise NoticeError(f"there was no answer within {POST_SECONDS:g} s")
    if not refusals:
        raise NoticeError("the request could not be made")
    if (last := refusals[-1]) is not None:
        raise NoticeError(f"{last.why}{', twice' if len(refusals) > 1 else ''}")


def _try(opener: urllib.request.OpenerDirector, url: str, body: bytes) -> _Refusal | None:
    import http.client
    import ssl
    import urllib.error

    request = _request(url, body)
    try:
        with opener.open(request, timeout=ANSWER_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        moved = " (it leads to another address, which is not followed: give that one)" if 300 <= error.code < 400 else ""
        return _Refusal(f"the answer was {error.code}{moved}", error.code in BUSY)
    except urllib.error.URLError as error:  # no connection, name or valid certificate
        reason = error.reason
        if isinstance(reason, ssl.SSLCertVerificationError):
            return _Refusal(f"the certificate is not sound: {reason.verify_message}", again=False)
        why = reason.strerror if isinstance(reason, OSError) else None
        return _Refusal(f"no connection: {why or type(reason).__name__}", again=True)
    except TimeoutError:
        return _Refusal(f"there was no answer within {ANSWER_SECONDS:g} s; {PERHAPS}", again=False)
    except (OSError, http.client.HTTPException) as error:
        return _Refusal(f"the connection has ended without an answer ({type(error).__name__}); {PERHAPS}", again=False)


def _request(url: str, body: bytes) -> urllib.request.Request:
    import urllib.request

    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=place, fragment="")), data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", "crosstrain")
    if at:
        name, _, password = user.partition(":")
        credentials = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {credentials}")
    return request


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https, without redirects, through the user's proxy."""
    import ssl
    import urllib.request

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


Event = Literal["failed", "restarted", "finished", "interrupted"]
MAX_CAUSE_CHARACTERS = 2000
_VERBS: Mapping[Event, str] = {
    "failed": "has failed",
    "restarted": "has restarted",
    "finished": "has finished",
    "interrupted": "was interrupted",
}


@dataclass(frozen=True, slots=True)
class RunNews:
    """An event of a run; None: unknown."""

    event: Event
    name: str | None
    path: Path | None
    cause: str | None  # one line
    task: str | None  # that failed first
    steps: int
    seconds: float  # on the run clock
    exit_code: int | None
    restarts: int
    host: str = ""  # the driver's; empty: this one

    @classmethod
    def before_start(cls, name: str | None, error: BaseException) -> RunNews:
        """Return the event of a run that ended before its driver started."""
        interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        code = error.exit_code if isinstance(error, TrainerError) else InterruptedRunError.exit_code if interrupted else 1
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return cls("interrupted" if interrupted else "failed", name, None, cause, None, 0, 0.0, code, 0)

    def document(self) -> dict[str, Any]:
        """Return the event as JSON values; untrusted texts are bounded to one line."""
        cause = None if self.cause is None else one_line(self.cause)[:MAX_CAUSE_CHARACTERS]
        document = {
            **asdict(self),
            "path": None if self.path is None else one_line(str(self.path)),
            "name": None if self.name is None else one_line(self.name),
            "host": self.host or socket.gethostname(),
            "task": None if self.task is None else one_line(self.task),
            "cause": cause,
            "seconds": round(self.seconds, 3),
        }
        run = f"run {document['name']}" if document["name"] is not None else "a run"
        after = f"after {self.steps:,} steps and {self.seconds:.0f} s"
        document["text"] = f"{run} on {document['host']} {_VERBS[self.event]} {after}{'' if cause is None else f': {cause}'}"
        return document

    def as_json(self) -> bytes:
        """Return the document as a line of JSON in ASCII."""
        return json.dumps(self.document()).encode() + b"\n"

    def variables(self) -> dict[str, str]:
        """Return the document as environment variables; unknown values are empty."""
        document = self.document()
        values = {name: document[name.removeprefix("TRAINER_RUN_").lower()] for name in NOTIFICATION_VARIABLES}
        return {name: "" if value is None else str(value) for name, value in values.items()}


COMMAND_SECONDS = 60.0  # then the command's process group is killed


def run_command(command: str, body: bytes, variables: Mapping[str, str], seconds: float = COMMAND_SECONDS) -> None:
    """Run a shell command with `body` as its input and standard error as its output.

    Raises NoticeError if it cannot be run, fails or takes longer than `seconds`.
    """
    environment = public_environment() | dict(variables)
    sys.stderr.flush()
    try:
        process = subprocess.Popen(
            command_ending_with_parent(["/bin/sh", "-c", command]),
            stdin=subprocess.PIPE,
            stdout=2,  # standard output is for data
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NoticeError(f"it cannot be run: {getattr(error, 'strerror', None) or error}") from error
    try:
        process.communicate(body, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoticeError(f"it was ended, as it has taken longer than {seconds:g} s") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else f"has ended with {process.returncode}"
        raise NoticeError(f"it {how}")


MAX_WAITING = 100  # restart notices for the address; further ones are dropped
EVENTS = "events.jsonl"
_ENDS: Mapping[RunState, Event] = {"succeeded": "finished", "interrupted": "interrupted", "failed": "failed"}


class Notifier:
    """Sends one run's notices, as set by ``notify`` and ``on_failure``."""

    def __init__(self, options: Mapping[str, GivenOption], warn: Callable[[str], None]) -> None:
        self._notify = options.get("notify")
        self._on_failure = options.get("on_failure")
        self._warn = warn
        self._waiting: queue.Queue[RunNews] = queue.Queue(MAX_WAITING)
        self._posting: threading.Thread | None = None
        self._ended = False
        self._name: str | None = None
        self._done: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._path: Path | None = None
        self._restarts = 0
        self._live: Callable[..., None] | None = None

    def begin(self, name: str | None, done: Callable[[], tuple[int, float]]) -> None:
        """Set the run's name; `done` returns its updates and seconds so far."""
        self._name, self._done = name, done

    def has_directory(self, path: Path, record: Callable[..., None]) -> None:
        """Set the run directory; until the run's end `record` gets events about notices."""
        self._path, self._live = path.absolute(), record

    def restarted(self, cause: str, task: str | None) -> None:
        """Notify a restart after the failure of an attempt, in a thread."""
        self._restarts += 1
        if self._notify is None:
            return
        news = self._news("restarted", cause, task, None)
        try:
            self._waiting.put_nowait(news)
        except queue.Full:
            self._failed("notify", news, "too many notices wait for that address already")
            return
        if self._posting is None:
            self._posting = threading.Thread(target=self._post_waiting, name="notices", daemon=True)
            self._posting.start()

    def ended(self, state: RunState, cause: str | None, task: str | None, exit_code: int) -> None:
        """Notify the end of the run after its records are closed; as `send_end`."""
        self._live = None
        if self._path is not None and not self._path.exists():
            self._path = None  # removed, as nothing was trained
        self.send_end(self._news(_ENDS[state], cause, task, exit_code))

    def send_end(self, news: RunNews) -> None:
        """Notify the end of the run, in bounded time; idempotent, raises nothing."""
        if self._ended:
            return
        self._ended = True
        try:
            self._send_end(news)
        except KeyboardInterrupt:
            self._warn(f"trainer: interrupted during the notification that the run {news.event}")

    def _send_end(self, news: RunNews) -> None:
        deadline = time.monotonic() + POST_SECONDS
        while self._posting is not None and self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._notify is not None:
            self._post(news)
        if self._on_failure is not None and news.event == "failed":
            try:
                run_command(self._on_failure.value, news.as_json(), news.variables())
            except NoticeError as error:
                self._failed("on_failure", news, str(error))

    def _news(self, event: Event, cause: str | None, task: str | None, exit_code: int | None) -> RunNews:
        steps, seconds = self._done()
        name = self._name or (self._path.name if self._path is not None else None)
        return RunNews(event, name, self._path, cause, task, steps, seconds, exit_code, self._restarts)

    def _post_waiting(self) -> None:
        while True:
            news = self._waiting.get()
            self._post(news)
            self._waiting.task_done()

    def _post(self, news: RunNews) -> None:
        if self._notify is None:
            return
        try:
            post(self._notify.value, news.as_json())
        except NoticeError as error:
            self._failed("notify", news, str(error))

    def _failed(self, how: str, news: RunNews, why: str) -> None:
        address = self._notify if how == "notify" else None
        shown = "" if address is None else f" ({address.option.shown(address.value)})"
        self._warn(f"trainer: --{how.replace('_', '-')}{shown}: could not notify that the run {news.event}: {why}")
        self._record("notice_failed", how=how, told=news.event, why=why)

    def _record(self, event: str, **detail: Any) -> None:
        """Record a notice's event, also after the run's last event; thread-safe."""
        try:
            if self._live is not None:
                self._live(event, **detail)
                return
        except DiskError:
            return  # raised by the run's next record
        except ValueError:
            pass  # the records are being closed
        if self._path is None or not (self._path / EVENTS).exists():
            return
        try:
            with closing(LineFile(self._path / EVENTS)) as file:
                file.write(EventRecord(event, self._done()[1], detail))
        except DiskError as error:
            self._warn(f"trainer: that could not be recorded either: {error}")
