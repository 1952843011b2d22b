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
class _Peer:
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
        self._peers: dict[_Peer, None] = {}  # by deadline
        self._closing = False
        self._unreported, self._reported_at = 0, -REPORT_SECONDS
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
            for peer in self._peers:
                self._shut(peer, "the door was closed")
            self._peers.clear()
            unreported, self._unreported = self._unreported, 0
        if unreported:
            self._report(f"turned away {unreported} connections more since the last one that was named")

    def _accept(self) -> None:
        while not self._closing:
            try:
                self._listening.settimeout(self._seconds_to_next_deadline())
                connection, address = self._listening.accept()
            except TimeoutError:
                self._shut_late_peers()
                continue
            except OSError as error:
                if not self._closing:
                    self._wait_for_resources(error)
                continue
            self._shut_late_peers()
            self._start_handshake(connection, str(address[0]))

    def _start_handshake(self, connection: socket.socket, host: str) -> None:
        if len(self._peers) >= MAX_UNPROVEN:
            self._shut_oldest_peer(f"{MAX_UNPROVEN} others came after it before it had proved itself")
        peer = _Peer(connection, host, time.monotonic() + PROOF_SECONDS)
        with self._lock:
            self._peers[peer] = None
        try:
            threading.Thread(target=self._run_handshake, args=(peer,), name=f"peer {host}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._forget(peer)
            self._reject(peer, str(error))

    def _run_handshake(self, peer: _Peer) -> None:
        problem = "its handshake failed"
        try:
            proven = self._prove(Exchange(peer.connection, peer.deadline))
            problem = ""
        except OSError as error:
            problem = str(error)
        finally:
            was_pending = self._forget(peer)
            if problem or not was_pending:
                self._reject(peer, peer.shut or problem)
        if not problem and was_pending:
            peer.connection.settimeout(None)
            self._admit(proven, peer.host)

    def _forget(self, peer: _Peer) -> bool:
        with self._lock:
            was_pending = peer in self._peers
            self._peers.pop(peer, None)
        return was_pending

    def _seconds_to_next_deadline(self) -> float | None:
        with self._lock:
            first = next(iter(self._peers), None)
        return None if first is None else max(0.001, first.deadline - time.monotonic())

    def _shut_late_peers(self) -> None:
        now = time.monotonic()
        with self._lock:
            for peer in [peer for peer in self._peers if peer.deadline <= now]:
                del self._peers[peer]
                self._shut(peer, f"it did not prove itself within {PROOF_SECONDS:g} s")

    def _shut_oldest_peer(self, why: str) -> None:
        """Shut down the oldest connection and await its thread, so that threads cannot accumulate."""
        with self._lock:
            oldest = next(iter(self._peers), None)
            if oldest is not None:
                del self._peers[oldest]
                self._shut(oldest, why)
        if oldest is not None:
            oldest.gone.wait(1.0)

    def _shut(self, peer: _Peer, why: str) -> None:
        """Wake the peer's thread, which alone closes the connection, so the descriptor is valid."""
        peer.shut = why
        with contextlib.suppress(OSError):  # the peer has gone
            peer.connection.shutdown(socket.SHUT_RDWR)

    def _wait_for_resources(self, error: OSError) -> None:
        self._report_seldom(f"cannot accept a connection: {error}")
        self._shut_oldest_peer("the system ran short of what a connection needs")
        time.sleep(RETRY_SECONDS)

    def _reject(self, peer: _Peer, why: str) -> None:
        with contextlib.suppress(OSError):  # the peer has gone
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        peer.connection.close()
        peer.gone.set()
        if not self._closing:
            self._report_seldom(f"turned away a connection from {peer.host}: {why}")

    def _report_seldom(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._reported_at < REPORT_SECONDS:
                self._unreported += 1
                return
            unreported, self._unreported, self._reported_at = self._unreported, 0, now
        with contextlib.suppress(OSError):  # reports are unread; other peers still connect
            self._report(text + (f" (and {unreported} more since the last one that was named)" if unreported else ""))
