"""Do the records of a run still have all updates that it made? If a file was cut or removed since, curves would be shorter unnoticed."""

from __future__ import annotations

import msgspec

from ...records.store.jsonl import DamagedRunError
from ..series.fast_jsonl import read_pieces
from .run import Run

__all__ = ["lost_updates"]


class _Line(msgspec.Struct, gc=False):
    """What counting needs of a line of ``steps.jsonl``."""

    count: int


def lost_updates(run: Run) -> str | None:
    """Say what is wrong with the records of a run that succeeded, in a sentence without its stop; None where nothing is, or it did not."""
    if not run.has_summary or run.summary.get("state") != "succeeded":
        return None
    path, made = run.path / "steps.jsonl", int(run.summary["steps"])
    try:
        found = sum(line.count for lines in read_pieces(path, _Line, "StepRecord") for line in lines)
    except DamagedRunError as error:
        return str(error).removesuffix(".")
    if found == made:
        return None
    what = f"holds {found:,} of the {made:,} updates" if path.exists() else f"is missing, with the {made:,} updates"
    return f"{path} {what} that the run made: it was changed after the run; tables have the run's own figures, curves what is left"
