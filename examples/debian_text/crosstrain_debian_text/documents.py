"""Text of translated documents: pages with equal markup in both languages, and catalogues.

The catalogues are gettext's.
"""

from __future__ import annotations

import codecs
import html
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_BLOCKS = frozenset([
    "p", "para", "simpara", "title", "subtitle", "h1", "h2", "h3", "h4", "h5", "h6", "li", "td", "th", "dt", "dd",
    "term", "desc", "caption", "primary", "secondary", "bridgehead", "entry",
])  # fmt: skip
_CONTAINERS = frozenset([
    "body", "div", "section", "ul", "ol", "dl", "table", "tr", "tbody", "thead", "item", "list", "note", "tip",
    "steps", "media", "page", "article", "chapter", "sect1", "sect2", "listitem", "itemizedlist", "orderedlist",
    "variablelist", "varlistentry", "blockquote", "nav", "header", "footer", "br", "hr", "img", "figure",
])  # fmt: skip
_MUTE = frozenset(["script", "style", "pre", "screen", "programlisting", "head", "code-block", "synopsis", "screenshot"])
_MARKUP = re.compile(r"<(/?)([A-Za-z][\w:.-]{0,40})([^<>]{0,4000})>")
_ID = re.compile(r"""\bid\s*=\s*["']([^"'<>]{1,200})["']""")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, heading or cell: its element's name, its identifier, if any, and its text."""

    tag: str
    identifier: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that have text, in order, without code and scripts."""
    reader = _PageReader()
    page = _strip_comments(page)
    position = 0
    for mark in _MARKUP.finditer(page):
        reader.read(page[position : mark.start()], mark)
        position = mark.end()
    reader.end_block()
    return reader.blocks


class _PageReader:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._tag, self._identifier = "", ""
        self._parts: list[str] = []  # since the last block; joined once, as a page may have millions
        self._mute: list[str] = []

    def read(self, text: str, mark: re.Match[str]) -> None:
        if not self._mute:
            self._add(text)
        closing, name, attributes = mark[1] == "/", mark[2].lower(), mark[3]
        if name in _MUTE and not attributes.endswith("/"):
            self._switch_mute(name, closing=closing)
            self._add(" ")
        elif not self._mute:
            self._read_tag(name, attributes, closing=closing)

    def _switch_mute(self, name: str, *, closing: bool) -> None:
        if not closing:
            if len(self._mute) < 100:
                self._mute.append(name)
        elif self._mute[-1:] == [name]:
            self._mute.pop()

    def _read_tag(self, name: str, attributes: str, *, closing: bool) -> None:
        if name in _BLOCKS or name in _CONTAINERS:
            self.end_block()
            if name in _BLOCKS and not closing:
                self._tag, self._identifier = name, _identifier(attributes)
            return
        self._add(" ")
        if self._tag and not self._identifier:
            self._identifier = _identifier(attributes)

    def _add(self, text: str) -> None:
        if text and (text != " " or self._parts[-1:] != [" "]):
            self._parts.append(text)

    def end_block(self) -> None:
        words = " ".join(html.unescape("".join(self._parts)).split())
        if self._tag and words:
            self.blocks.append(Block(self._tag, self._identifier, words))
        self._tag, self._identifier = "", ""
        self._parts.clear()


def _identifier(attributes: str) -> str:
    match = _ID.search(attributes)
    return match[1] if match else ""


def paired(source: list[Block], target: list[Block]) -> Iterator[tuple[str, str]]:
    """Yield matching texts of two pages: by position if all markup is the same, else by id."""
    if [block.tag for block in source] == [block.tag for block in target]:
        yield from ((block.text, translation.text) for block, translation in zip(source, target, strict=True))
        return
    named = {block.identifier: block for block in target if block.identifier}
    for block in source:
        translation = named.get(block.identifier) if block.identifier else None
        if translation is not None and translation.tag == block.tag:
            yield block.text, translation.text


def _strip_comments(page: str) -> str:
    parts: list[str] = []
    position = 0
    while (begin := page.find("<!--", position)) >= 0:
        parts.append(page[position:begin])
        end = page.find("-->", begin)
        if end < 0:
            return "".join(parts)
        position = end + 3
    return "".join(parts) + page[position:]


# Layout of .mo files: GNU gettext manual, "The Format of GNU MO Files".

MAX_MESSAGES = 500_000  # the largest catalogues have some twenty thousand
_MAGICS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_CONTEXT = "\x04"
_PO_LINE = re.compile(r'(?:(msgctxt|msgid|msgid_plural|msgstr)(?:\[(\d{1,2})\])?[ \t]+)?"(.*)"$')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_mo(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of a .mo catalogue, skipping undecodable messages.

    Raises ValueError if it is invalid.
    """
    order = _MAGICS.get(content[:4])
    if order is None or len(content) < 20:
        raise ValueError("no catalogue")
    _, count, originals, translations = struct.unpack_from(f"{order}4I", content, 4)
    if count > MAX_MESSAGES or max(originals, translations) + 8 * count > len(content):
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
        "a".encode(encoding)  # raises for codecs that do not encode text, such as hex
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
    """Yield (original, translation) of a .po catalogue, without fuzzy and obsolete messages."""
    parts: dict[str, list[str]] = {}
    current, fuzzy = "", False
    for line in (*text.split("\n"), ""):
        line = line.strip()
        match = _PO_LINE.match(line)
        if match is not None and not line.startswith("#"):
            if match[1]:
                current = match[1] + (f"[{match[2]}]" if match[2] else "")
                if current in ("msgctxt", "msgid") and any(key.startswith("msgstr") for key in parts):
                    yield from _entry(parts, fuzzy=fuzzy)
                    parts, fuzzy = {}, False
            if current:
                parts.setdefault(current, []).append(_ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), match[3]))
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


