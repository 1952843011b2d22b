"""Moves a state between a task and the driver: read from the task's memory, or sent as chunks of raw bytes, few of them in flight.

From the task: ``state_begin`` (which arrays, in order, and where they are in memory; counters). The driver reads them there if it can,
which costs training least, and answers ``state_taken``. Otherwise, as where the task is on another machine, it answers ``state_send`` and
gets several ``state_part``; it acknowledges each once it has dealt with it (``state_ack``), and the sender keeps at most `WINDOW` chunks
unacknowledged. Then the task says ``state_end``, after which the next state may overwrite its copy. To the task: ``load_begin``, several
``load_part``, and the command ``load``; the task puts the chunks into place as they come, without a window.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import State
from ...core.peer_memory import PeerMemory
from .codec import state_from_arrays, state_to_arrays
from .messages import Message, RawArray, Stream

__all__ = ["CHUNK_BYTES", "WINDOW", "StateReceiver", "StateSender", "load_messages"]

CHUNK_BYTES = 2**20

WINDOW = 2
"""Chunks on their way at a time: enough that neither end waits for the other, few enough to weigh nothing."""

PATIENCE_SECONDS = 1.0
"""How often a sender that waits for an answer looks whether it is to give up."""


class StateSender:
    """Sends states to the driver from a thread of its own, one after another, while the task goes on training."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free = threading.Semaphore(WINDOW)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._gone = threading.Event()

    def wait(self) -> None:
        """Wait until the last state has been read or sent: its memory may be overwritten then."""
        self._idle.wait()

    def send(self, state: State, sequence: int) -> None:
        """Begin to send a state, and return. `wait` has to come before; the arrays must not change until the next `wait`."""
        self._idle.clear()
        threading.Thread(target=self._send, args=(state, sequence), name="state", daemon=True).start()

    def answer(self, kind: str) -> None:
        """Take what the driver answers: ``state_taken``, ``state_send`` or ``state_ack``; called from another thread."""
        if kind == "state_ack":
            self._free.release()
        else:
            self._answers.put(kind)

    def abandon(self) -> None:
        """Give up what is being sent; nobody will acknowledge it."""
        self._gone.set()

    def _send(self, state: State, sequence: int) -> None:
        try:
            arrays = {key: np.ascontiguousarray(array) for key, array in state_to_arrays(state).items()}
            where = {"memory": PeerMemory.own().to_json(), "addresses": [array.ctypes.data for array in arrays.values()]}
            self._stream.send(Message("state_begin", {"sequence": sequence, **_header(state, arrays), **where}))
            answer = self._awaited_answer()
            if answer == "state_send":
                for chunk in _chunks(arrays.values()):
                    while not self._free.acquire(timeout=PATIENCE_SECONDS):
                        if self._gone.is_set():
                            return
                    self._stream.send(Message("state_part", {"sequence": sequence}, {"data": chunk}))
            if answer is not None:
                self._stream.send(Message("state_end", {"sequence": sequence}))
        except OSError:
            return  # the agent has gone; the end of its stream ends this process
        finally:
            self._idle.set()

    def _awaited_answer(self) -> str | None:
        """Return what the driver answers to ``state_begin``, None where nobody will."""
        while not self._gone.is_set():
            try:
                return self._answers.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                continue
        return None


def load_messages(state: State) -> Iterator[Message]:
    """Yield the messages that bring a state to a task, before the command ``load`` without arrays.

    They go to the first leading task alone; an agent passes each on before it reads the next.
    """
    arrays = state_to_arrays(state)
    yield Message("load_begin", _header(state, arrays))
    for chunk in _chunks(arrays.values()):
        yield Message("load_part", {}, {"data": chunk})


class StateReceiver:
    """Puts a state together from ``load_begin`` and its chunks."""

    def __init__(self, begin: Message) -> None:
        entries: Sequence[tuple[str, str, Sequence[int]]] = begin["entries"]
        self._arrays: dict[str, NDArray[Any]] = {key: np.empty(tuple(shape), np.dtype(dtype)) for key, dtype, shape in entries}
        self._updates: int = begin["updates"]
        self._scalars: Mapping[str, float] = begin["scalars"]
        self._left = [view for view in map(_bytes_of, self._arrays.values()) if len(view)]

    def add(self, chunk: Message) -> None:
        """Take the next chunk. Raises ValueError where there are more bytes than announced."""
        raw = chunk.arrays["data"]
        data = memoryview(raw.data if isinstance(raw, RawArray) else np.ascontiguousarray(raw).data).cast("B")
        while len(data):
            if not self._left:
                raise ValueError("a state has more bytes than were announced")
            into = self._left[0]
            count = min(len(into), len(data))
            into[:count] = data[:count]
            data = data[count:]
            if count == len(into):
                self._left.pop(0)
            else:
                self._left[0] = into[count:]

    def state(self) -> State:
        """Return the whole state. Raises ValueError where chunks are missing."""
        if self._left:
            raise ValueError("a state has fewer bytes than were announced")
        return state_from_arrays(self._arrays, self._updates, self._scalars)


def _header(state: State, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return what a message says of a state whose bytes come by another way."""
    entries = [[key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
    return {"entries": entries, "updates": state.updates, "scalars": dict(state.scalars)}


def _chunks(arrays: Iterable[NDArray[Any]]) -> Iterator[RawArray]:
    """Yield the bytes of all arrays, one array after another, in pieces of at most `CHUNK_BYTES`, without a copy of any."""
    for array in arrays:
        view = _bytes_of(np.ascontiguousarray(array))
        for first in range(0, len(view), CHUNK_BYTES):
            piece = view[first : first + CHUNK_BYTES]
            yield RawArray("|u1", [len(piece)], piece)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
