"""parallel-text:PREFIX:en-de: sentences in PREFIX.en, translations by line in PREFIX.de.

Files may be .gz. A language is a code, optionally with a region or script: de, zho, zh_CN, zh-Hant. It determines BLEU's tokenizer, unless
``bleu=zh`` names one. The test split is PREFIX.test.en and PREFIX.test.de, or with ``held-out=N`` N pairs of the text, drawn once and for
all; then training pairs share no text with it.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError
from ....metrics.base import TOKENIZERS_OF_PACKAGES, check_tokenizer, signature
from ...base import MAX_ATTACHMENT_BYTES, PreparedColumns, Split
from ..arguments import read_arguments, whole_number, write_arguments
from .pairs import PairSplits, chosen, prepared_pairs
from .text_files import MAX_LINE_BYTES, count_lines, read_lines, text_bytes, text_package
from .tokenizer import BYTE_PIECES, MAX_VOCABULARY

_WINDOW, _MANY = 20, 6
"""Lines of a window, and how many must be odd: of true translations one in thirty is, of random pairs every second."""

_ODD_RATIO = 1.8


def aligned_count(source: Path, target: Path) -> int:
    """Return the number of lines of both files.

    Raises UsageError if they are empty or differ in it.
    """
    counts = count_lines(source), count_lines(target)
    if counts[0] != counts[1]:
        suspicious = first_suspicious_line(source, target)
        where = (
            "The lengths of their lines do not show where they diverge."
            if suspicious is None
            else f"The first suspicious line is {suspicious[0]:,}: {suspicious[1]}."
        )
        raise UsageError(
            f"data: {str(source)!r} has {counts[0]:,} lines and {str(target)!r} has {counts[1]:,}, so that they are no translations of "
            f"each other, line by line. {where}"
        )
    if not counts[0]:
        raise UsageError(f"data: {str(source)!r} and {str(target)!r} are empty.")
    return counts[0]


def first_suspicious_line(source: Path, target: Path) -> tuple[int, str] | None:
    """Return the first line, from 1, from which lengths look unlike translations, and why.

    None if no line does.
    """
    odd: deque[tuple[int, str]] = deque()
    for number, lines in enumerate(zip(read_lines(source), read_lines(target), strict=False), 1):
        why = _oddity(*lines)
        if why is not None:
            odd.append((number, why))
        while odd and odd[0][0] <= number - _WINDOW:
            odd.popleft()
        if len(odd) >= _MANY:
            return odd[0]
    return None


def _oddity(source: bytes | None, target: bytes | None) -> str | None:
    """None is a line that is too long."""
    sizes = [None if line is None else len(line.strip()) for line in (source, target)]
    texts = [f"more than {MAX_LINE_BYTES:,} bytes" if size is None else f"{size} bytes" for size in sizes]
    least, most = sorted(MAX_LINE_BYTES + 1 if size is None else size for size in sizes)
    if least == 0:
        return None if most == 0 else f"it is empty in one file and has {texts[sizes[0] == 0]} in the other"
    odd = most > 20 and most > _ODD_RATIO * least
    return f"it has {texts[0]} in one file and {texts[1]} in the other" if odd else None


_NAME = "parallel-text"
_DEFAULTS = {"vocabulary": "8000", "longest": "200", "held-out": "0", "bleu": "auto"}
_FORM = f"{_NAME}:PREFIX:en-de, where PREFIX.en and PREFIX.de are text files, or PREFIX.en.gz and PREFIX.de.gz"
_LANGUAGE = "[a-z]{2,8}(?:_[A-Za-z0-9]{2,8}|-(?:[A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3})){0,3}"  # after a dash, small letters are another language
_LANGUAGES = re.compile(f"({_LANGUAGE})-({_LANGUAGE})")
_HELD_OUT_SEED = 2
_LANGUAGES_OF_TOKENIZERS = {
    "zh": "zh zho chi cmn yue wuu lzh",
    "char": "ja jpn ko kor th tha lo lao km khm my mya bur bo bod tib dz dzo",  # no spaces, or a tokenizer that needs a dictionary
    "13a": "aa ab af ak am an ar as av ay az ba be bg bh bi bm bn br bs ca ce ch co cr cs cv cy da de dv ee el en eo es et eu fa ff"
    " fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ik io is it iu jv ka kg ki kj kk kl kn kr ks ku"
    " kv kw ky la lb lg li ln lt lu lv mg mh mi mk ml mn mr ms mt na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps"
    " pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg ti tk tl tn to tr ts tt tw ty ug"
    " uk ur uz ve vi vo wa wo xh yi yo za zu afr ara aze bel ben bul cat ces cze cym dan deu ger ell gre eng epo est eus fas"
    " per fin fra fre gle glg guj heb hin hrv hun hye ind isl ice ita kan kat kaz lat lav lit mal mar mkd mlt mon msa nep nld"
    " dut nno nob nor pan pol por ron rum rus sin slk slo slv som spa sqi srp swa swe tam tel tgl tur ukr urd uzb vie xho yor"
    " zul",
}
_BLEU_TOKENIZERS = {code: tokenizer for tokenizer, codes in _LANGUAGES_OF_TOKENIZERS.items() for code in codes.split()}
_EARLIER_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char"}  # of version 1, 13a for all others; where they differ, name and store differ
_EMPTY, _NOT_UTF8 = "with an empty line", "with a line that is not UTF-8"
_TOO_LONG = f"with a line of more than {MAX_LINE_BYTES:,} bytes"
_NUL = "with a NUL character"
_NO_LINE = b"\n"  # represents lines after a file's end; no line contains a line feed
_KNOWN = "of which a text is in the test split"


@dataclass(frozen=True)
class _ParallelText:
    """The text in `prefix`.LANGUAGE, skipping pairs of over `longest` pieces.

    `bleu`: tokenizer, None if unknown.
    """

    prefix: Path | None = None
    languages: tuple[str, str] = ("en", "de")
    vocabulary: int = 8000
    longest: int = 200
    held_out: int = 0
    bleu: str | None = "13a"

    description = "your own text, PREFIX.en and PREFIX.de, line by line: parallel-text:PREFIX:en-de?vocabulary=8000,longest=200,held-out=0"
    version = 1

    @property
    def name(self) -> str:
        if self.prefix is None:
            return _NAME
        values = {"vocabulary": str(self.vocabulary), "longest": str(self.longest), "held-out": str(self.held_out), "bleu": f"{self.bleu}"}
        usual = _tokenizer(self.languages[1])
        implied = usual if usual in (None, _EARLIER_TOKENIZERS.get(self.languages[1], "13a")) else "auto"
        arguments = write_arguments(values, {**_DEFAULTS, "bleu": f"{implied}"})
        return f"{_NAME}:{self.prefix}:{'-'.join(self.languages)}{'?' if arguments else ''}{arguments}"

    @property
    def folder(self) -> Path | None:
        return None if self.prefix is None else self.prefix.parent

    def with_arguments(self, text: str) -> _ParallelText:
        place, _, arguments = text.rpartition("?") if "?" in text else (text, "", "")
        path, _, pair = place.rpartition(":")
        languages = _LANGUAGES.fullmatch(pair)
        if path and languages is None and (small := _LANGUAGES.fullmatch(pair.lower())):
            advice = f"write {'-'.join(small.groups())!r}, and name the files so"
            raise UsageError(f"data: got the languages {pair!r}; language codes are written in small letters: {advice}.")
        if path and languages is not None and languages[1] == languages[2]:
            raise UsageError(f"data: got {languages[1]!r} twice in {pair!r}; source and target have to be two languages.")
        if not path or languages is None:
            raise UsageError(f"data: got {_NAME + ':' + text!r}; write {_FORM}.")
        values = read_arguments(_NAME, arguments, _DEFAULTS)
        if values["bleu"] != "auto":
            check_tokenizer(values["bleu"])
        return _ParallelText(
            Path(os.path.expanduser(path)).absolute(),
            (languages[1], languages[2]),
            whole_number(_NAME, "vocabulary", values["vocabulary"], BYTE_PIECES + 64, MAX_VOCABULARY),
            whole_number(_NAME, "longest", values["longest"], 2, 4096),
            whole_number(_NAME, "held-out", values["held-out"], 0, 1_000_000),
            _tokenizer(languages[2]) if values["bleu"] == "auto" else values["bleu"],
        )

    def with_vocabulary(self, size: int) -> _ParallelText:
        whole_number(_NAME, "vocabulary", str(size), BYTE_PIECES + 64, MAX_VOCABULARY)
        return replace(self, vocabulary=size)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        return [path for paths in self._files().values() for path in paths]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedColumns:
        """Count the lines and make the vocabulary, keeping finished parts in `work`."""
        if self.prefix is None:
            raise UsageError(f"data: {_NAME!r} needs the names of two files; write {_FORM}.")
        text_package("sentencepiece")  # before reading a large text
        if self.bleu in TOKENIZERS_OF_PACKAGES:
            signature(self.bleu)
        files = self._files()
        total = aligned_count(*files["train"])
        if self.held_out >= total:
            raise UsageError(f"data: held-out={self.held_out} of {_NAME!r} leaves none of {total:,} pairs to train on; hold out fewer.")
        if self.held_out:
            splits = _hold_out(files["train"], total, chosen(total, self.held_out, _HELD_OUT_SEED))
        else:
            counts: dict[Split, int] = {"train": total, "test": aligned_count(*files["test"])}
            splits = PairSplits({split: partial(_read, paths, counts[split]) for split, paths in files.items()}, counts)
            for _ in _limit_size(splits.readers["test"](), "its test files"):
                pass
        prepared = prepared_pairs(
            splits,
            vocabulary_size=self.vocabulary,
            bytes_too=True,
            longest=self.longest,
            languages=self.languages,
            bleu_tokenizer=self.bleu or "13a",
            work=work,
        )
        return replace(prepared, notes=self._notes)

    def _notes(self) -> Sequence[str]:
        if self.bleu is not None:
            return ()
        return (f"the language {self.languages[1]!r} is not known, so BLEU takes the tokenizer 13a; choose one with bleu=13a, char or zh",)

    def _files(self) -> dict[Split, tuple[Path, Path]]:
        """Return source and target of each split with files.

        Raises UsageError for missing or duplicate ones.
        """
        train = _pair(f"{self.prefix}", self.languages)
        test = _pair(f"{self.prefix}.test", self.languages)
        if train is None:
            raise UsageError(f"data: there are no files {_file_names(f'{self.prefix}', self.languages)}; write {_FORM}.")
        if self.held_out:
            if test is not None:
                raise UsageError(f"data: {_NAME!r} has {str(test[0])!r} for a test split, and held-out={self.held_out} too; leave one out.")
            return {"train": train}
        if test is None:
            names = _file_names(f"{self.prefix}.test", self.languages)
            raise UsageError(f"data: {_NAME!r} has no test split; add {names}, or hold pairs out with ?held-out=2000.")
        return {"train": train, "test": test}


def _tokenizer(language: str) -> str | None:
    return _BLEU_TOKENIZERS.get(re.split("[_-]", language)[0])


def _file_names(stem: str, languages: tuple[str, str]) -> str:
    return " and ".join(f"{stem}.{language}" for language in languages)


def _pair(stem: str, languages: tuple[str, str]) -> tuple[Path, Path] | None:
    """Return the files of both languages, if any. Raises UsageError for one alone or twice."""
    files = [[path for path in map(Path, (f"{stem}.{code}", f"{stem}.{code}.gz")) if os.path.exists(path)] for code in languages]
    if not any(files):
        return None
    for language, paths in zip(languages, files, strict=True):
        if len(paths) != 1:
            problem = f"there is no {stem}.{language}" if not paths else f"there are both {paths[0]} and {paths[1]}"
            raise UsageError(f"data: {problem}; {_NAME} reads one file a language.")
    return files[0][0], files[1][0]


def _read(files: tuple[Path, Path], total: int) -> Iterator[tuple[str, str] | str]:
    """Yield the `total` pairs of two files; see `PairReader`.

    Raises UsageError if their number has changed.
    """
    count = 0
    for source, target in zip_longest(*map(read_lines, files), fillvalue=_NO_LINE):
        count += 1
        if count > total or _NO_LINE in (source, target):
            count = -1
            break
        if source is None or target is None:
            yield _TOO_LONG
            continue
        if b"\0" in source or b"\0" in target:
            yield _NUL
            continue
        try:
            pair = source.decode(), target.decode()
        except UnicodeDecodeError:
            yield _NOT_UTF8
            continue
        yield pair if pair[0].strip() and pair[1].strip() else _EMPTY
    if count != total:
        raise UsageError(f"data: {str(files[0])!r} or {str(files[1])!r} has changed while it was read; prepare it when it is at rest.")


def _limit_size(entries: Iterable[tuple[str, str] | str], what: str) -> Iterator[tuple[str, str] | str]:
    """Yield test entries.

    Raises UsageError, naming their origin `what`, for more text than a store keeps.
    """
    sizes = [0, 0]
    for entry in entries:
        if not isinstance(entry, str):
            sizes = [size + text_bytes(text) + 1 for size, text in zip(sizes, entry, strict=True)]
        if max(sizes) > MAX_ATTACHMENT_BYTES:
            raise UsageError(
                f"data: the test split of {_NAME!r} ({what}) has more than {MAX_ATTACHMENT_BYTES >> 20} MiB of text in a language, and no"
                " more are evaluated. Take fewer pairs."
            )
        yield entry


def _encode_entry(entry: tuple[str, str] | str) -> tuple[bytes, bytes] | str:
    """UTF-8 takes a quarter of the memory for lines with characters such as emojis."""
    return entry if isinstance(entry, str) else (entry[0].encode(), entry[1].encode())


def _hold_out(files: tuple[Path, Path], total: int, places: NDArray[np.int64]) -> PairSplits:
    """Use the pairs at `places`, from 0, ascending, as test split.

    Raises UsageError for a large one.
    """
    apart = np.zeros(total, np.bool_)
    apart[places] = True
    entries = (entry for number, entry in enumerate(_read(files, total)) if apart[number])
    packed = [_encode_entry(entry) for entry in _limit_size(entries, f"held-out={len(places)}")]
    known = tuple({entry[side] for entry in packed if not isinstance(entry, str)} for side in (0, 1))

    def test() -> Iterator[tuple[str, str] | str]:
        for entry in packed:
            yield entry if isinstance(entry, str) else (entry[0].decode(), entry[1].decode())

    def train() -> Iterator[tuple[str, str] | str]:
        for number, entry in enumerate(_read(files, total)):
            if apart[number]:
                yield ""
            elif isinstance(entry, str) or (entry[0].encode() not in known[0] and entry[1].encode() not in known[1]):
                yield entry
            else:
                yield _KNOWN

    return PairSplits({"train": train, "test": test}, {"train": total, "test": len(packed)}, {"test": places + 1})


DATASET = _ParallelText()
