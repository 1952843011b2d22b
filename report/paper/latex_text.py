"""Any text as LaTeX that pdflatex typesets as it is, with the default fonts and no package."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from ...core.untrusted.console import one_line

__all__ = ["comment", "label", "latex_text"]

MOST_CHARACTERS = 400
"""Of one text; more would fill pages. Run directories have 255 bytes at most."""

_LONGEST_WORD = 16
"""Where lines may be broken, they may be within a word after so many characters."""

_LONGEST_LABEL = 60

_SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\ttfamily\char34}",  # \textquotedbl is not in the default encoding
    "`": r"{\ttfamily\char96}",
    "[": "{[}",  # behind the end of a row it would begin an option of it, and so would a star
    "]": "{]}",
    "*": "{*}",
    "†": r"$\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "→": r"$\rightarrow$",
    "·": r"$\cdot$",
    "°": r"$^{\circ}$",
    "µ": r"$\mu$",
    "…": r"\ldots{}",
    "–": "--",
    "—": "---",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{NO-BREAK SPACE}": r"\nobreakspace{}",
    "§": r"\S{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
}

_ACCENTS: Mapping[str, str] = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING MACRON}": "=",
    "\N{COMBINING BREVE}": "u",
    "\N{COMBINING DOT ABOVE}": ".",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING RING ABOVE}": "r",
    "\N{COMBINING DOUBLE ACUTE ACCENT}": "H",
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING CEDILLA}": "c",
    "\N{COMBINING DOT BELOW}": "d",
}

_GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"}
    | {"mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"}
)

_LIGATES = frozenset("-',")
"""Two of them in a row would become another sign."""


def latex_text(text: str, breakable: bool = False, most: int = MOST_CHARACTERS) -> str:
    """Return a text of others on one line as LaTeX; where it is `breakable`, lines may end within its words.

    It is cut after `most` characters.

    Letters with accents and Greek ones become LaTeX's commands. What the default fonts do not have stands there by its number, as
    ``U+4E2D``, and what turns the direction of writing or ends a line as on a terminal.
    """
    line = one_line(text)
    parts, before, word = [], "", 0
    for character in line[:most]:
        if character in _LIGATES and character == before:
            parts.append("{}")
        parts.append(_one(character))
        word = 0 if character == " " else word + 1
        if breakable and word and (character in "-_/.,:;=+" or word % _LONGEST_WORD == 0):
            parts.append(r"\allowbreak{}")
        before = character
    return "".join(parts) + (r"\ldots{}" if len(line) > most else "")


def _one(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    if " " <= character <= "~":
        return character
    parts = unicodedata.normalize("NFD", character)
    letter, accents = parts[0], parts[1:]
    if accents and letter.isascii() and letter.isalpha() and all(accent in _ACCENTS for accent in accents):
        found = {"i": r"\i{}", "j": r"\j{}"}.get(letter, letter) if accents[0] not in _BELOW else letter
        for accent in accents:
            found = f"\\{_ACCENTS[accent]}{{{found}}}"
        return found
    return _greek(character) or f"U+{ord(character):04X}"


_BELOW = frozenset({"\N{COMBINING CEDILLA}", "\N{COMBINING DOT BELOW}"})


def _greek(character: str) -> str | None:
    """Return a Greek letter in mathematics; None of other characters, and of capitals that look like Latin ones, which LaTeX lacks."""
    match = re.fullmatch("GREEK SMALL LETTER ([A-Z]+)", unicodedata.name(character, "").replace("LAMDA", "LAMBDA"))
    return f"$\\{match[1].lower()}$" if match is not None and match[1].lower() in _GREEK else None


def comment(text: str) -> str:
    """Return a text of others as a comment of one line."""
    return f"% {one_line(text)}"


def label(text: str) -> str:
    """Return what a table is referred to by, from a name of others: small letters, digits and hyphens; ``runs`` where none are left."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:_LONGEST_LABEL].strip("-") or "runs"
