"""Texts and their labels, row by row."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ....core.bounded_json import UnreadableError, parse_json, read_json
from ....core.console import one_line
from ....core.errors import UsageError
from ..target_classes import wrong
from ..translation.text_files import MAX_LINE_BYTES, read_lines

Row = tuple[str, str]  # text and label


class Texts(Protocol):
    """Rows of texts with labels."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    def rows(self) -> Iterator[Row]:
        """Yield all rows, the same each time. Raises UsageError for one that is none."""


@dataclass(frozen=True)
class JsonLines:
    """A file with a JSON object on each line."""

    path: Path
    text: str
    label: str

    def rows(self) -> Iterator[Row]:
        """Yield text and label of each line but empty ones."""
        for number, line in enumerate(read_lines(self.path), 1):
            place = f"line {number:,}"
            if line is None:
                raise wrong(self.path, f"the line has more than {MAX_LINE_BYTES:,} bytes. Shorten its text.", place)
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except UnreadableError as error:
                raise wrong(self.path, f"this is no JSON: {error}.", place) from error
            if not isinstance(row, dict):
                raise wrong(self.path, "this is no JSON object.", place)
            yield checked_row(self.path, place, row, self.text, self.label)


@dataclass(frozen=True)
class ArrowTexts:
    """A split that ``save_to_disk`` of Hugging Face's datasets wrote.

    It is a folder of Arrow files, and their description.
    """

    path: Path
    text: str
    label: str

    @property
    def image(self) -> str | None:
        """The column of images, if it has one and no texts."""
        kinds = {name: feature.get("_type") for name, feature in self._features().items() if isinstance(feature, dict)}
        images = [name for name, kind in kinds.items() if kind == "Image"]
        return (self.text if self.text in images else images[0]) if images and kinds.get(self.text) in ("Image", None) else None

    def images(self, column: str) -> Iterator[tuple[bytes, str]]:
        """Yield the file of each image, and its label."""
        for number, row in self._rows(column):
            content = row[column].get("bytes") if isinstance(row[column], dict) else None
            if not isinstance(content, bytes):
                raise wrong(self.path, f"{column!r} holds no image; save the dataset with its files embedded.", f"row {number:,}")
            yield content, _label(self.path, f"row {number:,}", row, self.label)

    def files(self) -> Sequence[Path]:
        """Return the Arrow files, as ``state.json`` lists them. Raises UsageError."""
        state = self._document("state.json")
        listed = state.get("_data_files")
        names = [str(entry.get("filename")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if not names or not all(Path(name).name == name for name in names):
            raise wrong(self.path, "its state.json lists no files of data.")
        files = [self.path / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise wrong(self.path, f"{missing[0]!r} is no file.")
        return files

    def _document(self, name: str) -> dict[str, Any]:
        try:
            document = read_json(self.path / name)
        except (OSError, UnreadableError) as error:
            raise wrong(self.path, f"{name} cannot be read: {error}.") from error
        if not isinstance(document, dict):
            raise wrong(self.path, f"{name} is no JSON object.")
        return document

    def rows(self) -> Iterator[Row]:
        """Yield text and label of each row, by the names of the classes."""
        for number, row in self._rows(self.text):
            yield checked_row(self.path, f"row {number:,}", row, self.text, self.label)

    def _rows(self, content_column: str) -> Iterator[tuple[int, dict[str, Any]]]:
        arrow: Any = importlib.import_module("pyarrow")
        names = self.class_names()
        number = 0
        for file in self.files():
            try:
                with arrow.memory_map(str(file)) as content:
                    if any(map(_is_compressed, iter(arrow.ipc.MessageReader.open_stream(content)))):
                        raise wrong(file, "its columns are compressed, and would take any memory; save it with save_to_disk.")
                    content.seek(0)
                    for batch in arrow.ipc.open_stream(content):
                        batch.validate(full=True)  # lengths and places of texts, which are memory otherwise
                        for row in self._columns(file, batch, content_column):
                            number += 1
                            label = row.get(self.label)
                            if names and isinstance(label, int):
                                if not 0 <= label < len(names):
                                    raise wrong(self.path, f"{self.label!r} is {label}, which is none of its classes.", f"row {number:,}")
                                row[self.label] = names[label]
                            yield number, row
            except (arrow.ArrowException, OSError, struct.error) as error:
                raise wrong(file, f"this is no sound Arrow file ({one_line(str(error))[:200]}).") from error

    def _columns(self, file: Path, batch: Any, content_column: str) -> Iterator[dict[str, Any]]:
        held = batch.schema.names
        for name in (content_column, self.label):
            if name not in held:
                raise UsageError.of(f"data: column of {file.parent.name!r}", name, ", ".join(held), held)
        for content, label in zip(batch.column(content_column).to_pylist(), batch.column(self.label).to_pylist(), strict=True):
            yield {content_column: content, self.label: label}

    def _features(self) -> dict[str, Any]:
        features = self._document("dataset_info.json").get("features")
        return features if isinstance(features, dict) else {}

    def class_names(self) -> list[str]:
        """Return the declared classes of the label, in their order, if it has such."""
        feature = self._features().get(self.label)
        names = feature.get("names") if isinstance(feature, dict) else None
        return [str(name) for name in names] if isinstance(names, list) else []


def _is_compressed(message: Any) -> bool:
    """Return whether a message of Arrow's stream format has compressed buffers.

    Its metadata is a table of flatbuffers (Message.fbs of Arrow): header is field 2; of a RecordBatch compression is field 3, of a
    DictionaryBatch the RecordBatch is field 1.
    """
    if message.type not in ("record batch", "dictionary"):
        return False
    data = message.metadata.to_pybytes()
    batch = _follow(data, _field(data, _follow(data, 0), 2))
    if message.type == "dictionary":
        batch = _follow(data, _field(data, batch, 1))
    return _field(data, batch, 3) != 0


def _follow(data: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", data, place)[0])


def _field(data: bytes, table: int, number: int) -> int:
    """Return the place of a table's field, 0 if it is not set."""
    known = table - int(struct.unpack_from("<i", data, table)[0])
    size = struct.unpack_from("<H", data, known)[0]
    offset = int(struct.unpack_from("<H", data, known + 4 + 2 * number)[0]) if size > 4 + 2 * number else 0
    return table + offset if offset else 0


def checked_row(path: Path, place: str, row: Mapping[str, Any], text: str, label: str) -> Row:
    """Return text and label of a row. Raises UsageError unless it has both."""
    for name in (text, label):
        if name not in row:
            raise wrong(path, f"there is no {name!r}, but {', '.join(map(repr, list(row)[:10])) or 'nothing'}.", place)
    if not isinstance(row[text], str) or not row[text].strip():
        raise wrong(path, f"{text!r} is no text.", place)
    if len(row[text]) > MAX_LINE_BYTES:
        raise wrong(path, f"{text!r} has {len(row[text]):,} characters, and at most {MAX_LINE_BYTES:,} are read.", place)
    return row[text], _label(path, place, row, label)


def _label(path: Path, place: str, row: Mapping[str, Any], label: str) -> str:
    if not isinstance(row[label], str | int):
        raise wrong(path, f"{label!r} is neither text nor a whole number.", place)
    return str(row[label])
