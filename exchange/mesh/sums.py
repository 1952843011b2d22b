"""Sums of vectors over all ranks, in place, in the order of the ranks: small vectors whole, large ones in shares.

Small, and between two ranks always: each rank sends all of its vector to each other one, and adds up. Large: rank k adds up the k-th
share of all vectors, and sends the sums to the others while further pieces arrive (a reduce-scatter and an all-gather): 2 (n − 1) / n
times the bytes of the vector leave each rank, which is the least that is possible (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import split_evenly
from ...core.direct_exchange import sent_whole
from .links import Head, Links
from .rank_order import add_in_rank_order
from .transfer import Stream, transfer

__all__ = ["RankSum"]

PIECE_BYTES = 256 << 10
"""Shares are added up in pieces: small enough for a core's cache, with the same piece of each other rank."""


class RankSum:
    """Adds up vectors of one size and type, in memory of its own: that of a vector at most, or of n − 1 where they are sent whole."""

    def __init__(self, links: Links, elements: int, kind: np.dtype[Any]) -> None:
        self._links, self._elements = links, elements
        self._size = elements * kind.itemsize
        self._peers = [(links.rank + step) % links.ranks for step in range(1, links.ranks)]
        self._in_shares = not sent_whole(self._size, links.ranks)
        self._shares = split_evenly(elements, links.ranks)
        start, stop = self._shares[links.rank]
        room = (stop - start) if self._in_shares else elements
        self._received = {peer: np.empty(room, kind) for peer in self._peers}
        self._heads = {peer: memoryview(bytearray(Head.SIZE)) for peer in self._peers}
        self._piece = max(1, PIECE_BYTES // kind.itemsize)

    def add_up(self, vector: NDArray[Any]) -> None:
        """Replace a vector by its sum over all ranks. Raises PeerLostError where one of them is lost."""
        head = self._links.head.next(self._size)
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
        """Send the others their shares, and the sums of the own one as far as it has been added up; take their sums into the vector.

        A rank can send the sums of a piece only when it has this rank's part of it, so what is overwritten has been sent.
        """
        start, stop = self._shares[self._links.rank]
        own = vector[start:stop]
        streams = {}
        for peer in self._peers:
            theirs = _bytes(vector[slice(*self._shares[peer])])
            ready = Head.SIZE + len(theirs)
            into = [self._heads[peer], _bytes(self._received[peer]), theirs]
            streams[peer] = Stream([memoryview(head), theirs, _bytes(own)], into, ready)
        added, checked = 0, False

        def advance() -> None:
            nonlocal added, checked
            arrived = min(stream.received for stream in streams.values()) - Head.SIZE
            if arrived < 0:
                return
            if not checked:
                self._check_heads(head)
                checked = True
            here = min(arrived // vector.itemsize, len(own))
            while here - added >= self._piece or added < here == len(own):
                last = min(added + self._piece, here)
                self._add(own, slice(added, last))
                for stream in streams.values():
                    stream.ready += (last - added) * vector.itemsize
                added = last

        transfer(self._links, streams, advance)

    def _check_heads(self, head: bytes) -> None:
        for peer in self._peers:
            self._links.check_head(peer, self._heads[peer], head)

    def _add(self, own: NDArray[Any], elements: slice) -> None:
        parts = [own[elements] if rank == self._links.rank else self._received[rank][elements] for rank in range(self._links.ranks)]
        add_in_rank_order(parts, parts[self._links.rank])


def _bytes(vector: NDArray[Any]) -> memoryview:
    return vector.data.cast("B") if vector.size else memoryview(b"")
