"""Invalid answers of probes: the driver names the host and does not act on them."""

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_ports import release_ports
from test_node_messages import STRANGE, host
from untyped import Message, fields_of

from crosstrain.core.job import Job
from crosstrain.engine.protocol import messages
from crosstrain.engine.protocol.messages import PROTOCOL, ProtocolError, Stream
from crosstrain.engine.protocol.probe_messages import QUESTIONS, Connect, Data, Describe, Listen, Model, Time, read_probe_answer
from crosstrain.launch.preflight.findings import Here, findings, table
from crosstrain.launch.preflight.interview import Probe, interview
from crosstrain.launch.preflight.probe import answer

JOB = Job(backend="torch")
DESCRIBED = {"protocol": PROTOCOL, "identity": {"boot": "b", "network": "n"}, "host": host(), "address": "127.0.0.1"}
SOUND = {
    "describe": DESCRIBED,
    "time": {"seconds": 1.8e9},
    "listen": {"ports": [21000, 4000]},
    "model": {"digest": "0" * 64, "package": "my_networks"},
    "data": {"digest": "0" * 64},
    "connect": {"problems": [None]},
}
QUESTIONS_OF_KIND = {
    question.kind: question
    for question in (Describe("torch"), Time(), Listen(), Model("m", "torch"), Data("d", None), Connect([("127.0.0.1", 4000)]))
}


def wrong_with_answer(kind, message):
    """What the driver finds wrong with an answer, or None."""
    try:
        read_probe_answer(QUESTIONS_OF_KIND[kind], message)
    except ProtocolError as error:
        return str(error)
    return None


@contextmanager
def probes(*answering):
    """Yield a probe for each function, which answers each question with its result or raw bytes."""
    with ExitStack() as ends:
        ends.callback(release_ports)
        made = []
        for number, answers in enumerate(answering):
            ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
            streams = [Stream(*(ends.enter_context(end.makefile(mode)) for mode in ("rb", "wb"))) for end in (ours, theirs)]
            made.append(Probe(f"node{number}", streams[0], lambda: "has ended"))
            thread = threading.Thread(target=serve, args=(streams[1], answers), daemon=True)
            thread.start()
            ends.callback(thread.join)
            ends.callback(ours.shutdown, socket.SHUT_RDWR)
        yield made


def serve(stream, answers):
    with suppress(OSError):
        while (question := stream.receive()) is not None:
            reply = answers(question)
            if not isinstance(reply, bytes):
                stream.send(reply)
            else:
                stream.writer.write(reply)
                stream.writer.flush()


def honest(question):
    """Answer as a probe of this machine does."""
    if question.kind == "describe":
        return Message("found", DESCRIBED)
    return answer(QUESTIONS.parse(question))


def lying(kind, fields):
    wrong = fields if isinstance(fields, Message | bytes) else Message("found", fields)
    return lambda question: wrong if question.kind == kind else honest(question)


@pytest.mark.parametrize("question", SOUND)
def test_valid_probe_answer_is_accepted(question):
    assert wrong_with_answer(question, Message("found", SOUND[question])) is None
    assert wrong_with_answer(question, Message("problem", {"text": "no such folder"})) is None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(SOUND)), st.data())
def test_answer_with_wrong_field_is_refused_or_harmless(question, data):
    sound = SOUND[question]
    name = data.draw(st.sampled_from(sorted(sound)))
    assert wrong_with_answer(question, Message("found", {key: value for key, value in sound.items() if key != name}))
    strange = data.draw(STRANGE)
    wrong = wrong_with_answer(question, Message("found", {**sound, name: strange}))
    if wrong is None:
        assert strange is None or isinstance(strange, (type(sound[name]), str if question == "model" else int))
    else:
        wrong.encode(errors="surrogatepass")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("describe", {}),
        ("describe", {**DESCRIBED, "host": {}}),
        ("describe", {**DESCRIBED, "address": "the.bank.example"}),
        ("describe", {**DESCRIBED, "address": ["127.0.0.1"]}),
        ("describe", {**DESCRIBED, "protocol": None}),
        ("time", {"seconds": "now"}),
        ("time", {"seconds": float("nan")}),
        ("listen", {"ports": []}),
        ("listen", {"ports": [0]}),
        ("listen", {"ports": ["22"]}),
        ("listen", {"ports": [1, 2, 3, 4, 5]}),
        ("model", {"digest": 7, "package": "my_networks"}),
        ("model", {"digest": "0" * 64}),
        ("data", {}),
        ("data", Message("nothing", {})),
        ("data", Message("problem", {})),
        ("data", Message("problem", {"text": ["x"]})),
        ("connect", {"problems": []}),
        ("connect", {"problems": [None, 7]}),
        ("connect", {}),
        ("connect", b"no message\n"),
    ],
)
def test_host_with_invalid_answer_is_named(question, answer):
    with probes(honest, lying(question, answer), honest) as made:
        reports = interview(made, "torch", JOB, 30.0)
    problems = findings(reports, Here({}), "torch", started_by="ssh")
    assert [(report.host, report.problem) for report in reports[::2]] == [("node0", None), ("node2", None)]
    assert reports[1].problem.startswith(f"answers the question {question!r} with ")
    assert "node1  ssh" in table([finding for finding in problems if finding.unreached])


def test_invalid_address_is_not_probed():
    requested = []

    def asking(question):
        if question.kind == "connect":
            requested.extend(fields_of(question)["peers"])
        return honest(question)

    with probes(asking, lying("describe", {**DESCRIBED, "address": "the.bank.example"})) as made:
        interview(made, "torch", JOB, 30.0)
    assert requested == []


def test_host_of_another_release_is_named():
    with probes(honest, lambda question: Message("found", {"protocol": PROTOCOL + 1, "address": "the.bank.example"})) as made:
        reports = interview(made, "torch", None, 30.0)
    (finding,) = [candidate for candidate in findings(reports, Here({}), started_by="ssh") if candidate.host == "node1"]
    assert (finding.state, finding.found) == ("bad", f"protocol {PROTOCOL + 1}, here {PROTOCOL}")


def test_probe_reports_undecodable_file_name():
    reply = answer(Data("digits", "/no/such/\udcff"))
    assert read_probe_answer(Data("digits", None), messages.Message.from_typed(reply)) == reply
    assert "/no/such/\\xff" in reply.text


def test_real_description_is_accepted():
    assert wrong_with_answer("describe", messages.Message.from_typed(answer(Describe("torch")))) is None


FIRST_ANSWERS = """
import json, sys, threading
from contextlib import suppress
from crosstrain.engine.protocol.messages import PROTOCOL, Message, ProtocolError
from crosstrain.engine.protocol.probe_messages import Describe, Time, read_probe_answer

sys.setswitchinterval(1e-6)  # threads take turns within the first look at a type, as they may on many cores
together = threading.Barrier(8)
described = {"kind": "found", "protocol": PROTOCOL, "identity": {"boot": "b", "network": "n"}, "host": {}, "address": None}

def check():
    together.wait()
    with suppress(ProtocolError):
        read_probe_answer(Describe("torch"), Message("found", json.dumps(described).encode()))
    read_probe_answer(Time(), Message("found", b'{"kind": "found", "seconds": 1.0}'))

threads = [threading.Thread(target=check) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_answers_are_checked_concurrently():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", FIRST_ANSWERS], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
