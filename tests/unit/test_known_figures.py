"""The fast reader of summaries, for lists of runs, agrees with the schema on every value."""

from __future__ import annotations

import json
import os
from copy import deepcopy

import pytest
from run_samples import async_run, sync_run

from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.known_figures import read_known_figures
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.runs.columns import row

VALUES = (None, True, 0, 1, -1, -(10**30), 1.0, 0.5, 1e31, 2**53 + 1, 2**63, 10**30, "NaN", "text", "x" * 5000, [], {}, [1], {"a": 1})


def places(value, place=()):
    """Yield the path of every value within a JSON document."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(item, (*place, key))


def changed(document, place, value):
    """Return a copy of a document with another value at a path."""
    copy = holder = deepcopy(document)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return copy


@pytest.mark.parametrize("make", [sync_run, async_run])
def test_known_figures_are_those_of_the_summary(tmp_path, make):
    run = make(tmp_path)
    summary, figures = RunReader(run).summary(), read_known_figures(run / "summary.json")
    assert figures is not None
    assert {name: summary[name] for name in figures if name not in ("schema", "run")} == {
        name: value for name, value in figures.items() if name not in ("schema", "run")
    }


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of a loss that is a whole number
def test_a_changed_value_is_read_equally_or_left_to_the_schema(tmp_path):
    run = sync_run(tmp_path)
    path, reader = run / "summary.json", RunReader(run)
    document = json.loads(path.read_text())
    accepted = 0
    for place in places(document):
        for value in VALUES:
            path.write_text(json.dumps(changed(document, place, value)))
            if (figures := read_known_figures(path)) is None:
                continue
            summary = reader.summary()  # raises DamagedRunError for what only the fast reader accepts
            assert repr(row({**figures, "run": run.name})) == repr(row(summary)), (place, value)
            accepted += 1
    assert accepted > 100


@pytest.mark.parametrize("text", ['{"schema": 1}', "", "[]", '{"schema": 1, "steps": NaN}', "[" * 100_000, '"\\ud800"', "\xff"])
def test_a_damaged_summary_is_left_to_the_schema(tmp_path, text):
    run = sync_run(tmp_path)
    (run / "summary.json").write_bytes(text.encode("latin-1"))
    assert read_known_figures(run / "summary.json") is None
    with pytest.raises(DamagedRunError):
        RunReader(run).known_figures()


def test_no_pipe_or_endless_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    assert read_known_figures(tmp_path / "summary.json") is None
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").symlink_to("/dev/zero")
    assert read_known_figures(tmp_path / "summary.json") is None
