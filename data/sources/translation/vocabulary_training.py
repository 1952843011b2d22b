"""Makes a vocabulary in a separate process: sentencepiece takes minutes, ignoring signals.

``python -m crosstrain.data.sources.translation.vocabulary_training PARENT PIECES BYTES`` reads lines from standard input, each after its
length in UTF-8 as four bytes, until `_END`. It answers with a line of JSON, `null` or sentencepiece's refusal, and the model. It ends with
its parent.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO

from ....core.bounded_json import parse_json
from ....core.errors import TrainerError
from ....core.process import die_with_parent, python
from ...text import BEGIN, END, PADDING, UNKNOWN
from .text_files import text_package

COVERAGE_WITH_BYTES = 0.9995  # share of characters with pieces of their own: sentencepiece's default
MAX_MEMORY_BYTES = 16 << 30  # a million sentences take a few hundred MB; without spaces, 86 bytes per character
_LENGTH_BYTES = 4
_END = b"\xff" * _LENGTH_BYTES


class RefusedTextError(Exception):
    """Error of sentencepiece about an impossible vocabulary, with its own message."""


def trained_model(lines: Iterable[str], size: int, *, bytes_too: bool) -> bytes:
    """Return `tokenizer.train_vocabulary`'s model.

    Raises RefusedTextError, TrainerError if the process dies, errors of `lines`.
    """
    with tempfile.TemporaryFile() as log:
        command = python(__name__, str(os.getpid()), str(size), str(int(bytes_too)))
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a process without the pipes that it was to have")
        try:
            _feed(child.stdin, lines)
            answer = child.stdout.read()
            code = child.wait()
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
            child.stdout.close()
        log.seek(0)
        message = log.read().decode(errors="replace")
    if code:
        raise TrainerError(f"data: the vocabulary of {size} pieces was not made: {_end_in_words(code, message)}")
    sys.stderr.write(message)
    head, _, model = answer.partition(b"\n")
    if (refused := parse_json(head)) is not None:
        raise RefusedTextError(refused)
    return model


def _feed(stream: IO[bytes], lines: Iterable[str]) -> None:
    """Send every line. A process that stops reading has answered or died."""
    for line in lines:
        text = line.encode()
        try:
            stream.write(len(text).to_bytes(_LENGTH_BYTES, "big") + text)
        except BrokenPipeError:
            return
    with suppress(BrokenPipeError):
        stream.write(_END)
        stream.flush()


def _end_in_words(code: int, message: str) -> str:
    killed = signal.Signals(-code).name if code < 0 else None
    if "bad_alloc" in message or "MemoryError" in message or killed == "SIGKILL":
        how = "was killed, as the system does where memory runs out" if killed == "SIGKILL" else "had not enough memory"
        return (
            f"the process that makes it {how}; it may take up to {MAX_MEMORY_BYTES >> 30} GiB. Most is needed by text whose words are very"
            " long and all different; leave such lines out, or give it more memory."
        )
    last = message.strip().splitlines()[-1:]
    how = f"was killed by {killed}" if killed else f"ended with code {code}"
    return f"the process that makes it {how}{''.join(f': {line}' for line in last)}"


def _receive_lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield the received lines. Raises EOFError if they end without `_END`."""
    while (length := stream.read(_LENGTH_BYTES)) != _END:
        if len(length) != _LENGTH_BYTES:
            raise EOFError("the text has no end")
        yield stream.read(int.from_bytes(length, "big")).decode()


def _train(lines: Iterator[str], size: int, *, bytes_too: bool) -> bytes:
    model = io.BytesIO()
    text_package("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        pad_id=PADDING,
        bos_id=BEGIN,
        eos_id=END,
        unk_id=UNKNOWN,
        pad_piece="<pad>",
        bos_piece="<s>",
        eos_piece="</s>",
        unk_piece="<unk>",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=bytes_too,
        character_coverage=COVERAGE_WITH_BYTES if bytes_too else 1.0,
        num_threads=1,
        input_sentence_size=0,
        shuffle_input_sentence=False,
        max_sentence_length=1 << 16,
        minloglevel=2,
    )
    return model.getvalue()


def _limit_memory() -> None:
    """Fail rather than exhaust the machine's memory; an existing lower limit stays."""
    if sys.platform == "linux":
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = [limit for limit in (soft, hard, MAX_MEMORY_BYTES) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(wanted), hard))


def main(parent: int, size: int, *, bytes_too: bool) -> None:
    """Make the vocabulary.

    sentencepiece's output goes to standard error, as standard output is the answer.
    """
    die_with_parent(parent)
    _limit_memory()
    answer_to = os.dup(1)
    os.dup2(2, 1)
    refused, model = None, b""
    try:
        model = _train(_receive_lines(sys.stdin.buffer), size, bytes_too=bytes_too)
    except RuntimeError as error:
        refused = str(error)
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(json.dumps(refused).encode() + b"\n" + model)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), bytes_too=sys.argv[3] == "1")
