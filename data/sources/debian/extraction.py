"""All pairs of texts in a set of packages: of catalogues, of which one language is the original, and of pages that there are in both."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ....core.untrusted.console import note
from .archive import LARGEST_FILE_BYTES, Package, described, read_files
from .catalogues import read_mo, read_po
from .cleaning import cleaned_message, cleaned_paragraph, wrong_with
from .documents import blocks, paired

__all__ = ["Extraction"]

_CATALOGUE = re.compile(r"(?:.*/)?de(?:_DE)?(?:\.UTF-8)?/LC_MESSAGES/[^/]+\.[mp]o|(?:.*/)?(?:[^/]*[-_.])?de(?:_DE)?\.[mp]o")
_PAGE = re.compile(r".+\.(?:html|page|docbook|xml)(?:\.gz)?")
_LANGUAGE = re.compile(r"(?<=/)(C|en|en-US|en_US|de|de-DE|de_DE)(?=/)|(?<=[._-])(en|de)(?=\.(?:html|xml)(?:\.gz)?$)")
_OF_PACKAGE = re.compile(r"-(en-us|en|de)(?=/|$)")


class Extraction:
    """Reads packages one after another. `packages` are those that were read, `left_out` counts texts by why they are no pairs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = sorted(files, key=lambda path: path.name)
        self.packages: list[Package] = []
        self.left_out: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs, English and German, each once, in an order that depends on the packages alone."""
        kept: dict[tuple[str, str], None] = {}
        for package, pair in self._cleaned():
            wrong = wrong_with(*pair)
            if wrong is None and pair in kept:
                wrong = "there already"
            if wrong is not None:
                self.left_out[wrong] += 1
            else:
                kept[pair] = None
                self.found[package] += 1
        return list(kept)

    def _cleaned(self) -> Iterator[tuple[str, tuple[str, str]]]:
        pages: dict[str, dict[str, tuple[str, bytes]]] = {}
        for path in self.files:
            package = described(path)
            self.packages.append(package)
            licences = ", ".join(package.licences) or f"see usr/share/doc/{package.name}/copyright in it"
            note(f"data: reading {package.name} {package.version} ({licences})")
            own: dict[str, bytes] = {}
            for name, content in read_files(path, lambda name: bool(_CATALOGUE.fullmatch(name) or _PAGE.fullmatch(name))):
                own[name] = content
            for name in sorted(own):
                if _CATALOGUE.fullmatch(name):
                    yield from ((package.name, cleaned_message(*pair)) for pair in self._messages(name, own[name]))
                else:
                    key, language = _place(package.name, name)
                    pages.setdefault(key, {}).setdefault(language, (package.name, own[name]))
        for key in sorted(pages):
            if len(pages[key]) == 2:
                (package_name, source), (_, target) = pages[key]["en"], pages[key]["de"]
                texts = [_page_text(one) for one in (source, target)]
                if texts[0] is not None and texts[1] is not None:
                    for one, other in paired(blocks(texts[0]), blocks(texts[1])):
                        yield package_name, (cleaned_paragraph(one), cleaned_paragraph(other))

    def _messages(self, name: str, content: bytes) -> Iterator[tuple[str, str]]:
        try:
            if name.endswith(".mo"):
                yield from read_mo(content)
            else:
                yield from read_po(content.decode())
        except ValueError:
            self.left_out["in a catalogue that cannot be read"] += 1


def _place(package: str, name: str) -> tuple[str, str]:
    """Return what a page is called in both languages, and its own language; pages that name none are English."""
    found = _LANGUAGE.search(f"/{name}")
    language = "de" if (found and (found[1] or found[2]).startswith("de")) or package.endswith("-de") else "en"
    plain = _LANGUAGE.sub("*", f"/{name}").removesuffix(".gz").replace("/*/", "/").replace(".*.", ".")
    return f"{_OF_PACKAGE.sub('', package)}:{_OF_PACKAGE.sub('', plain)}", language


def _page_text(content: bytes) -> str | None:
    if content[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            content = unpacker.decompress(content, LARGEST_FILE_BYTES)
        except zlib.error:
            return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
