"""Tasks that were lost and are started anew by themselves: from when each is to be started, and until when it has to be ready."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AbsentTasks"]


@dataclass(slots=True)
class _Absence:
    start_at: float
    start_seconds: float
    ready_by: float | None = None


class AbsentTasks:
    """Each is absent from `begin` until `end`. All moments are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._absent: dict[str, _Absence] = {}

    def __contains__(self, task: object) -> bool:
        return task in self._absent

    def begin(self, task: str, start_at: float, start_seconds: float) -> None:
        """A task is lost, and to be started at that moment; its start may take so long. Another loss of it takes the place of the first."""
        self._absent[task] = _Absence(start_at, start_seconds)

    def due(self, now: float) -> list[tuple[str, float]]:
        """Return the tasks that are to be started now, each once, with how long a start may take."""
        found = [(task, absence) for task, absence in self._absent.items() if absence.ready_by is None and absence.start_at <= now]
        for _, absence in found:
            absence.ready_by = now + absence.start_seconds
        return [(task, absence.start_seconds) for task, absence in found]

    def overdue(self, now: float) -> str | None:
        """Return a task that was started and is not ready after all the time that it may take, None where there is none."""
        return next((task for task, absence in self._absent.items() if absence.ready_by is not None and now > absence.ready_by), None)

    @property
    def started(self) -> list[str]:
        """The tasks that have been started and are not ready yet."""
        return [task for task, absence in self._absent.items() if absence.ready_by is not None]

    def end(self, task: str) -> None:
        """A task is ready again."""
        del self._absent[task]
