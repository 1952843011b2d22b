"""Memory of another process is read exactly, and unreadable memory is reported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from crosstrain.engine.protocol.state_transfer import PeerMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process read another's memory")

HOLDER = """
import json, sys
import msgspec
import numpy as np
from crosstrain.engine.protocol.state_transfer import PeerMemory

held = np.random.default_rng(3).integers(0, 256, 3_000_001, np.uint8)
print(json.dumps([msgspec.to_builtins(PeerMemory.of_this_process()), held.ctypes.data, len(held)]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Start a child that holds random bytes; return its memory, their address and number."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        fields, address, size = json.loads(child.stdout.readline())
        yield child, PeerMemory(**fields), address, size
        child.stdin.close()


def test_all_bytes_are_read(holder):
    _, memory, address, size = holder
    assert memory.readable([address, address + size - 1])
    buffer = bytearray(size)
    memory.read(address, memoryview(buffer))
    np.testing.assert_array_equal(np.frombuffer(buffer, np.uint8), np.random.default_rng(3).integers(0, 256, size, np.uint8))
    part = bytearray(b"x" * 10)
    memory.read(address + 1_000_000, memoryview(part)[2:8])
    assert bytes(part) == b"xx" + bytes(buffer[1_000_000:1_000_006]) + b"xx"


def test_own_memory_is_read():
    held = np.arange(1000)
    buffer = bytearray(held.nbytes)
    assert PeerMemory.of_this_process().readable([held.ctypes.data])
    PeerMemory.of_this_process().read(held.ctypes.data, memoryview(buffer))
    assert bytes(buffer) == held.tobytes()


def test_unmapped_address_is_refused(holder):
    _, memory, address, _ = holder
    assert not memory.readable([address, 16])
    with pytest.raises(OSError, match=f"memory of process {memory.pid} cannot be read"):
        memory.read(16, memoryview(bytearray(8)))


def test_partly_mapped_range_is_read_to_its_end(holder):
    """It is read up to its end, and refused from there."""
    _, memory, address, _ = holder
    with pytest.raises(OSError, match="cannot be read"):
        memory.read(address, memoryview(bytearray(2**30)))


def test_reused_process_id_is_refused(holder):
    """As on another machine: what lies at the mark's address is not the mark."""
    _, memory, address, _ = holder
    wrong_process = PeerMemory(os.getpid(), memory.mark_address, memory.mark)
    assert not wrong_process.readable([])
    assert not PeerMemory(memory.pid, memory.mark_address, "00" * 16).readable([address])


def test_ended_process_is_refused(holder):
    child, memory, address, _ = holder
    child.kill()
    child.wait()
    assert not memory.readable([address])
    with pytest.raises(ProcessLookupError):
        memory.read(address, memoryview(bytearray(8)))
