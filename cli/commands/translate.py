"""``trainer translate``: translation of standard input on any backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ...backends.base import State
from ...checkpoint.meta import trained_vocabulary
from ...checkpoint.reader import rebuilt_model
from ...checkpoint.selection import Selection
from ...core.console import json_text, note, raw_stream
from ...core.errors import TrainerError, UsageError
from ...data.sources.translation.tokenizer import VOCABULARY, Vocabulary
from ...data.text import UNKNOWN
from ...launch.standalone_evaluation import translated
from ...launch.standalone_task import StandaloneTask
from ...models.decoding import Decoding, Hypothesis
from ...records.store.jsonl import finite_json
from ...records.store.vocabulary import has_vocabulary
from ..options import GivenPath, IntegerRange, decoding_options, model_option, trust_option
from ..trained_job import (
    MAX_LINE_BYTES,
    TaskSettings,
    arriving_lines,
    checkpoint_options,
    fitting_data,
    trained_job,
    trained_weights,
)

MAX_PIECES = 1024  # per sentence, with END: attention cost grows with the square, and no training set has such sentences
NOT_FINITE = "the model's output is not finite"


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str = ""
    pieces: tuple[int, ...] = ()
    problem: str | None = None


@click.command(short_help="Translate lines of text with a trained model, on any backend.")
@click.argument("source", type=GivenPath(), metavar="RUN|CHECKPOINT")
@checkpoint_options
@model_option
@click.option("--data-dir", type=GivenPath(), help="Folder with the original files of another dataset whose vocabulary to use.")
@click.option("--backend", metavar="NAME", help="A name from `trainer backends` [default: the one that trained it].")
@click.option("--precision", metavar="fp32|bf16|fp16", help="Number format of matrix products [default: the run's].")
@click.option("--device", metavar="auto|cpu|gpu", help="Device [default: the run's].")
@decoding_options
@click.option(
    "--n-best",
    type=IntegerRange(1),
    metavar="N",
    help="Print the N best translations of each line: number, score and text, separated by tabs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
@trust_option("Trust")
def translate(
    source: Path,
    selection: Selection,
    n_best: int | None,
    as_json: bool,
    trust_run: bool,
    **settings: Any,
) -> None:
    """Translate standard input line by line to standard output, as lines arrive.

    RUN is a run directory, with its newest valid checkpoint by default; CHECKPOINT is one of its checkpoints. Output lines correspond to
    input lines. A line is empty if its input is empty or cannot be translated (no UTF-8, too long, or non-finite logits); in the
    second case standard error has the reason, and the exit code is 1.
    """
    task_settings = TaskSettings(**settings)

    def reads_data(checkpoint: Path) -> bool:
        return task_settings.data_dir is not None or not has_vocabulary(checkpoint.parent.parent)

    chosen = trained_weights(source, selection, settings, trusted=trust_run, reads_data=reads_data)
    meta = chosen.meta
    spec = rebuilt_model(meta)
    if spec.objective.translation is None:
        raise UsageError(f"translate: {meta.job['model']!r}, trained on {meta.data['name']!r}, translates nothing.")
    from_data = reads_data(chosen.path)
    job = trained_job(meta, task_settings, reads_data=from_data)
    decoding = Decoding(job.beam, job.length_penalty)
    if n_best is not None and n_best > decoding.beam:
        raise UsageError(f"--n-best: got {n_best}; allowed: 1 to {decoding.beam}, the beam. Give a wider one with --beam.")
    if sys.stdin is None:
        raise UsageError("translate: standard input is closed; give it lines to translate.")
    vocabulary = Vocabulary(fitting_data(meta, job).attachment(VOCABULARY) if from_data else trained_vocabulary(chosen.path, meta))
    writer = _Writer(vocabulary, n_best, as_json=as_json)
    with StandaloneTask(job, spec, note, placeholder=None if from_data else meta.data) as task:
        task.start(State(chosen.parameters(), {}, meta.step, chosen.buffers()))
        if sys.stdin.isatty():
            note("Type a sentence a line; Ctrl-D ends.")
        for lines in _number_lines(arriving_lines(sys.stdin.fileno(), lambda: task.interrupted), vocabulary):
            sources = [line.pieces for line in lines if line.pieces]
            hypotheses = iter(translated(task, sources, decoding, n_best or 1) if sources else ())
            for line in lines:
                writer.write(line, next(hypotheses) if line.pieces else [])
            sys.stdout.flush()
    if writer.untranslated:
        raise TrainerError(f"{writer.untranslated} of {writer.lines} lines could not be translated; the errors are above.")


def _number_lines(arriving: Iterator[list[bytes | None]], vocabulary: Vocabulary) -> Iterator[list[_Line]]:
    number = 0
    for raw_lines in arriving:
        lines = []
        for raw in raw_lines:
            number += 1
            lines.append(_line(number, raw, vocabulary))
        yield lines


def _line(number: int, raw: bytes | None, vocabulary: Vocabulary) -> _Line:
    if raw is None:
        return _Line(number, problem=f"longer than {MAX_LINE_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")  # a file's byte order mark is no text
    except UnicodeDecodeError as error:
        return _Line(number, problem=f"not UTF-8 (byte {raw[error.start]:#04x} at {error.start})")
    if not text.strip():
        return _Line(number, text)
    (pieces,) = vocabulary.encode([text])
    if len(pieces) > MAX_PIECES:
        return _Line(number, text, problem=f"{len(pieces):,} pieces long, and {MAX_PIECES:,} are the most")
    return _Line(number, text, tuple(pieces))


class _Writer:
    def __init__(self, vocabulary: Vocabulary, n_best: int | None, *, as_json: bool) -> None:
        self._vocabulary, self._n_best, self._as_json = vocabulary, n_best, as_json
        self._plain = sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)
        self.lines = self.untranslated = 0

    def write(self, line: _Line, hypotheses: Sequence[Hypothesis]) -> None:
        self.lines += 1
        problem = NOT_FINITE if line.pieces and not hypotheses else line.problem
        if problem is not None:
            self.untranslated += 1
            note(f"line {line.number}: {problem}; its translation is empty")
        elif line.pieces and len(hypotheses) < (self._n_best or 1):
            note(f"line {line.number}: {len(hypotheses)} of {self._n_best} translations; the model gives all others the probability 0")
        if unknown := line.pieces.count(UNKNOWN):
            note(f"line {line.number}: {unknown:,} of {len(line.pieces) - 1:,} pieces are unknown to the vocabulary")
        texts = [self._text(hypothesis) for hypothesis in hypotheses]
        if self._as_json:
            translations = [
                {"text": text, "score": best.score, "log_probability": best.log_probability, "ended": best.ended}
                for text, best in zip(texts, hypotheses, strict=True)
            ]
            document = {"line": line.number, "source": line.text, "problem": problem, "translations": translations}
            click.echo(json_text(finite_json(document), letters=True))
        elif self._n_best is None:
            self._plain.write(f"{texts[0] if texts else ''}\n")
        else:
            for text, hypothesis in zip(texts, hypotheses, strict=True):
                self._plain.write(f"{line.number}\t{hypothesis.score:.6f}\t{text}\n")

    def _text(self, hypothesis: Hypothesis) -> str:
        """Return a translation on one line: pieces of single bytes can form a line end."""
        return self._vocabulary.decode(hypothesis.pieces).replace("\r", " ").replace("\n", " ")
