"""Restarted processes of an external launcher: exit codes of losses, and early arrivals."""

import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from untyped import Message

from crosstrain.core.errors import RunFailedError, StalledRunError, UsageError
from crosstrain.core.listener import Exchange
from crosstrain.engine.protocol.join_messages import JoinRequest, Refused, Welcome
from crosstrain.engine.protocol.messages import PROTOCOL, MessageParser
from crosstrain.engine.protocol.transport import accept
from crosstrain.launch.driver.first_failure import NodeLostError, TaskDiedError
from crosstrain.launch.driver.outcome import Outcome, mark_resumable
from crosstrain.launch.launchers.environments import Membership
from crosstrain.launch.launchers.joining import welcomed
from crosstrain.launch.launchers.machine_checks import EndingSignals

SECRET = b"0123456789abcdef"
JOIN = JoinRequest(1, 0, {}, PROTOCOL)
WELCOME = Welcome(10.0, PROTOCOL)
FOR_NOW = Refused("every process of this run has joined already", for_now=True)
FOR_EVER = Refused("its job differs")


@pytest.mark.parametrize(
    ("failure", "saved", "code"),
    [
        (NodeLostError("a node", "agent-1", 1), True, 75),
        (NodeLostError("a node", "agent-1", 1), False, 1),
        (TaskDiedError("a task", "worker-1", 1), True, 75),
        (TaskDiedError("a task", "worker-1", 1), False, 1),
        (StalledRunError("stalled", "worker-1"), True, 75),
        (StalledRunError("stalled", "worker-1"), False, 1),
        (RunFailedError("the loss is NaN"), True, 1),
        (UsageError("no such data"), True, 2),
        (None, True, 0),
    ],
)
def test_recoverable_loss_has_a_retry_exit_code(failure, saved, code):
    """Losses without a checkpoint between them may repeat: the launcher has to count them."""
    mark_resumable(failure, saved=saved)
    outcome = Outcome.from_failure(failure)
    assert (outcome.exit_code, outcome.state) == (code, "succeeded" if failure is None else "failed")


@pytest.mark.usefixtures("signals_as_before")
def test_stop_request_and_signal_count_once():
    """A cluster that ends all pods notifies the driver twice; the second must not force the end."""
    did = []
    with EndingSignals(lambda: did.append("in good order"), lambda: did.append("at once")) as signals:
        signals.ask()
        signals.ask()
        assert (signals.interrupted, did) == (True, ["in good order"])
        signal.raise_signal(signal.SIGTERM)
        assert did == ["in good order"]
        signal.raise_signal(signal.SIGTERM)
        assert did == ["in good order", "at once"]
    did.clear()
    with EndingSignals(lambda: did.append("in good order"), lambda: did.append("at once")) as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.ask()
        assert did == ["in good order"]


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("numbers", [("SIGUSR1", "SIGTERM"), ("SIGTERM", "SIGUSR1"), ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGUSR1")])
def test_slurm_notice_and_request_do_not_force_the_end(numbers):
    """Slurm signals all processes of a cancelled job and the shell forwards it, in any order."""
    did = []
    with EndingSignals(lambda: did.append("in good order"), lambda: did.append("at once")):
        for number in numbers:
            signal.raise_signal(getattr(signal, number))
        assert did == ["in good order"]
        signal.raise_signal(signal.SIGTERM)
        assert did[:2] == ["in good order", "at once"]


@contextmanager
def driver(*answers, secret=SECRET):
    """Run a driver that gives each arriving process the next of these answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for answer in answers:
                connection, _ = server.accept()
                try:
                    stream = accept(Exchange(connection, time.monotonic() + 5), secret)
                    assert MessageParser(JoinRequest).parse(stream.receive()) == JOIN
                    stream.send(answer)
                    stream.close()
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ("127.0.0.1", (server.getsockname()[1],))
        finally:
            thread.join(10)


def join(rendezvous, starts_again, seconds=10.0):
    place = Membership("a contract", 1, 0, rendezvous, {"nodes": 2}, starts_again=starts_again)
    stream, node_timeout_seconds = welcomed(JOIN, place, SECRET, seconds)
    stream.close()
    return node_timeout_seconds


def test_early_process_retries_until_the_old_run_ends():
    with driver(FOR_NOW, FOR_NOW, WELCOME) as rendezvous:
        assert join(rendezvous, True) == 10.0


@pytest.mark.parametrize(("answer", "starts_again"), [(FOR_NOW, False), (FOR_EVER, True)])
def test_unexpected_process_is_refused(answer, starts_again):
    with driver(answer) as rendezvous, pytest.raises(UsageError, match="turned this process away"):
        join(rendezvous, starts_again)


def test_driver_with_another_secret_is_retried():
    with driver(WELCOME, secret=b"another secret 0") as rendezvous, pytest.raises(UsageError, match="handshake"):
        join(rendezvous, False)
    with driver(WELCOME, secret=b"another secret 0") as rendezvous, pytest.raises(RunFailedError, match="could not be reached"):
        join(rendezvous, True, 0.5)


@pytest.mark.parametrize("says", ["nothing", "a byte now and then"])
def test_silent_driver_is_awaited_until_the_start_timeout(says):
    """As when its host dies, or it is stopped, at that moment."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            stream = accept(Exchange(server.accept()[0], time.monotonic() + 5), SECRET)
            assert MessageParser(JoinRequest).parse(stream.receive()) == JOIN
            while not over.wait(0.05):
                with suppress(OSError):  # cut off by then
                    if says != "nothing":
                        stream.writer.write(b" ")
                        stream.writer.flush()
            stream.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began = time.monotonic()
        outcome = []

        def ask():
            with pytest.raises(RunFailedError, match=r"within 1 s \(--start-timeout\): it knows the secret, but has not answered whether"):
                join(("127.0.0.1", (server.getsockname()[1],)), False, 1.0)
            outcome.append(time.monotonic() - began)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10.0)
        over.set()
        thread.join(5.0)
    assert outcome
    assert 0.9 <= outcome[0] < 8.0


def test_accepted_process_is_not_cut_off_later():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            stream = accept(Exchange(server.accept()[0], time.monotonic() + 5), SECRET)
            stream.receive()
            stream.send(WELCOME)
            time.sleep(1.5)
            stream.send(Message("alive"))
            stream.close()

        thread = threading.Thread(target=serve)
        thread.start()
        place = Membership("a contract", 1, 0, ("127.0.0.1", (server.getsockname()[1],)), {"nodes": 2})
        stream, _ = welcomed(JOIN, place, SECRET, 1.0)
        assert stream.receive() == Message("alive")
        stream.close()
        thread.join(5.0)
