"""A listener that authenticates peers, bounded in time and memory for unauthenticated ones.

At most `MAX_UNPROVEN` connections are open, each in a thread for `PROOF_SECONDS`; a new one replaces the oldest, so that a flood costs a
valid peer a retry, never the start.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

PROOF_SECONDS = 5.0  # a proof takes two round trips; allows for a lost packet and a busy machine
MAX_UNPROVEN = 256  # sockets and threads: a quarter of the usual limit of 1,024 open files
REPORT_SECONDS = 1.0  # a flood must not fill a log
RETRY_SECONDS = 0.1  # the pause when the system cannot open a connection
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets, without unsent bytes or TIME_WAIT
Proven = TypeVar("Proven")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One end of a handshake over `connection`, with a `deadline` (of time.monotonic)."""

    connection: socket.socket
    deadline: float

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises TimeoutError after the deadline, OSError if the peer is gone."""
        self._limit()
        self.connection.sendall(data)

    def receive(self, count: int) -> bytes:
        """Return exactly `count` bytes. Raises TimeoutError, or ConnectionError if the peer closes."""
        received = bytearray()
        while len(received) < count:
            self._limit()
            piece = self.connection.recv(count - len(received))
            if not piece:
                raise ConnectionError("it closed the connection during the handshake")
            received += piece
        return bytes(received)

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the handshake is over")
        self.connection.settimeout(left)


@dataclass(slots=True, eq=False)
class _Stranger:
    connection: socket.socket
    host: str
    deadline: float
    shut: str | None = None
    gone: threading.Event = field(default_factory=threading.Event)


class AuthenticatingListener(Generic[Proven]):
    """Accepts connections of a listening socket, which it owns, until `close`.

    `prove` returns the identity of a peer or raises OSError. `admit` gets identity and host in the peer's thread, `report` a sentence.
    """

    def __init__(
        self,
        listening: socket.socket,
        prove: Callable[[Exchange], Proven],
        admit: Callable[[Proven, str], None],
        report: Callable[[str], None],
    ) -> None:
        self._listening, self._prove, self._admit, self._report = listening, prove, admit, report
        self._lock = threading.Lock()
        self._strangers: dict[_Stranger, None] = {}  # by deadline
        self._closing = False
        self._untold, self._told_at = 0, -REPORT_SECONDS
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and disconnect unauthenticated peers. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # some systems cannot shut down a listening socket; closing is enough there
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._acceptor.join(1.0)
        with self._lock:
            for stranger in self._strangers:
                self._shut(stranger, "the door was closed")
            self._strangers.clear()
            untold, self._untold = self._untold, 0
        if untold:
            self._report(f"turned away {untold} connections more since the last one that was named")

    def _accept(self) -> None:
        while not self._closing:
            try:
                self._listening.settimeout(self._until_the_next_deadline())
                connection, address = self._listening.accept()
            except TimeoutError:
                self._shut_the_late()
                continue
            except OSError as error:
                if not self._closing:
                    self._run_short(error)
                continue
            self._shut_the_late()
            self._meet(connection, str(address[0]))

    def _meet(self, connection: socket.socket, host: str) -> None:
        if len(self._strangers) >= MAX_UNPROVEN:
            self._shut_the_oldest(f"{MAX_UNPROVEN} others came after it before it had proved itself")
        stranger = _Stranger(connection, host, time.monotonic() + PROOF_SECONDS)
        with self._lock:
            self._strangers[stranger] = None
        try:
            threading.Thread(target=self._hear, args=(stranger,), name=f"peer {host}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._take_from_door(stranger)
            self._turn_away(stranger, str(error))

    def _hear(self, stranger: _Stranger) -> None:
        problem = "its handshake failed"
        try:
            proven = self._prove(Exchange(stranger.connection, stranger.deadline))
            problem = ""
        except OSError as error:
            problem = str(error)
        finally:
            was_there = self._take_from_door(stranger)
            if problem or not was_there:
                self._turn_away(stranger, stranger.shut or problem)
        if not problem and was_there:
            stranger.connection.settimeout(None)
            self._admit(proven, stranger.host)

    def _take_from_door(self, stranger: _Stranger) -> bool:
        with self._lock:
            was_there = stranger in self._strangers
            self._strangers.pop(stranger, None)
        return was_there

    def _until_the_next_deadline(self) -> float | None:
        with self._lock:
            first = next(iter(self._strangers), None)
        return None if first is None else max(0.001, first.deadline - time.monotonic())

    def _shut_the_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            for stranger in [stranger for stranger in self._strangers if stranger.deadline <= now]:
                del self._strangers[stranger]
                self._shut(stranger, f"it did not prove itself within {PROOF_SECONDS:g} s")

    def _shut_the_oldest(self, why: str) -> None:
        """Shut down the oldest connection and await its thread, so that threads cannot accumulate."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                self._shut(oldest, why)
        if oldest is not None:
            oldest.gone.wait(1.0)

    def _shut(self, stranger: _Stranger, why: str) -> None:
        """Wake the peer's thread, which alone closes the connection, so the descriptor is valid."""
        stranger.shut = why
        with contextlib.suppress(OSError):  # the peer has gone
            stranger.connection.shutdown(socket.SHUT_RDWR)

    def _run_short(self, error: OSError) -> None:
        self._tell(f"cannot accept a connection: {error}")
        self._shut_the_oldest("the system ran short of what a connection needs")
        time.sleep(RETRY_SECONDS)

    def _turn_away(self, stranger: _Stranger, why: str) -> None:
        with contextlib.suppress(OSError):  # the peer has gone
            stranger.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        stranger.connection.close()
        stranger.gone.set()
        if not self._closing:
            self._tell(f"turned away a connection from {stranger.host}: {why}")

    def _tell(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < REPORT_SECONDS:
                self._untold += 1
                return
            untold, self._untold, self._told_at = self._untold, 0, now
        with contextlib.suppress(OSError):  # reports are unread; other peers still connect
            self._report(text + (f" (and {untold} more since the last one that was named)" if untold else ""))