_MAX_CHARACTERS = 400
_CONTEXT_BEFORE = re.compile(r"\?\w+:|\w+\^")  # context for translators: ``?plural:Danes`` and ``female^Elvish Archer``
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,300}>")
_WORD_WITH_MARKS = re.compile(r"[\w&~]+")
_BEFORE = r"^[_&~](?=[^\W\d_])"
_WITHIN = r"(?<=[^\W_])[_&~](?=[a-zß-öø-ÿ])"
_MARK_BEFORE, _MARK = re.compile(_BEFORE), re.compile(f"{_BEFORE}|{_WITHIN}")
_BEFORE_PUNCTUATION = re.compile(r" +(?=[,.;:!?)\]»“](?:\s|$|[,.;:!?)]))")
_AFTER_BRACKET = re.compile(r"(?<=[(\[«„]) +")
_PLACEHOLDER = re.compile(
    r"[\x00-\x1f\x7f\ud800-\udfff{}|\\^~<>=\[\]_`*#$@/]"  # code, paths, addresses, halves of characters
    r"|%[\w(]"  # %s, %1, %(name)s
    r"|&\w+;|://|\bwww\.|--|\.\w+\("
    r"|[^\W_]&[a-zß-öø-ÿ]"  # a mnemonic in a word, which cannot be distinguished from a name
)
_WORD = re.compile(r"[^\W\d_]{2,}")


def cleaned_message(source: str, target: str) -> tuple[str, str]:
    """Return a message and its translation without tags, entities, mnemonics and needless space.

    A mark before a word is a mnemonic (``_File``, ``&File``, ``~File``). One within a word is a mnemonic if it is the message's only mark,
    and the translation has one in another word (``E_xit``, ``B_eenden``): names (``apt_preferences``) are the same in both languages.
    """
    texts = [_strip_markup(text) for text in (source, target)]
    marked = [[word for word in _WORD_WITH_MARKS.findall(text) for _ in _MARK.finditer(word)] for text in texts]
    mark = _MARK if all(len(words) == 1 for words in marked) and marked[0] != marked[1] else _MARK_BEFORE
    cleaned_source, cleaned_target = (cleaned_paragraph(_WORD_WITH_MARKS.sub(lambda word: mark.sub("", word[0]), text)) for text in texts)
    return cleaned_source, cleaned_target


def cleaned_paragraph(text: str) -> str:
    """Return a text without the needless space that inline tags leave."""
    return _AFTER_BRACKET.sub("", _BEFORE_PUNCTUATION.sub("", " ".join(text.split())))


def wrong_with(source: str, target: str) -> str | None:
    """Return why two cleaned texts are unsuitable for training, in a word or two, or None."""
    if not source or not target:
        return "empty"
    if source == target:
        return "not translated"
    if max(len(source), len(target)) > _MAX_CHARACTERS:
        return "too long"
    if len(_WORD.findall(source)) < 2 or not _WORD.search(target):
        return "a single word"
    if _PLACEHOLDER.search(source) or _PLACEHOLDER.search(target):
        return "code or placeholders"
    if any(sum(character.isalpha() or character == " " for character in text) / len(text) < 0.8 for text in (source, target)):
        return "few letters"
    if len(target) > 3 * len(source) + 15 or len(source) > 3 * len(target) + 15:
        return "of unlike length"
    return None


def _strip_markup(text: str) -> str:
    context = _CONTEXT_BEFORE.match(text)
    text = text[context.end() :] if context else text
    if "<" in text:
        text = _TAG.sub(" ", text)
    return html.unescape(text) if "&" in text else text
