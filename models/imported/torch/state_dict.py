"""The process that reads a ``state_dict`` from standard input, without running code.

``python -m crosstrain.models.imported.torch.state_dict BYTES`` writes an npz file to standard output: the names as JSON, then the arrays;
or it ends with exit code 2 after what is wrong. Tensors may have that many bytes in all.
"""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from ....core.errors import UsageError

_ADVICE = "Save torch.save(module.state_dict(), FILE), or safetensors."
_FACTOR = 8  # of the tensors' bytes in memory: the file, its tensors, and the answer while it grows
_BESIDES_BYTES = 256 << 20


def main() -> int:
    """Answer one request; return the exit code."""
    most = int(sys.argv[1])
    torch.set_num_threads(1)
    content = sys.stdin.buffer.read()
    _limit_memory(_FACTOR * most + _BESIDES_BYTES)
    try:
        answer = packed(read_state_dict(content, most))
    except UsageError as error:
        answer, code = str(error).encode(errors="backslashreplace"), error.exit_code
    else:
        code = 0
    sys.stdout.buffer.write(answer)
    return code


def _limit_memory(further_bytes: int) -> None:
    """Limit this process's private memory to what it has and some more. Linux."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + further_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def read_state_dict(content: bytes, most: int) -> dict[str, torch.Tensor]:
    """Return a file's tensors by name. Raises UsageError, whose text continues the file's name."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises any kind for damaged files
        reason = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split()).partition(". ")[0][:200]
        raise UsageError(f"is no state_dict that torch reads without running code ({type(error).__name__}: {reason}). {_ADVICE}") from error
    if not isinstance(state, Mapping) or not state:
        raise UsageError(f"holds {type(state).__name__}, no state_dict. {_ADVICE}")
    if strange := [name for name, value in state.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))]:
        shown = ", ".join(repr(name)[:60] for name in strange[:3])
        raise UsageError(f"is no state_dict: {len(strange):,} of its {len(state):,} entries are no tensors, such as {shown}. {_ADVICE}")
    if (total := sum(value.numel() * value.element_size() for value in state.values())) > most:
        raise UsageError(f"has tensors of {total:,} bytes, and at most {most:,} fit the model. {_ADVICE}")
    return dict(state)


def packed(state: Mapping[str, torch.Tensor]) -> bytes:
    """Return tensors as an npz file, bfloat16 as float32.

    Raises UsageError for other types without arrays.
    """
    try:
        names = np.frombuffer(msgspec.json.encode(list(state)), np.uint8)
        arrays = [(value.float() if value.dtype == torch.bfloat16 else value).detach().numpy() for value in state.values()]
        file = io.BytesIO()
        np.savez(file, names, *arrays)
    except (TypeError, RuntimeError, MemoryError, UnicodeEncodeError) as error:
        raise UsageError(f"has tensors that are no plain arrays ({type(error).__name__}: {str(error)[:200]}). {_ADVICE}") from error
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
