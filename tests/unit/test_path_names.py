"""Names from messages and files create nothing outside their folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoint_tools import meta, save
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_samples import a_job
from untyped import Message

from crosstrain.checkpoint import DamagedCheckpointError, read_checkpoint
from crosstrain.checkpoint.files import digest_of, read_manifest, write_manifest
from crosstrain.core.console import UnsafeNameError, inside, is_plain_name, is_text, spelled
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import QuietProgress
from crosstrain.engine.protocol.messages import RawArray, Stream
from crosstrain.launch.driver.nodes import Nodes, ReportHandlers
from crosstrain.launch.driver.recorder import RunRecorder
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.records.store.jsonl import encode, write_document
from crosstrain.records.store.schema import EventRecord

ELSEWHERE = "ELSEWHERE"
"""Becomes the whole path of a folder outside the run."""

ODD = ["\0", "\n", "\x1b[2J", "\\", " ", "é", "x" * 300, "\ud800", ELSEWHERE]
PIECES = st.sampled_from(["..", ".", "", "/", "//", "~", "a", "worker-1", "logs", *ODD])
PATHS = st.one_of(st.lists(PIECES, max_size=8).map("/".join), st.lists(PIECES, max_size=8).map("".join), st.text(max_size=20))
STRANGE = st.one_of(PATHS, st.none(), st.integers(), st.lists(PATHS, max_size=2))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a nested run, whose node 1 has one task, and another folder next to it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "elsewhere").mkdir()
    recording = RunRecorder(a_job(folder / "a/b/c/runs", name="run", nodes=2), QuietProgress())
    recording.start_clock()
    recording.expect({"worker-0": 0, "worker-1": 1})
    recording.ending()
    yield folder, recording
    recording.close()


def outside(folder, run):
    """Return all paths below a folder except those in the run."""
    return {path for path in folder.rglob("*") if not path.is_relative_to(run)}


def sent(folder, name):
    return name.replace(ELSEWHERE, str(folder / "elsewhere")) if isinstance(name, str) else name


@settings(max_examples=300)
@example(name="../../../../x", traced=False)
@example(name="/tmp/crosstrain-absolute-name", traced=False)
@example(name="worker-1/../../../../../x", traced=True)
@example(name=f"{ELSEWHERE}/x", traced=True)
@example(name="worker-0", traced=False)
@given(name=STRANGE, traced=st.booleans())
def test_files_of_nodes_stay_inside_the_run(place, name, traced):
    folder, recording = place
    before, name = outside(folder, recording.path), sent(folder, name)
    recording.violation = None
    if traced:
        recording.trace(1, name, b"x")
    else:
        recording.log(1, name, b"x")
    assert outside(folder, recording.path) == before
    assert not Path("/tmp/crosstrain-absolute-name.log").exists()
    logs, traces = recording.path / "logs", recording.path / "profile"
    assert {path for path in logs.rglob("*") if path.is_file()} <= {logs / "1/worker-1.log"}
    assert {path.parent for path in traces.glob("*/*")} <= {traces / "1"}
    if recording.violation is not None:
        assert str(recording.violation).startswith(f"node 1 sent a {'trace' if traced else 'log'} called ")
        assert str(recording.violation).isprintable()
        shutil.rmtree(traces, ignore_errors=True)
    elif not traced:
        assert name == "worker-1"


def test_node_that_sends_its_tasks_names_is_accepted(tmp_path):
    recording = RunRecorder(a_job(tmp_path, name="run"), QuietProgress())
    recording.expect({"worker-0": 0, "worker-1": 1})
    recording.log(1, "worker-1", b"said")
    recording.trace(1, "worker-1/plugins/profile/2026_01_01/host.xplane.pb", b"part one, ")
    recording.trace(1, "worker-1/plugins/profile/2026_01_01/host.xplane.pb", b"part two")
    assert (recording.path / "logs/1/worker-1.log").read_bytes() == b"said"
    assert (recording.path / "profile/1/worker-1/plugins/profile/2026_01_01/host.xplane.pb").read_bytes() == b"part one, part two"
    assert recording.violation is None
    for name in ("worker-0", "worker-2", "../1/worker-1"):
        with pytest.raises(RunFailedError, match=r"node 1 sent a log called .*, which is no file of a task of its"):
            recording.log(1, name, b"of another")
    recording.close()


def test_violation_at_the_end_is_recorded_once(tmp_path):
    """The run ends normally; the violation is one event, and the failure of the run."""
    driver, agent = socket.socketpair()
    with driver, agent, ExitStack() as files:
        ours, theirs = (Stream(*(files.enter_context(end.makefile(mode)) for mode in ("rb", "wb"))) for end in (driver, agent))
        recording = RunRecorder(a_job(tmp_path / "runs", name="run"), QuietProgress())
        recording.start_clock()
        recording.expect({"worker-0": 0})
        recording.ending()
        channel = NodeChannel(0, ours, "127.0.0.1", None, None, False)
        control = TaskGroup(Nodes([channel], ReportHandlers(recording.sample, recording.log, recording.trace)), [])
        for number in range(3):
            theirs.send(Message("log", {"task": f"../../../{number}"}, {"text": RawArray("|u1", [1], b"x")}))
        theirs.send(Message("log", {"task": "worker-0"}, {"text": RawArray("|u1", [4], b"said")}))
        theirs.send(Message("stopped", {}))
        control.end_tasks(5.0, graceful=False)
        agent.shutdown(socket.SHUT_RDWR)
    recording.close()
    assert "'../../../0'" in str(recording.violation)
    events = [json.loads(line) for line in (recording.path / "events.jsonl").read_text().splitlines()]
    assert [event["detail"] for event in events if event["event"] == "name_refused"] == [{"node": 0, "what": "log", "name": "'../../../0'"}]
    assert (recording.path / "logs/0/worker-0.log").read_bytes() == b"said"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


@settings(max_examples=300)
@given(path=STRANGE)
def test_path_of_plain_names_stays_inside(tmp_path_factory, path):
    folder = tmp_path_factory.getbasetemp() / "inside"
    try:
        path_inside = inside(folder, sent(folder, path))
    except UnsafeNameError as error:
        message = str(error)
    else:
        message = ""
        assert Path(os.path.normpath(path_inside)) == path_inside
        assert path_inside.is_relative_to(folder)
        assert path_inside != folder
    assert message == "" or message.isprintable()
    assert len(message) <= 101


def test_name_length_is_counted_in_bytes():
    assert is_plain_name("x" * 255)
    assert not is_plain_name("x" * 256)
    assert is_plain_name("é" * 127)
    assert not is_plain_name("é" * 128)


@pytest.mark.parametrize("name", ["../../outside", "/dev/zero", "a/b", "", "parameters\n"])
def test_manifest_lists_only_files_of_its_checkpoint(tmp_path, name):
    """/dev/zero has a size and would be read for ever."""
    (tmp_path / "outside").write_text("private")
    folder = save(tmp_path / "run")
    write_manifest(folder, {**read_manifest(folder), name: digest_of(tmp_path / "outside")})
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json lists .*, which is no file of a checkpoint"):
        read_checkpoint(folder)


NAMES_OF_BYTES = st.binary(max_size=12).map(os.fsdecode) | st.text(max_size=12)
"""As the file system gives them; not every one is UTF-8."""


@example(name=os.fsdecode(b"caf\xe9"))
@example(name="\ud800")
@given(name=NAMES_OF_BYTES)
def test_escaped_name_is_valid_and_utf8_is_unchanged(name):
    spelled(name).encode()
    assert (spelled(name) == name) == is_text(name)


def test_bytes_outside_utf8_are_escaped():
    assert spelled(os.fsdecode(b"caf\xe9/\xc3\xa9/\xff")) == r"caf\xe9/é/\xff"


@settings(max_examples=50)
@example(name=os.fsdecode(b"caf\xe9"))
@given(name=NAMES_OF_BYTES)
def test_checkpoint_accepts_any_name(tmp_path_factory, name):
    data = {**meta().data, "name": f"mine:{name}", "data_dir": name, "class_names": [f"{place}{name}" for place in range(10)]}
    job = {**meta().job, "data_dir": name}
    folder = save(tmp_path_factory.mktemp("run"), data=data, job=job, model={**meta().model, "name": name})
    checkpoint_meta = read_checkpoint(folder).meta
    assert checkpoint_meta.data["class_names"] == [f"{place}{spelled(name)}" for place in range(10)]
    assert (checkpoint_meta.job["data_dir"], checkpoint_meta.model["name"]) == (spelled(name), spelled(name))


@example(name=os.fsdecode(b"caf\xe9"), number=0.5)
@example(name="\U0001f600", number=float("nan"))
@given(name=NAMES_OF_BYTES, number=st.floats())
def test_records_have_no_half_characters(tmp_path_factory, name, number):
    path = tmp_path_factory.getbasetemp() / "document.json"
    write_document(path, {"command": [name, number], name: 1})
    line = encode(EventRecord(0.5, "warning", {"text": name, "number": number}))
    for text in (path.read_bytes(), line):
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    assert json.loads(line)["detail"]["text"] == json.loads(path.read_bytes())["command"][0] == spelled(name)


@pytest.mark.parametrize("field", ["data", "data_dir", "name", "model", "until", "mlflow_experiment"])
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_setting_outside_utf8_is_refused(field, source):
    name = os.fsdecode(b"caf\xe9")
    flags, environment = ({field: name}, {}) if source == "flag" else ({}, {f"TRAINER_{field.upper()}": name})
    with pytest.raises(UsageError, match="allowed: text in UTF-8"):
        resolve(flags, environment)
