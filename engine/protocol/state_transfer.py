"""Transfer of states between a task and the driver, through the task's memory or in chunks.

From the task: ``state_begin`` with addresses. The driver answers ``state_taken`` where it can read them, which costs training least, else
``state_send``, and acknowledges each ``state_part``. To the task: ``load_begin``, ``load_part``, and the command ``load``.
"""

from __future__ import annotations

import ctypes
import os
import queue
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...backends.base import State
from ...records.store.schema import Count
from .messages import MAX_DIMENSIONS, RawArray, Stream
from .node_messages import Name, Pid, TaskReport, ToTask

Array = NDArray[Any]
MARK_BYTES = 16
CHUNK_BYTES = 2**20
WINDOW = 2  # unacknowledged chunks: neither end waits, and memory stays small
PATIENCE_SECONDS = 1.0  # interval at which a waiting sender checks for abandonment
Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Entry = tuple[Name, Name, Annotated[list[Count], msgspec.Meta(max_length=MAX_DIMENSIONS)]]  # key, numpy's type and shape of an array
Scalars = Annotated[dict[Name, float], msgspec.Meta(max_length=1000)]


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class PeerMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of one process, identified by a random `mark`, as ids differ by namespace."""

    pid: Pid
    mark_address: Address
    mark: Name

    @classmethod
    def of_this_process(cls) -> Self:
        """Return this process's memory."""
        mark = _process_mark()
        return cls(os.getpid(), ctypes.addressof(mark), bytes(mark).hex())

    def readable(self, addresses: Iterable[int]) -> bool:
        """Return whether this process can read the other one's memory at these addresses.

        A random mark at a known address shows that the process id is the right one.
        """
        if sys.platform != "linux":
            return False
        mark = bytearray(MARK_BYTES)
        try:
            self.read(self.mark_address, memoryview(mark))
            for address in addresses:
                self.read(address, memoryview(bytearray(1)))
        except OSError:
            return False
        return mark.hex() == self.mark

    def read(self, address: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `address` on. Raises OSError, also if the process is gone."""
        destination = ctypes.addressof(ctypes.c_char.from_buffer(into))
        done = 0
        while done < len(into):
            target, source = (_Piece(begin + done, len(into) - done) for begin in (destination, address))
            count = _libc().process_vm_readv(self.pid, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"the memory of process {self.pid} cannot be read ({os.strerror(code)})")
            done += count


@cache
def _process_mark() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(secrets.token_bytes(MARK_BYTES), MARK_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library; other threads run during its calls."""
    library = ctypes.CDLL(None, use_errno=True)
    piece, unsigned = ctypes.POINTER(_Piece), ctypes.c_ulong
    library.process_vm_readv.argtypes = (ctypes.c_int, piece, unsigned, piece, unsigned, unsigned)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


class StateBegin(TaskReport):
    """A state to send, by its `entries`, and their addresses in the task's memory."""

    ARRIVES: ClassVar = "command"

    sequence: Count
    entries: list[Entry]
    updates: Count
    scalars: Scalars
    memory: PeerMemory
    addresses: list[Address]


class StatePart(TaskReport):
    """A chunk of a state."""

    ARRIVES: ClassVar = "command"
    ARRAYS: ClassVar = {"data": ("|u1", 1)}
    MAX_BYTES: ClassVar = CHUNK_BYTES

    sequence: Count


class StateEnd(TaskReport):
    """The state was taken or sent."""

    ARRIVES: ClassVar = "command"

    sequence: Count


class StateAnswer(ToTask):
    """Answer to `StateBegin`, whether the driver reads memory or wants chunks, or to a chunk."""

    answer: Literal["taken", "send", "ack"]


class LoadBegin(ToTask):
    """A state for the first leading task, which chunks and ``load`` follow."""

    entries: list[Entry]
    updates: int
    scalars: dict[str, float]


class LoadPart(ToTask):
    """A chunk of that state."""

    ARRAYS: ClassVar = {"data": ("|u1", 1)}


def state_to_arrays(state: State) -> dict[str, Array]:
    """Return arrays by key, without copies.

    The keys are ``parameters/NAME``, ``buffers/NAME``, ``slots/SLOT/NAME``, in this order.
    """
    arrays: dict[str, Array] = {f"parameters/{name}": value for name, value in state.parameters.items()}
    arrays.update({f"buffers/{name}": value for name, value in state.buffers.items()})
    for slot, values in state.slots.items():
        arrays.update({f"slots/{slot}/{name}": value for name, value in values.items()})
    return arrays


def state_from_arrays(arrays: Mapping[str, Array], updates: int, scalars: Mapping[str, float] | None = None) -> State:
    """Return the state of arrays with `state_to_arrays`' keys. Raises ValueError for others."""
    parameters: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    slots: dict[str, dict[str, Array]] = {}
    for key, value in arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "parameters":
            parameters[rest] = value
        elif kind == "buffers":
            buffers[rest] = value
        elif kind == "slots":
            slot, _, name = rest.partition("/")
            slots.setdefault(slot, {})[name] = value
        else:
            raise ValueError(f"an array of a state is called {key!r}")
    return State(parameters, slots, updates, buffers, dict(scalars or {}))


class StateSender:
    """Sender of states to the driver, in its own thread while the task trains."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free = threading.Semaphore(WINDOW)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._gone = threading.Event()

    def wait(self) -> None:
        """Wait until the last state has been sent and its memory may be overwritten."""
        self._idle.wait()

    def send(self, state: State, sequence: int) -> None:
        """Start sending a state after `wait`; the arrays must not change until the next `wait`."""
        self._idle.clear()
        threading.Thread(target=self._send, args=(state, sequence), name="state", daemon=True).start()

    def answer(self, answer: str) -> None:
        """Handle a `StateAnswer` of the driver, from another thread."""
        if answer == "ack":
            self._free.release()
        else:
            self._answers.put(answer)

    def abandon(self) -> None:
        """Abandon the transfer, which is never acknowledged."""
        self._gone.set()

    def _send(self, state: State, sequence: int) -> None:
        try:
            arrays = {key: np.ascontiguousarray(array) for key, array in state_to_arrays(state).items()}
            addresses = [array.ctypes.data for array in arrays.values()]
            self._stream.send(
                StateBegin(sequence=sequence, **_header(state, arrays), memory=PeerMemory.of_this_process(), addresses=addresses)
            )
            answer = self._awaited_answer()
            if answer == "send":
                for chunk in _chunks(arrays.values()):
                    while not self._free.acquire(timeout=PATIENCE_SECONDS):
                        if self._gone.is_set():
                            return
                    self._stream.send(StatePart(sequence=sequence, arrays={"data": chunk}))
            if answer is not None:
                self._stream.send(StateEnd(sequence=sequence))
        except OSError:
            return  # the agent is gone, so this process ends
        finally:
            self._idle.set()

    def _awaited_answer(self) -> str | None:
        while not self._gone.is_set():
            with suppress(queue.Empty):
                return self._answers.get(timeout=PATIENCE_SECONDS)
        return None


def load_messages(state: State) -> Iterator[LoadBegin | LoadPart]:
    """Yield the messages of a state for the first leading task, before ``load`` without arrays."""
    arrays = state_to_arrays(state)
    yield LoadBegin(**_header(state, arrays))
    for chunk in _chunks(arrays.values()):
        yield LoadPart(arrays={"data": chunk})


class StateReceiver:
    """State received in chunks after its description."""

    def __init__(self, begin: LoadBegin | StateBegin) -> None:
        self._arrays: dict[str, Array] = {key: np.empty(tuple(shape), np.dtype(dtype)) for key, dtype, shape in begin.entries}
        self._begin = begin
        self._left = [view for view in map(_bytes_of, self._arrays.values()) if len(view)]

    def add(self, chunk: LoadPart | StatePart) -> None:
        """Add a chunk. Raises ValueError for more bytes than announced."""
        data = memoryview(chunk.arrays["data"].data).cast("B")
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
        return state_from_arrays(self._arrays, self._begin.updates, self._begin.scalars)


def _header(state: State, arrays: Mapping[str, Array]) -> dict[str, Any]:
    entries = [[key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
    return {"entries": entries, "updates": state.updates, "scalars": dict(state.scalars)}


def _chunks(arrays: Iterable[Array]) -> Iterator[RawArray]:
    """Yield the bytes of all arrays in chunks of at most `CHUNK_BYTES`, without copies."""
    for array in arrays:
        view = _bytes_of(np.ascontiguousarray(array))
        for first in range(0, len(view), CHUNK_BYTES):
            piece = view[first : first + CHUNK_BYTES]
            yield RawArray("|u1", [len(piece)], piece)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
