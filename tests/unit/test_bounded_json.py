"""Files of runs, sweeps, checkpoints and stores are read within bounds, and by one reader."""

from __future__ import annotations

import ast
import json
import math
import os
import socket
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.bounded_json import MAX_BYTES, MAX_LINE_BYTES, NotJsonError, UnreadableError, parse_json, read_json, read_lines

OTHER_TEXTS = {
    "backends/tf/__init__.py": "a program that is shown to the reader of an export",
    "cli/completion.py": "the completion cache, read at each key without the reader's imports",
    "cli/commands/run_repeats.py": "output of a trainer subprocess",
    "conformance/suite.py": "output of a trainer subprocess",
    "conformance/runs.py": "output of a trainer subprocess, and input from the suite that starts it",
    "conformance/launcher_suite.py": "output of a subprocess",
    "core/bounded_json.py": "the reader",
    "engine/protocol/messages.py": "messages of tasks",
    "engine/task.py": "job and cluster in a message of the driver",
    "launch/node/agent.py": "job and cluster in a message of the driver",
    "engine/protocol/transport.py": "messages of agents",
    "launch/node/dialled.py": "input from its starter",
    "launch/node/fork_server_client.py": "messages of and to the fork server",
    "engine/backend_probe.py": "output of a subprocess",
    "launch/launchers/environments.py": "an environment variable",
    "launch/virtual/namespace_holder.py": "messages of the driver",
    "launch/virtual/network.py": "messages of the holder",
}
"""Modules that take JSON from elsewhere than a file."""

NO_FILES = ["pipe", "socket", "folder", "device", "link to a device", "link to a pipe", "link in a loop"]


def make(kind, path):
    """Create something at `path` that is not a regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "link to a device"):
        path.symlink_to("/dev/zero")  # creating a device takes privileges
    elif kind == "link to a pipe":
        os.mkfifo(path.with_suffix(".pipe"))
        path.symlink_to(path.with_suffix(".pipe"))
    else:
        path.symlink_to(path.name)


@pytest.mark.parametrize("kind", NO_FILES)
def test_irregular_file_is_refused_immediately(tmp_path, kind):
    path = tmp_path / "a.json"
    make(kind, path)
    for read in (read_json, lambda path: next(read_lines(path))):
        with pytest.raises(UnreadableError, match=r"is a (pipe|socket|device|folder), not a file|cannot be read \(.*symbolic links"):
            read(path)


def test_links_to_files_are_followed(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.json").symlink_to(tmp_path / "far" / "a.json")
    assert read_json(tmp_path / "b.json") == {"a": 1}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": {"b": [1, NaN]}}', r"^a\.b\.1: is NaN"),
        ('{"a": Infinity}', r"^a: is a number too large"),
        ('{"a": 1e400}', r"^a: is a number too large"),
        ('{"a": -1e400}', r"^a: is a number too large"),
        (f'{{"a": {10**19}}}', None),
        (f'{{"a": {2**64}}}', r"^a: is a number too large"),
        (f'{{"a": {"1" * 100_000}}}', r"^a: is a number too large"),
        ("1e400", r"^is a number too large"),
        ("[" * 32 + "]" * 32, None),
        ("[" * 34 + "]" * 34, r"is nested more than 32 levels deep"),
        ("[" * 200_000, r"nested|whole"),
        ('{"a":' * 300_000, r"nested|whole"),
        ("[" + "[]," * 400_000 + "[]]", r"holds more than 500,000 values"),
        ("{", "^is not a whole JSON document"),
        ("", "^is not a whole JSON document"),
        ("\ufeff{}", "^is not a whole JSON document"),
    ],
)
def test_out_of_bounds_value_is_named_by_field(text, problem):
    if problem is None:
        assert parse_json(text.encode()) == json.loads(text)
        return
    with pytest.raises(UnreadableError, match=problem):
        parse_json(text.encode())


def test_endless_file_costs_no_time_or_memory(tmp_path):
    document, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    for path in (document, lines):
        path.touch()
        os.truncate(path, 1 << 40)
    tracemalloc.start()
    with pytest.raises(UnreadableError, match="is larger than 16 MiB"):
        read_json(document)
    with pytest.raises(UnreadableError, match="line 1: is longer than 4 MiB"):
        next(read_lines(lines))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * MAX_BYTES
    assert MAX_LINE_BYTES < MAX_BYTES


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


@pytest.mark.thorough
@given(value=values)
@settings(max_examples=200, deadline=None)
def test_any_bounded_value_round_trips(value):
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.thorough
@given(data=st.binary(max_size=40) | values.map(lambda value: json.dumps(value)[:-1].encode()))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_valid_or_an_error(data):
    try:
        value = parse_json(data)
    except NotJsonError:
        return
    assert json.loads(data) == value
    assert not isinstance(value, float) or math.isfinite(value)


def test_only_bounded_json_reads_json_files(repository):
    modules = set()
    for path in sorted(repository.glob("[a-z]*/**/*.py")):
        name = path.relative_to(repository).as_posix()
        if name.split("/")[0] in ("tests", "benchmarks", "build", "docs", "runs"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_loads = isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "JSONDecoder")
            if is_loads and isinstance(node.value, ast.Name) and node.value.id == "json":
                modules.add(name)
            if isinstance(node, ast.ImportFrom) and node.module == "json":
                modules.add(name)
    assert modules <= set(OTHER_TEXTS), "these read JSON by themselves; files are read by crosstrain.core.bounded_json"
