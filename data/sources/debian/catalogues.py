"""gettext's catalogues, compiled (.mo) and as text (.po): original and translation of each message.

The layout of .mo files is described in the manual of GNU gettext, "The Format of GNU MO Files".
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["read_mo", "read_po"]

MOST_MESSAGES = 500_000
"""Of a catalogue; the largest have some twenty thousand."""

_MAGICS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_CONTEXT = "\x04"
_PO_LINE = re.compile(r'(?:(msgctxt|msgid|msgid_plural|msgstr)(?:\[(\d{1,2})\])?[ \t]+)?"(.*)"$')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_mo(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of each message of a compiled catalogue; of one with a plural, of singular and plural.

    A message that is not in the catalogue's encoding is passed over. Raises ValueError for what is no catalogue.
    """
    order = _MAGICS.get(content[:4])
    if order is None or len(content) < 20:
        raise ValueError("no catalogue")
    _, count, originals, translations = struct.unpack_from(f"{order}4I", content, 4)
    if count > MOST_MESSAGES or max(originals, translations) + 8 * count > len(content):
        raise ValueError(f"a catalogue with {count} messages that do not fit")
    encoding, read_bytes = "utf-8", 0
    for number in range(count):
        original, translation = (_text(content, order, table + 8 * number) for table in (originals, translations))
        read_bytes += len(original) + len(translation)
        if read_bytes > 2 * len(content):
            raise ValueError("messages that share their bytes")
        if not original:
            encoding = _encoding(translation.decode("ascii", "replace"))
            continue
        try:
            yield from _forms(original.decode(encoding), translation.decode(encoding))
        except UnicodeDecodeError:
            continue


def _text(content: bytes, order: str, place: int) -> bytes:
    length, begin = struct.unpack_from(f"{order}2I", content, place)
    if begin + length > len(content):
        raise ValueError("a message beyond the end")
    return content[begin : begin + length]


def _encoding(header: str) -> str:
    named = re.search(r"charset=([\w-]{1,30})", header)
    try:
        encoding = codecs.lookup(named[1]).name if named else "utf-8"
        "a".encode(encoding)  # raises for what encodes no text, such as hex
        return encoding
    except (LookupError, ValueError) as error:
        raise ValueError("a catalogue in an unknown encoding") from error


def _forms(original: str, translation: str) -> Iterator[tuple[str, str]]:
    ids, forms = original.rpartition(_CONTEXT)[2].split("\0"), translation.split("\0")
    if forms[0]:
        yield ids[0], forms[0]
    if len(ids) > 1 and len(forms) > 1 and forms[-1]:
        yield ids[1], forms[-1]


def read_po(text: str) -> Iterator[tuple[str, str]]:
    """Yield the same of a catalogue as text; fuzzy and obsolete messages are none."""
    parts: dict[str, list[str]] = {}
    current, fuzzy = "", False
    for line in (*text.split("\n"), ""):
        line = line.strip()
        found = _PO_LINE.match(line)
        if found is not None and not line.startswith("#"):
            if found[1]:
                current = found[1] + (f"[{found[2]}]" if found[2] else "")
                if current in ("msgctxt", "msgid") and any(key.startswith("msgstr") for key in parts):
                    yield from _entry(parts, fuzzy=fuzzy)
                    parts, fuzzy = {}, False
            if current:
                parts.setdefault(current, []).append(_ESCAPE.sub(lambda one: _ESCAPED.get(one[1], one[1]), found[3]))
        elif not line:
            yield from _entry(parts, fuzzy=fuzzy)
            parts, current, fuzzy = {}, "", False
        elif line.startswith("#,") and "fuzzy" in line:
            if parts:
                yield from _entry(parts, fuzzy=fuzzy)
                parts, current = {}, ""
            fuzzy = True


def _entry(lines: Mapping[str, Sequence[str]], *, fuzzy: bool) -> Iterator[tuple[str, str]]:
    parts = {key: "".join(texts) for key, texts in lines.items()}
    if fuzzy or not parts.get("msgid"):
        return
    forms = [parts[key] for key in sorted(key for key in parts if key.startswith("msgstr"))]
    if forms and forms[0]:
        yield parts["msgid"], forms[0]
    if parts.get("msgid_plural") and len(forms) > 1 and forms[-1]:
        yield parts["msgid_plural"], forms[-1]
