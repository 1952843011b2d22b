"""The address of ``--notify``: what may be one, and what of it may be shown.

Whoever knows the address of a webhook can post there, so its path is as secret as a password: only scheme, host and port are shown.
"""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["check_url", "shown_url"]

MOST_CHARACTERS = 2000


def check_url(text: str) -> None:
    """Raise ValueError, which shows nothing of the text, where it is no http or https URL that a request can be sent to."""
    what = "allowed: an http:// or https:// URL (what was given is not shown, as such an address may hold a password)"
    if len(text) > MOST_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"is longer than {MOST_CHARACTERS:,} characters, or has some that a URL cannot have; {what}")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"is no URL; {what}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"has another scheme than http and https, or none; {what}")
    if not host:
        raise ValueError(f"names no host; {what}")


def shown_url(text: str) -> str:
    """Return what may be shown and recorded of such a URL: ``https://host:port/...``."""
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."
