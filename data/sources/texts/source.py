"""jsonl:PATH and hf-dataset:FOLDER: texts with classes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from ....core.errors import UsageError
from ...base import PreparedBlocks, PreparedColumns, Split, TextFeatures
from ...columns import Column, ColumnSpec
from ..arguments import absolute_path, read_arguments, read_share, whole_number, write_arguments
from ..target_classes import classes_of, wrong
from .images import MAX_SIZE, prepared_images
from .rows import ArrowTexts, JsonLines, Texts
from .tokenizers import TOKENIZERS, Tokenizer

TOKENS, LABEL = "tokens", "label"  # columns of the dataset
MAX_TOKENS = 65_535  # they are stored as uint16
_PART = 4096  # rows that are encoded together
_SPLITS: tuple[Split, ...] = ("train", "test")
_DEFAULTS = {"text": "text", "label": "label", "tokenizer": "words", "vocabulary": "8000", "longest": "256", "test": "", "share": "0.2"}


@dataclass(frozen=True)
class TextSource:
    """Texts of a format.

    `open` returns the texts of a path by split, of which that of the test may be missing.
    """

    format: str
    description: str
    open: Callable[[Path, Mapping[str, str]], Mapping[Split, Texts]]
    files_of: Callable[[Mapping[Split, Texts]], Sequence[Path]]
    defaults: Mapping[str, str] = field(default_factory=lambda: _DEFAULTS)
    path: Path | None = None
    values: dict[str, str] = field(default_factory=dict)

    version = 1

    @property
    def name(self) -> str:
        """FORMAT:PATH with the arguments that are no defaults."""
        if self.path is None:
            return self.format
        arguments = write_arguments(self.values, self.defaults)
        return f"{self.format}:{self.path}{'?' if arguments else ''}{arguments}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds all files."""
        test = self.values.get("test")
        return Path(os.path.commonpath([self.path.parent, *([Path(test).parent] if test else [])])) if self.path else None

    def with_arguments(self, text: str) -> TextSource:
        """Return the source of PATH?ARGUMENTS. Raises UsageError."""
        path, _, arguments = text.partition("?")
        values = read_arguments(self.format, arguments, self.defaults)
        if not path:
            raise self._unnamed()
        if values["tokenizer"] not in TOKENIZERS:
            raise UsageError.of(f"data: tokenizer of {self.format!r}", values["tokenizer"], ", ".join(TOKENIZERS), TOKENIZERS)
        whole_number(self.format, "vocabulary", values["vocabulary"], 32, MAX_TOKENS)
        whole_number(self.format, "longest", values["longest"], 2, 1 << 16)
        read_share(self.format, values["share"])
        if values.get("size", "auto") != "auto":
            whole_number(self.format, "size", values["size"], 1, MAX_SIZE)
        if values["test"]:
            values["test"] = str(absolute_path(values["test"]))
        return replace(self, path=absolute_path(path), values=values)

    def _unnamed(self) -> UsageError:
        return UsageError(f"data: {self.format!r} needs a path; write {self.format}:PATH.")

    def _opened(self) -> Mapping[Split, Texts]:
        if self.path is None:
            raise self._unnamed()
        for path in (self.path, *([Path(self.values["test"])] if self.values["test"] else [])):
            if not path.exists():
                raise UsageError(f"data: there is no {str(path)!r}.")
        return self.open(self.path, self.values)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the files. Raises UsageError if one is missing."""
        return self.files_of(self._opened())

    def load(self, data_dir: Path | None) -> PreparedColumns | PreparedBlocks:
        """Read the texts for their labels, for the vocabulary, and for the tokens of each split."""
        splits, values = self._opened(), self.values
        train, share = splits["train"], float(values["share"])
        if isinstance(train, ArrowTexts) and (image := train.image) is not None:
            images = _Split({split: partial(part.images, image) for split, part in splits.items() if isinstance(part, ArrowTexts)}, share)
            size = None if values["size"] == "auto" else int(values["size"])
            return prepared_images(train.path, images.rows, size, _class_names(train, values["label"], images, "image"))
        texts = _Split({split: part.rows for split, part in splits.items()}, share)
        names = _class_names(train, values["label"], texts, "text")
        numbers = {name: number for number, name in enumerate(names)}
        tokenizer = TOKENIZERS[values["tokenizer"]]((text for text, _ in texts.rows("train")), int(values["vocabulary"]))
        encoder = _Encoder(texts, tokenizer, int(values["longest"]), numbers)
        return PreparedColumns(
            (ColumnSpec(TOKENS, "uint16", (None,)), ColumnSpec(LABEL, "int64")),
            TextFeatures({TOKENS: tokenizer.size}, target=LABEL, classes=len(names), class_names=tuple(names)),
            {split: partial(encoder.blocks, split) for split in _SPLITS},
            attachments=lambda: tokenizer.files,
            notes=encoder.notes,
        )


Content = TypeVar("Content", str, bytes)


class _Split(Generic[Content]):
    """The rows of each split: texts, or the files of images, with labels.

    Without some for the test a hash of each decides, so that equal ones are in one split.
    """

    def __init__(self, read: Mapping[Split, Callable[[], Iterator[tuple[Content, str]]]], share: float) -> None:
        self._read: Mapping[Split, Callable[[], Iterator[tuple[Content, str]]]] = read
        self._share = share

    def rows(self, split: Split) -> Iterator[tuple[Content, str]]:
        if "test" in self._read:
            yield from self._read[split]()
            return
        for content, label in self._read["train"]():
            data = content.encode(errors="replace") if isinstance(content, str) else content
            if (xxhash.xxh64_intdigest(data) < self._share * 2.0**64) == (split == "test"):
                yield content, label


def _class_names(train: Texts, target: str, rows: _Split[Any], what: str) -> list[str]:
    """Return the classes: those that a dataset declares, else those of the rows, in order."""
    path = train.path
    seen: dict[Split, set[str]] = {split: {label for _, label in rows.rows(split)} for split in _SPLITS}
    for split, labels in seen.items():
        if not labels:
            raise wrong(path, f"no {what} is for the {split} split.")
    if isinstance(train, ArrowTexts) and len(declared := train.class_names()) > 1:
        return declared
    whole = all(label.isascii() and label.lstrip("-").isdecimal() for labels in seen.values() for label in labels)
    order, names = classes_of(path, target, seen, str, sorted_by_text=True)
    return sorted(order.tolist(), key=int) if whole else names


class _Encoder:
    """Encodes splits, and counts what is cut."""

    def __init__(self, texts: _Split[str], tokenizer: Tokenizer, longest: int, numbers: Mapping[str, int]) -> None:
        self._texts, self._tokenizer, self._longest, self._numbers = texts, tokenizer, longest, numbers
        self._cut: Counter[str] = Counter()

    def blocks(self, split: Split) -> Iterator[Mapping[str, Column]]:
        rows = self._texts.rows(split)
        while part := list(itertools.islice(rows, _PART)):
            encoded = self._tokenizer.encode([text for text, _ in part])
            self._cut[split] += sum(len(tokens) > self._longest for tokens in encoded)
            kept = [tokens if len(tokens) <= self._longest else [*tokens[: self._longest - 1], tokens[-1]] for tokens in encoded]
            offsets = np.append(0, np.cumsum([len(tokens) for tokens in kept])).astype(np.int64)
            tokens = np.fromiter(itertools.chain.from_iterable(kept), np.uint16, int(offsets[-1]))
            yield {TOKENS: Column(tokens, offsets), LABEL: Column(np.array([self._numbers[label] for _, label in part], np.int64))}

    def notes(self) -> list[str]:
        return [f"{split}: {count:,} texts were cut to {self._longest:,} tokens (longest)" for split, count in self._cut.items() if count]


def _json_lines(path: Path, values: Mapping[str, str]) -> Mapping[Split, Texts]:
    texts: dict[Split, Texts] = {"train": JsonLines(path, values["text"], values["label"])}
    return {**texts, "test": JsonLines(Path(values["test"]), values["text"], values["label"])} if values["test"] else texts


def _saved_dataset(path: Path, values: Mapping[str, str]) -> Mapping[Split, Texts]:
    """Return the splits train and test, or validation, of a DatasetDict, or a Dataset alone."""
    is_split = (path / "dataset_dict.json").is_file()
    folders: dict[Split, Path] = {split: path / split for split in _SPLITS} if is_split else {"train": path}
    if is_split and not folders["test"].is_dir() and not values["test"]:
        folders["test"] = path / "validation"
    if values["test"]:
        folders["test"] = Path(values["test"])
    if not folders["train"].is_dir():
        raise wrong(path, "there is no split 'train'." if path.is_dir() else "this is no folder.")
    return {split: ArrowTexts(folder, values["text"], values["label"]) for split, folder in folders.items() if folder.is_dir()}


JSON_LINES = TextSource(
    "jsonl",
    "texts with classes, a JSON object a line: jsonl:PATH?text=text,label=label,tokenizer=words",
    _json_lines,
    lambda texts: [part.path for part in texts.values()],
)
SAVED_DATASET = TextSource(
    "hf-dataset",
    "texts or images with classes, saved by Hugging Face's datasets: hf-dataset:FOLDER?text=text,label=label",
    _saved_dataset,
    lambda texts: [file for part in texts.values() if isinstance(part, ArrowTexts) for file in part.files()],
    {**_DEFAULTS, "size": "auto"},
)
