"""What stands beside an exported model that translates: its vocabulary, and what programs and people have to know of it."""

from __future__ import annotations

from ..checkpoint import Meta
from ..checkpoint.selection import ChosenWeights
from ..models.decoding.settings import GREEDY
from ..records.store.run_directory import RunReader
from ..records.store.run_vocabulary import VOCABULARY
from .capabilities import ExportFormat

__all__ = ["text_description", "text_readme", "translation_signature"]


def text_description(meta: Meta) -> dict[str, object]:
    """Return what ``model.json`` says of input and output."""
    return {
        "languages": list(meta.data.get("languages", ())),
        "vocabulary": VOCABULARY,
        "vocabulary_sizes": meta.data["vocabulary_sizes"],
        "input": "pieces, whole numbers [batch, length]; each row ends with END (2), padding (0) behind it",
        "output": f"pieces, whole numbers [batch, length + {GREEDY.extra_length}]; each row ends with END, padding behind it",
        "input_name": "pieces",
        "search": GREEDY.signature,
    }


def translation_signature(chosen: ChosenWeights) -> str | None:
    """Return what the scores of exactly these weights are comparable with, as the run's ``job.json`` has it.

    None where they were not evaluated, or the run has no ``job.json``, or one of a release that did not say it. Raises DamagedRunError.
    """
    run = chosen.path.parent.parent
    if chosen.metrics is None or not (run / "job.json").exists():
        return None
    recorded: dict[str, str | None] = RunReader(run).job().get("translation_signatures") or {}
    return recorded.get("training")


def text_readme(meta: Meta, made_of: str, export_format: str, written: ExportFormat) -> str:
    """Return the page for people. `made_of` has what is to be said of how the weights came about beside the updates."""
    languages = " to ".join(meta.data.get("languages", ()))
    return (
        f"# {meta.job['model']} as {export_format}\n\n"
        f"This folder holds {written.text_summary or written.summary}. It was trained on {meta.data['name']} ({languages}) by `trainer`\n"
        f"with {meta.step:,} updates.{made_of}\n\n"
        f"Text becomes pieces, and pieces text, by `{VOCABULARY}`, a model of sentencepiece. `model.json` says what is put in and comes\n"
        "out, and has the names and shapes of all weights.\n\n"
        f"```python\n{written.text_usage or written.usage}\n```\n"
    )
