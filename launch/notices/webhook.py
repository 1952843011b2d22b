"""Posts a document to an http(s) address, in bounded time, and never anywhere else: no answer leads to another address.

A certificate is checked as the system does. Nothing that is raised shows more of the address than its host.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit, urlunsplit

from .news import POST_SECONDS, NoticeError

__all__ = ["post"]

ANSWER_SECONDS = 8.0
"""How long an address may take to answer."""

RETRY_SECONDS = 1.0
"""When it is tried once more."""

PERHAPS = "it may have arrived all the same"

BUSY = frozenset({429, *range(500, 600)})
"""Answers after which it is tried again."""


@dataclass(slots=True)
class _Refusal:
    """Why a try has failed; `again`: it may be tried again without telling anything twice."""

    why: str
    again: bool


def post(url: str, body: bytes) -> None:
    """Post a JSON document. Raises NoticeError where the address does not take it, the second time either, or not in time."""
    refusals: list[_Refusal | None] = []
    try:
        opener = _opener()  # here, as it reads the environment, which this thread may change later
    except OSError:  # no sound certificates of the system
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
    request = _request(url, body)
    try:
        with opener.open(request, timeout=ANSWER_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        moved = " (it leads to another address, which is not followed: give that one)" if 300 <= error.code < 400 else ""
        return _Refusal(f"the answer was {error.code}{moved}", error.code in BUSY)
    except urllib.error.URLError as error:  # before anything was answered: no connection, no such name, no sound certificate
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
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=place, fragment="")), data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", "crosstrain")
    if at:
        name, _, password = user.partition(":")
        request.add_unredirected_header("Authorization", _basic(unquote(name), unquote(password)))
    return request


def _basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https alone and follows no redirect; a proxy is used where the user's environment names one."""
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
