"""Peak memory of all processes of a run, as the kernel keeps it for each of them (VmHWM)."""

from __future__ import annotations

from pathlib import Path


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process's program; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class TreeMemory:
    """Adds up the peaks of a process and its descendants.

    Peaks do not fall while a process lives, so that looking now and then finds all but what happens after the last look.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._most: int | None = None

    @property
    def most_bytes(self) -> int | None:
        """The largest sum at any look so far; None where nothing was seen."""
        return self._most

    def look(self) -> None:
        """Look at every process that is there now."""
        total = sum(peak_bytes(pid) for pid in _with_descendants(self._pid))
        if total:
            self._most = max(total, self._most or 0)


def _with_descendants(pid: int) -> list[int]:
    """Return a process and its descendants.

    If the kernel lists no children, return the process alone.
    """
    pids = [pid]
    for parent in pids:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
        except FileNotFoundError:
            continue
        for task in tasks:
            try:
                pids += [int(child) for child in (task / "children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return pids
