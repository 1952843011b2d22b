"""From a message or paragraph to a sentence: what belongs to a program's surface goes, and what then is no plain text is refused."""

from __future__ import annotations

import html
import re

__all__ = ["cleaned", "wrong_with"]

_LONGEST_CHARACTERS = 400
_CONTEXT = re.compile(r"\?\w+:|\w+\^")
"""Before the text, for translators: ``?plural:Danes`` and ``female^Elvish Archer``."""

_TAG = re.compile(r"</?[A-Za-z][^<>]{0,300}>")
_MNEMONIC = re.compile(r"(?<![\w&~])[_&~](?=[^\W\d_])|(?<=[^\W_])[_&~](?=[^\W\d_])")
_BEFORE_PUNCTUATION = re.compile(r" +(?=[,.;:!?)\]»“](?:\s|$|[,.;:!?)]))")
_AFTER_BRACKET = re.compile(r"(?<=[(\[«„]) +")
_PLACEHOLDER = re.compile(
    r"[\x00-\x1f\x7f{}|\\^~<>=\[\]_`*#$@/]"  # code, paths, addresses
    r"|%[\w(]"  # %s, %1, %(name)s
    r"|&\w+;|://|\bwww\.|--|\.\w+\("
)
_WORD = re.compile(r"[^\W\d_]{2,}")


def cleaned(text: str) -> str:
    """Return a text without tags, entities, mnemonics (``_File``, ``&File``, ``~File``) and needless space; a tag leaves a space."""
    context = _CONTEXT.match(text)
    text = text[context.end() :] if context else text
    if "<" in text:
        text = _TAG.sub(" ", text)
    if "&" in text:
        text = html.unescape(text)
    text = " ".join(_MNEMONIC.sub("", text).split())
    return _AFTER_BRACKET.sub("", _BEFORE_PUNCTUATION.sub("", text))


def wrong_with(source: str, target: str) -> str | None:
    """Return why two cleaned texts are no pair to learn from, in a word or two; None where they are."""
    if not source or not target:
        return "empty"
    if source == target:
        return "not translated"
    if max(len(source), len(target)) > _LONGEST_CHARACTERS:
        return "too long"
    if len(_WORD.findall(source)) < 2 or not _WORD.search(target):
        return "a single word"
    if _PLACEHOLDER.search(source) or _PLACEHOLDER.search(target):
        return "code or placeholders"
    if min(map(_letters, (source, target))) < 0.8:
        return "few letters"
    if len(target) > 3 * len(source) + 15 or len(source) > 3 * len(target) + 15:
        return "of unlike length"
    return None


def _letters(text: str) -> float:
    return sum(one.isalpha() or one == " " for one in text) / len(text)
