"""Reading the memory of another process of the same machine and user (Linux, process_vm_readv(2)).

The system allows it to an ancestor, and to root; some containers and hardened systems allow it to nobody. Whoever reads asks first,
with `PeerMemory.readable`, and has another way.

What to read is the peer's word, and one that lies can name any process of the user's, with a mark that it knows to lie there. So whoever
reads has to know from somebody else that the peer is of this machine, where it can read that memory itself.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

__all__ = ["PeerMemory"]

MARK_BYTES = 16


class _Piece(ctypes.Structure):
    """A piece of memory, as the system's ``struct iovec`` has it."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory of one process. It is recognised by a random `mark` that lies at an address: ids mean nothing in another namespace."""

    pid: int
    mark_address: int
    mark: str

    @classmethod
    def own(cls) -> Self:
        """Return this process's memory, for another process."""
        mark = _own_mark()
        return cls(os.getpid(), ctypes.addressof(mark), bytes(mark).hex())

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return what `to_json` was made of."""
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return fields for a message."""
        return asdict(self)

    def readable(self, addresses: Iterable[int]) -> bool:
        """Return whether this process can read that process, and there the byte at each of these addresses."""
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
        """Fill `into`, which is writable, with the bytes from `address` on.

        Raises OSError where the system refuses, nothing is there, or the process is gone.
        """
        own = ctypes.addressof(ctypes.c_char.from_buffer(into))
        done = 0
        while done < len(into):
            target, source = (_Piece(begin + done, len(into) - done) for begin in (own, address))
            count = _libc().process_vm_readv(self.pid, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"the memory of process {self.pid} cannot be read ({os.strerror(code)})")
            done += count


@cache
def _own_mark() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(secrets.token_bytes(MARK_BYTES), MARK_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    """Return the system's library; while it is called other threads go on."""
    library = ctypes.CDLL(None, use_errno=True)
    piece, unsigned = ctypes.POINTER(_Piece), ctypes.c_ulong
    library.process_vm_readv.argtypes = (ctypes.c_int, piece, unsigned, piece, unsigned, unsigned)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library
