"""Pages of HTML, DocBook and Mallard that exist in both languages with the same markup: their paragraphs, side by side."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Block", "blocks", "paired"]

_BLOCKS = frozenset(
    [
        "p",
        "para",
        "simpara",
        "title",
        "subtitle",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "li",
        "td",
        "th",
        "dt",
        "dd",
        "term",
        "desc",
        "caption",
        "primary",
        "secondary",
        "bridgehead",
        "entry",
    ]
)
_CONTAINERS = frozenset(
    [
        "body",
        "div",
        "section",
        "ul",
        "ol",
        "dl",
        "table",
        "tr",
        "tbody",
        "thead",
        "item",
        "list",
        "note",
        "tip",
        "steps",
        "media",
        "page",
        "article",
        "chapter",
        "sect1",
        "sect2",
        "listitem",
        "itemizedlist",
        "orderedlist",
        "variablelist",
        "varlistentry",
        "blockquote",
        "nav",
        "header",
        "footer",
        "br",
        "hr",
        "img",
        "figure",
    ]
)
_MUTE = frozenset(["script", "style", "pre", "screen", "programlisting", "head", "code-block", "synopsis", "screenshot"])
_MARKUP = re.compile(r"<(/?)([A-Za-z][\w:.-]{0,40})([^<>]{0,4000})>")
_ID = re.compile(r"""\bid\s*=\s*["']([^"'<>]{1,200})["']""")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, heading or cell: its element's name, its identifier where it has one, and its text, spaces where inline tags were."""

    tag: str
    identifier: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that have text, in order; code and scripts are none."""
    found: list[Block] = []
    tag, identifier = "", ""
    parts: list[str] = []  # of the text since the last block; joined once, as a page may have millions
    mute: list[str] = []
    position = 0

    def flush() -> None:
        nonlocal tag, identifier
        words = " ".join(html.unescape("".join(parts)).split())
        if tag and words:
            found.append(Block(tag, identifier, words))
        tag, identifier = "", ""
        parts.clear()

    def add(text: str) -> None:
        if text and (text != " " or not parts or parts[-1] != " "):
            parts.append(text)

    page = _without_comments(page)
    for mark in _MARKUP.finditer(page):
        if not mute:
            add(page[position : mark.start()])
        position = mark.end()
        closing, name = mark[1] == "/", mark[2].lower()
        if name in _MUTE and not mark[3].endswith("/"):
            if closing:
                if mute and mute[-1] == name:
                    mute.pop()
            elif len(mute) < 100:
                mute.append(name)
            add(" ")
        elif mute:
            continue
        elif name in _BLOCKS or name in _CONTAINERS:
            flush()
            if name in _BLOCKS and not closing:
                own = _ID.search(mark[3])
                tag, identifier = name, own[1] if own else ""
        else:
            add(" ")
            if not identifier and tag and (own := _ID.search(mark[3])):
                identifier = own[1]
    flush()
    return found


def paired(source: list[Block], target: list[Block]) -> Iterator[tuple[str, str]]:
    """Yield the texts of two pages that belong together: those of one identifier, and, where all markup is the same, those in one place."""
    if [block.tag for block in source] == [block.tag for block in target]:
        yield from ((one.text, other.text) for one, other in zip(source, target, strict=True))
        return
    named = {block.identifier: block for block in target if block.identifier}
    for one in source:
        other = named.get(one.identifier) if one.identifier else None
        if other is not None and other.tag == one.tag:
            yield one.text, other.text


def _without_comments(page: str) -> str:
    parts: list[str] = []
    position = 0
    while (begin := page.find("<!--", position)) >= 0:
        parts.append(page[position:begin])
        end = page.find("-->", begin)
        if end < 0:
            return "".join(parts)
        position = end + 3
    return "".join(parts) + page[position:]
