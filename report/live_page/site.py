"""What the live page consists of, by address: a frame that loads once, and what its script asks for from then on."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .refresher import Refresher
from .server import Document

__all__ = ["Site"]

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPT = re.compile(r"/script-(\d{1,2})\.js")


class Site:
    """Finds the documents of one live page. Who asks for any of them keeps the refresher at work.

    | path | document |
    |---|---|
    | ``/`` | the frame, which the browser keeps |
    | ``/live.js`` | the script that follows |
    | ``/state`` | a few hundred bytes of JSON: the number of the page, and what its header says |
    | ``/page`` | the page without its scripts |
    | ``/script-0.js`` … | the page's own scripts, which the browser takes once |
    """

    def __init__(self, refresher: Refresher) -> None:
        self._refresher = refresher
        self._frame = (_TEMPLATES / "live.html").read_bytes()
        self._script = (_TEMPLATES / "live.js").read_bytes()

    def find(self, path: str, token: str) -> Document | None:
        """Return the document at a path; None where there is none (yet)."""
        self._refresher.ask()
        content = self._refresher.published.content
        if path == "/":
            return Document("text/html", self._frame.replace(b"{token}", token.encode()))
        if path == "/live.js":
            return Document("text/javascript", self._script)
        if path == "/state":
            return Document("application/json", self._state())
        if content is None:
            return None
        if path == "/page":
            return Document("text/html", content.document)
        found = _SCRIPT.fullmatch(path)
        if found is None or int(found[1]) >= len(content.scripts):
            return None
        return Document("text/javascript", content.scripts[int(found[1])])

    def _state(self) -> bytes:
        published = self._refresher.published
        state = {
            "version": published.version,
            "scripts": 0 if published.content is None else len(published.content.scripts),
            "read_at_unix_seconds": published.read_at_unix_seconds,
            "runs": published.runs,
            "at_work": published.at_work,
            "notes": published.notes,
        }
        return json.dumps(state).encode()
