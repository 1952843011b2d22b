"""From a message or paragraph to a sentence: what belongs to a program's surface goes, and what then is no plain text is refused."""

from __future__ import annotations

import html
import re

__all__ = ["cleaned_message", "cleaned_paragraph", "wrong_with"]

_LONGEST_CHARACTERS = 400
_CONTEXT = re.compile(r"\?\w+:|\w+\^")
"""Before the text, for translators: ``?plural:Danes`` and ``female^Elvish Archer``."""

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
    r"|[^\W_]&[a-zß-öø-ÿ]"  # a mnemonic in a word, which nobody can tell from a name
)
_WORD = re.compile(r"[^\W\d_]{2,}")


def cleaned_message(source: str, target: str) -> tuple[str, str]:
    """Return a message and its translation without tags, entities, mnemonics and needless space; a tag leaves a space.

    A mark before a word is a mnemonic (``_File``, ``&File``, ``~File``). One within a word is where it is the only mark of the message, and
    the translation has one too, in another word (``E_xit``, ``B_eenden``): names look the same (``apt_preferences``), in both languages.
    """
    texts = [_without_markup(text) for text in (source, target)]
    marked = [[word for word in _WORD_WITH_MARKS.findall(text) for _ in _MARK.finditer(word)] for text in texts]
    mark = _MARK if all(len(words) == 1 for words in marked) and marked[0] != marked[1] else _MARK_BEFORE
    one, other = (cleaned_paragraph(_WORD_WITH_MARKS.sub(lambda word: mark.sub("", word[0]), text)) for text in texts)
    return one, other


def cleaned_paragraph(text: str) -> str:
    """Return a text without needless space, such as inline tags leave behind."""
    return _AFTER_BRACKET.sub("", _BEFORE_PUNCTUATION.sub("", " ".join(text.split())))


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


def _without_markup(text: str) -> str:
    context = _CONTEXT.match(text)
    text = text[context.end() :] if context else text
    if "<" in text:
        text = _TAG.sub(" ", text)
    return html.unescape(text) if "&" in text else text


def _letters(text: str) -> float:
    return sum(one.isalpha() or one == " " for one in text) / len(text)
