"""Whether a source returns what its interface promises: kinds and names, before anything is made of it, and a translation's sentences."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ...core.untrusted.path_names import spelled
from ...metrics.language import TOKENIZERS, TOKENIZERS_OF_PACKAGES
from ..base import PreparedArrays, PreparedBlocks, PreparedColumns, TextFeatures
from ..columns import Column, ColumnSpec
from ..text import END, PADDING
from .manifest import SPLITS
from .source_calls import called
from .writer import BrokenSourceError

__all__ = ["SIDES", "check_attachments", "check_class_names", "check_prepared", "checked_texts", "wrong_sentences", "wrong_translation"]

SIDES = ("source", "target")
"""The columns of a translation."""


def check_prepared(loaded: object, function: str) -> None:
    """Raise BrokenSourceError, saying what is wrong, where this is nothing that `function` of a source may return."""
    if not isinstance(loaded, PreparedArrays | PreparedBlocks | PreparedColumns):
        raise BrokenSourceError(f"its {function} returned {_kind(loaded)}, not one of PreparedArrays, PreparedBlocks and PreparedColumns")
    if isinstance(loaded, PreparedArrays):
        for name, arrays in (("images", loaded.images), ("labels", loaded.labels)):
            _check_splits(name, arrays, "an array", lambda found: isinstance(found, np.ndarray))
        return
    _check_splits("blocks", loaded.blocks, "a function", callable)
    functions = {"left_out": loaded.left_out, "notes": loaded.notes} | (
        {"attachments": loaded.attachments} if isinstance(loaded, PreparedColumns) else {}
    )
    for name, function_of in functions.items():
        if not callable(function_of):
            raise BrokenSourceError(f"its {name} is {_kind(function_of)}, not a function")
    if isinstance(loaded, PreparedColumns):
        _check_columns(loaded)
    elif not (isinstance(loaded.input_shape, tuple) and len(loaded.input_shape) == 3 and all(map(_is_count, loaded.input_shape))):
        raise BrokenSourceError(f"its input_shape is {loaded.input_shape!r}, not (channels, height, width)")
    elif not _is_count(loaded.classes):
        raise BrokenSourceError(f"its classes are {loaded.classes!r}, not a whole number from 1 up")


def _check_splits(name: str, found: object, kind: str, right: Callable[[object], bool]) -> None:
    if not isinstance(found, Mapping):
        raise BrokenSourceError(f"its {name} are {_kind(found)}, not a mapping with {kind} for each of {' and '.join(SPLITS)}")
    if set(found) != set(SPLITS):
        raise BrokenSourceError(f"its {name} have the splits {sorted(map(str, found))}, not {' and '.join(SPLITS)}")
    for split in SPLITS:
        if not right(found[split]):
            raise BrokenSourceError(f"its {name} have {_kind(found[split])} for {split}, not {kind}")


def _check_columns(loaded: PreparedColumns) -> None:
    columns = loaded.columns
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, ColumnSpec) for column in columns):
        raise BrokenSourceError("its columns are not a tuple of ColumnSpec")
    if not isinstance(loaded.features, TextFeatures):
        raise BrokenSourceError(f"its features are {_kind(loaded.features)}, not TextFeatures")
    sizes = loaded.features.vocabulary_sizes
    if not isinstance(sizes, Mapping) or not all(_is_count(size) for size in sizes.values()):
        raise BrokenSourceError(f"its vocabulary_sizes are {sizes!r}, not a whole number from 1 up for each column of tokens")


def check_attachments(found: object) -> Mapping[str, bytes]:
    """Return attachments. Raises BrokenSourceError where they are not bytes by name."""
    if not isinstance(found, Mapping):
        raise BrokenSourceError(f"its attachments returned {_kind(found)}, not a mapping from names to bytes")
    for name, content in found.items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise BrokenSourceError(f"its attachment {name!r} is {_kind(content)}, not bytes under a name")
    return found


def check_class_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return a note about names that look alike. Raises BrokenSourceError where two classes have the same name."""
    exact = Counter(map(str, names))
    forms = Counter(unicodedata.normalize("NFC", name) for name in exact)
    if repeated := [spelled(name) for name, count in exact.items() if count > 1]:
        raise BrokenSourceError(f"class_names: {repeated[0]!r} is the name of several classes")
    alike = (name for name, count in forms.items() if count > 1)
    return tuple(f"two classes are called {spelled(name)!r}, in different Unicode forms (NFC and NFD)" for name in alike)


def checked_texts(function: Callable[[], Iterable[str]], name: str) -> tuple[str, ...]:
    """Return the texts that `name` of a source returns. Raises BrokenSourceError where they are none."""
    found = called(lambda: text if isinstance(text := function(), str) else tuple(text))
    if isinstance(found, str) or not all(isinstance(line, str) for line in found):
        raise BrokenSourceError(f"its {name} returned something else than texts")
    return tuple(map(spelled, found))


def wrong_translation(prepared: PreparedColumns) -> str | None:
    """Return why what says its languages is no translation, or None: two of them, two columns of pieces, and a tokenizer for BLEU."""
    features, columns = prepared.features, {column.name: column for column in prepared.columns}
    if not isinstance(features.languages, tuple) or len(features.languages) != 2:
        return f"its languages are {features.languages!r}; a translation has two, (source, target)"
    for side in SIDES:
        if (
            side not in columns
            or columns[side].shape != (None,)
            or columns[side].dtype == "float32"
            or side not in features.vocabulary_sizes
        ):
            return (
                f"it says its languages {', '.join(features.languages)}, and has no column {side!r} of pieces, whole numbers of any length"
            )
    if features.bleu_tokenizer not in (known := (*TOKENIZERS, *TOKENIZERS_OF_PACKAGES)):
        return f"its bleu_tokenizer is {features.bleu_tokenizer!r}; one of {', '.join(known)} is needed"
    return None


def wrong_sentences(column: Column, first: int) -> str | None:
    """Return what is wrong with sentences, or None: each ends with END, which is nowhere else in it, and no piece is padding.

    `first` is how many sentences stand before these: a message counts them from 1.
    """
    values, offsets, number = column.values, column.offsets, first + 1
    if offsets is None:
        return None
    if (empty_n := offsets[1:] == offsets[:-1]).any():
        return f"sentence {number + int(empty_n.argmax())} has no pieces, not even END ({END})"
    if (endless_n := values[offsets[1:] - 1] != END).any():
        return f"sentence {number + int(endless_n.argmax())} does not end with END ({END})"
    for piece, name in ((PADDING, "padding"), (END, "END")):
        found_m = np.flatnonzero(values == piece)
        if len(found_m) > (0 if piece == PADDING else len(offsets) - 1):
            sentence_m = np.searchsorted(offsets, found_m, side="right") - 1
            inside_m = found_m != offsets[sentence_m + 1] - 1 if piece == END else np.ones(len(found_m), np.bool_)
            return f"sentence {number + int(sentence_m[inside_m][0])} has {name} ({piece}) among its pieces"
    return None


def _is_count(found: object) -> bool:
    return isinstance(found, int | np.integer) and not isinstance(found, bool) and int(found) >= 1


def _kind(found: object) -> str:
    return "None" if found is None else f"of the type {type(found).__name__}"
