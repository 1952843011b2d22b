"""All-reduce of vectors in rank order, and buckets of a backward pass's gradients."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import sends_whole_vectors, split_evenly
from .peer_links import HEAD_BYTES, Links, Stream, transfer

BUCKET_BYTES = 4 << 20  # large enough for a link's speed, small enough to overlap with computing


def cut_into_buckets(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return the places of gradients, last first, in buckets closed at `BUCKET_BYTES`.

    No gradient is cut.
    """
    buckets: list[list[int]] = []
    room = 0
    for place in reversed(range(len(sizes_bytes))):
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(place)
        room -= sizes_bytes[place]
    return buckets


class BucketSums:
    """All-reduce of vectors in a thread, in the same order on all ranks.

    No other `all_reduce` may run between `submit` and `wait`.
    """

    def __init__(self, all_reduce: Callable[[NDArray[Any]], None]) -> None:
        self._all_reduce = all_reduce
        self._todo: queue.SimpleQueue[NDArray[Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._outstanding = 0
        self._thread = threading.Thread(target=self._run, name="direct exchange", daemon=True)
        self._thread.start()

    def submit(self, vector: NDArray[Any]) -> None:
        """Replace a contiguous vector by its sum over all ranks.

        It must not be used before `wait` has returned.
        """
        self._outstanding += 1
        self._todo.put(vector)

    def wait(self) -> None:
        """Wait for everything submitted.

        Raises the first failure, after which all later vectors fail too.
        """
        failure = None
        while self._outstanding:
            failure = failure or self._done.get()
            self._outstanding -= 1
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        failed: Exception | None = None
        while (vector := self._todo.get()) is not None:
            if failed is None:
                try:
                    self._all_reduce(vector)
                except Exception as error:  # noqa: BLE001 - handed to who waits
                    failed = error
            self._done.put(failed)


def add_in_rank_order(parts: Sequence[NDArray[Any]], into: NDArray[Any]) -> None:
    """Write ((parts[0] + parts[1]) + parts[2]) + … into `into`, maybe one of them.

    The first of several is overwritten.
    """
    total, *rest = parts
    if not rest:
        if total is not into:
            np.copyto(into, total)
        return
    for part in rest[:-1]:
        np.add(total, part, out=total)
    np.add(total, rest[-1], out=into)


# Large vectors of three or more ranks are reduce-scattered, then gathered: 2 (n − 1) / n times the vector's bytes leave each rank, the
# minimum (Patarasuk and Yuan 2009).

PIECE_BYTES = 256 << 10  # small enough for a core's cache, with the same piece of each other rank


class AllReduce:
    """All-reduce of vectors of one size and type.

    Its memory is at most a vector, or n − 1 if they are sent whole.
    """

    def __init__(self, links: Links, elements: int, kind: np.dtype[Any]) -> None:
        self._links, self._elements = links, elements
        self._size = elements * kind.itemsize
        self._peers = [(links.rank + step) % links.ranks for step in range(1, links.ranks)]
        self._in_shares = not sends_whole_vectors(self._size, links.ranks)
        self._shares = split_evenly(elements, links.ranks)
        start, stop = self._shares[links.rank]
        room = (stop - start) if self._in_shares else elements
        self._received = {peer: np.empty(room, kind) for peer in self._peers}
        self._heads = {peer: memoryview(bytearray(HEAD_BYTES)) for peer in self._peers}
        self._piece = max(1, PIECE_BYTES // kind.itemsize)

    def all_reduce(self, vector: NDArray[Any]) -> None:
        """Replace a vector by its sum over all ranks. Raises PeerLostError."""
        head = self._links.next_head(self._size)
        if self._in_shares:
            self._add_shares(vector, head)
        else:
            self._add_whole(vector, head)

    def _add_whole(self, vector: NDArray[Any], head: bytes) -> None:
        out = [memoryview(head), _bytes(vector)]
        transfer(self._links, {peer: Stream(out, [self._heads[peer], _bytes(self._received[peer])]) for peer in self._peers})
        self._check_heads(head)
        self._add(vector, slice(0, self._elements))

    def _add_shares(self, vector: NDArray[Any], head: bytes) -> None:
        """Exchange shares; a rank sums a piece only after it has this rank's part."""
        start, stop = self._shares[self._links.rank]
        share = vector[start:stop]
        streams = {}
        for peer in self._peers:
            theirs = _bytes(vector[slice(*self._shares[peer])])
            ready = HEAD_BYTES + len(theirs)
            into = [self._heads[peer], _bytes(self._received[peer]), theirs]
            streams[peer] = Stream([memoryview(head), theirs, _bytes(share)], into, ready)
        added, checked = 0, False

        def advance() -> None:
            nonlocal added, checked
            arrived = min(stream.received for stream in streams.values()) - HEAD_BYTES
            if arrived < 0:
                return
            if not checked:
                self._check_heads(head)
                checked = True
            here = min(arrived // vector.itemsize, len(share))
            while here - added >= self._piece or added < here == len(share):
                last = min(added + self._piece, here)
                self._add(share, slice(added, last))
                for stream in streams.values():
                    stream.ready += (last - added) * vector.itemsize
                added = last

        transfer(self._links, streams, advance)

    def _check_heads(self, head: bytes) -> None:
        for peer in self._peers:
            self._links.check_head(peer, self._heads[peer], head)

    def _add(self, share: NDArray[Any], elements: slice) -> None:
        parts = [share[elements] if rank == self._links.rank else self._received[rank][elements] for rank in range(self._links.ranks)]
        add_in_rank_order(parts, parts[self._links.rank])


def _bytes(vector: NDArray[Any]) -> memoryview:
    return vector.data.cast("B") if vector.size else memoryview(b"")
