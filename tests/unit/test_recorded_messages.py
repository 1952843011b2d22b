"""Messages of nodes can be recorded and read again; one message cannot destroy the records."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import a_job
from test_node_messages import FROM_WORKER, NODE_OF, SOUND, host, read, sample, wrong_with
from untyped import Message

from crosstrain.backends.base import Plan, StepResult
from crosstrain.engine.loop_interfaces import OutstandingPlans
from crosstrain.engine.progress import QuietProgress
from crosstrain.engine.protocol.messages import MAX_ERROR_CHARACTERS, MAX_HEADER_BYTES, ImpossibleAnswerError
from crosstrain.engine.protocol.task_messages import step_record
from crosstrain.launch.driver.first_failure import Failures
from crosstrain.launch.driver.outcome import Outcome
from crosstrain.launch.driver.recorder import RunRecorder
from crosstrain.monitor.collector import Problems
from crosstrain.records.store.jsonl import decode, encode
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import MAX_PROBLEM_CHARACTERS, MAX_PROBLEMS

MAX_LENGTH = "é" * MAX_PROBLEM_CHARACTERS
"""Each of its characters takes two bytes on its way, and six in a record."""

TASK = {**dict.fromkeys(sample()["tasks"][0]), "task": "worker-1", "pid": 7}
GPU = {"name": "é" * 255, "utilization": 2.0**53, "memory_bytes": 2**53, "memory_total_bytes": None, "power_watts": -(2.0**53)}
MAX_NUMBER = {
    "problems": [MAX_LENGTH] * MAX_PROBLEMS,
    "gpus": [{**GPU, "name": "A", "tasks": ["worker-1"]}] * 1024,
    "interfaces": {f"{number}": [2**53, 2**53] for number in range(4096)},
    "tasks": [TASK] * 2000,
    "interval_seconds": 1e7,
    "cpu_cores_used": 2.0**53,
}
"""As much of each as a sample may have."""

SAMPLED = {
    "problems": [
        [],
        ["é" * 1_000_000],
        [""] * 600_000,
        ["\x01" * MAX_PROBLEM_CHARACTERS] * MAX_PROBLEMS,
        MAX_NUMBER["problems"],
        [MAX_LENGTH] * 65,
    ],
    "gpus": [
        None,
        [{}] * 1024,
        [{}] * 300_000,
        [GPU] * 500,
        MAX_NUMBER["gpus"],
        [{"power_watts": 1e300}],
        [{"tasks": ["worker-1"] * 100_000}],
    ],
    "interfaces": [None, {}, {"é" * 1_000_000: [1, 1]}, {f"{number:é>255}": [0, 0] for number in range(4000)}, MAX_NUMBER["interfaces"]],
    "tasks": [[], [TASK], MAX_NUMBER["tasks"], [TASK] * 14_000],
    "interval_seconds": [0.0, 1.0, 1e7, 1e12, -1.0],
    "cpu_cores_used": [None, 0.5, 2.0**53, 1e300, -1e300],
    "network_source": [None, "interface", "é" * 300_000],
}


def sent(kind, fields):
    """Return a message if it is short enough to be sent, otherwise None."""
    return Message(kind, fields) if len(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()) < MAX_HEADER_BYTES else None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("problems", ["é" * 1_000_000]),
        ("problems", [""] * 600_000),
        ("gpus", [{}] * 300_000),
        ("gpus", [{"power_watts": 1e300}]),
        ("interfaces", {"é" * 1_000_000: [1, 1]}),
        ("network_source", "é" * 300_000),
        ("interval_seconds", 1e12),
        ("cpu_cores_used", 1e300),
    ],
)
def test_unrecordable_sample_is_refused(field, value):
    message = sent("sample", {"record": {**sample(), field: value}})
    assert message is not None
    assert wrong_with(1, message, NODE_OF).startswith("a message 'sample' ")


@pytest.mark.parametrize("field", MAX_NUMBER)
def test_sample_at_its_limits_is_accepted(field):
    assert wrong_with(1, sent("sample", {"record": {**sample(), field: MAX_NUMBER[field]}}), NODE_OF) is None


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(changes=st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, values in SAMPLED.items()}))
def test_recorded_samples_can_be_read(tmp_path_factory, changes):
    """Also a line that represents several samples, each with problems."""
    message = sent("sample", {"record": {**sample(), **changes}})
    if message is None or wrong_with(1, message, NODE_OF) is not None:
        return
    recording = RunRecorder(a_job(tmp_path_factory.mktemp("runs"), name="run", nodes=2), QuietProgress())
    recording.writer.write_status("running")
    recording.start_clock()
    recording._thinner.samples_per_line = 8
    count, record = 11, message["record"]
    for number in range(count):
        problems = [f"{number}-{place}{text}"[:MAX_PROBLEM_CHARACTERS] for place, text in enumerate(record["problems"])]
        sent_message = sent("sample", {"record": {**record, "problems": problems}})
        assert sent_message is not None
        assert wrong_with(1, sent_message, NODE_OF) is None
        recording.sample(read(sent_message).as_record(1))
    recording.write_waiting_samples()
    recording.close()
    assert sum(line.samples for line in RunReader(recording.path).system()) == count


def test_problems_of_the_monitor_are_within_limits():
    problems = Problems()
    for number in range(2 * MAX_PROBLEMS + 1):
        problems.note(f"{number} \udcff {MAX_LENGTH}")
    taken = [problems.take() for _ in range(4)]
    assert [len(texts) for texts in taken] == [MAX_PROBLEMS, MAX_PROBLEMS, 1, 0]
    for texts in taken:
        assert wrong_with(1, sent("sample", {"record": {**sample(), "problems": list(texts)}}), NODE_OF) is None


INTERFACE = {"addresses": ["10.0.0.1"], "up": True, "mtu_bytes": 1500, "speed_bits_per_second": None}
HOSTS = {
    "hostname": [None, "node1", "é" * 255, "é" * 4096],
    "cpu_model": [None, "é" * 4096, "é" * 1_000_000],
    "interfaces": [
        {},
        {"eth0": INTERFACE},
        {f"veth{number}": INTERFACE for number in range(4096)},
        {"eth0": {**INTERFACE, "addresses": [""] * 4096}},
        {f"eth{number}": {**INTERFACE, "addresses": [""] * 4096} for number in range(160)},
        {f"eth{number}": {**INTERFACE, "addresses": ["é" * 255] * 400} for number in range(9)},
    ],
    "packages": [{"torch": "2.5"}, {f"{number}": "é" * 250 for number in range(4000)}, {f"{number}": None for number in range(4096)}],
    "gpus": [None, [], [{"name": "é" * 255, "memory_total_bytes": 2**53, "uuid": None}] * 1024],
}


@pytest.mark.parametrize(("field", "place"), [("interfaces", 4), ("interfaces", 5), ("packages", 1)])
def test_unrecordable_host_description_is_refused(field, place):
    message = sent("hello", {**SOUND["hello"].fields, "host": {**host(), field: HOSTS[field][place]}})
    assert message is not None
    assert "which nobody could read again" in wrong_with(1, message, NODE_OF)


def test_host_with_many_interfaces_is_accepted():
    described = {**host(), "interfaces": HOSTS["interfaces"][2]}
    assert wrong_with(1, sent("hello", {**SOUND["hello"].fields, "host": described}), NODE_OF) is None


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(changes=st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, values in HOSTS.items()}))
def test_recorded_host_descriptions_can_be_read(tmp_path_factory, changes):
    message = sent("hello", {**SOUND["hello"].fields, "host": {**host(), **changes}})
    if message is None or wrong_with(1, message, NODE_OF) is not None:
        return
    recording = RunRecorder(a_job(tmp_path_factory.mktemp("runs"), name="run", nodes=8), QuietProgress())
    recording.writer.write_env([message["host"]] * 8)
    recording.close()
    (recording.path / "job.json").write_text("{}")
    assert [node["hostname"] for node in RunReader(recording.path).environment()["nodes"]] == [message["host"]["hostname"]] * 8


def test_longest_task_error_is_recorded_and_readable(tmp_path):
    error = {**SOUND["error"].fields, "type": "é" * 4096, "message": "é" * MAX_ERROR_CHARACTERS}
    messages = [Message("phase", {**FROM_WORKER, "name": "é" * 4096}), Message("error", error), SOUND["death"]]
    assert [wrong_with(1, message, NODE_OF) for message in messages] == [None] * 3
    longer = Message("error", {**error, "message": "é" * (MAX_ERROR_CHARACTERS + 1)})
    assert "a message 'error' that is none" in wrong_with(1, longer, NODE_OF)
    failures = Failures([])
    for message in messages:
        failures.record(1, read(message))
    cause = Outcome.from_failure(failures.death_of(1, "node 1", read(SOUND["death"]))).cause
    recording = RunRecorder(a_job(tmp_path, name="run"), QuietProgress())
    recording.start_clock()
    recording.event("run_failed", cause=cause)
    recording.writer.write_status("failed", cause=cause, exit_code=1, task="worker-1")
    recording.close()
    reader = RunReader(recording.path)
    assert reader.status()["cause"] == cause
    assert [event.detail["cause"] for event in reader.events()] == [cause]


@pytest.mark.parametrize(("staleness", "possible"), [(2**53, True), (2**53 + 1, False), (-1, False)])
def test_staleness_is_limited_to_the_recordable(tmp_path, staleness, possible):
    plan = Plan(0, 1, 0, 0, np.ones(1), 0)
    plans = OutstandingPlans(a_job(tmp_path, nodes=2, mode="async"))
    plans.add(plan)
    result = StepResult(0, np.ones(1, np.float32), 1, 0.5, worker=0, staleness=np.array([staleness]))
    if not possible:
        with pytest.raises(ImpossibleAnswerError, match="staleness"):
            plans.take(result)
        return
    assert plans.take(result) is plan
    record = step_record(result, 0, 0.5, plan.learning_rates)
    assert decode(type(record), json.loads(encode(record))) == record
