"""Processes, progress and records of a run during injected faults, from its growing files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil

LOOK_SECONDS = 0.005


class Watched:
    """The run in the directory `path`, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, name: str, last_bytes: int = 200_000) -> list[dict[str, Any]]:
        """The last whole lines of a file of records."""
        try:
            with (self.path / name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - last_bytes))
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        return [json.loads(line) for line in whole[1 if size > last_bytes else 0 :]]

    @property
    def step(self) -> int:
        """Number of recorded updates."""
        records = self.lines("steps.jsonl", 20_000)
        return records[-1]["step"] + records[-1]["count"] if records else 0

    def events(self, name: str) -> list[dict[str, Any]]:
        """The details of all events of a name."""
        return [line["detail"] for line in self.lines("events.jsonl", 10_000_000) if line["event"] == name]

    def failures(self) -> list[tuple[bool, str]]:
        """Each failure that was survived: whether only one task restarted, and the cause."""
        lines = [line for line in self.lines("events.jsonl", 10_000_000) if line["event"] in ("attempt_failed", "task_failed")]
        return [(line["event"] == "task_failed", line["detail"]["cause"]) for line in lines]

    def tasks(self) -> dict[str, tuple[int, int]]:
        """Node and process number of each live task by name, from the last samples."""
        tasks: dict[str, tuple[int, int]] = {}
        for record in self.lines("system.jsonl"):
            for task in record["tasks"]:
                tasks[task["task"]] = (record["node"], task["pid"])
        return {name: where for name, where in tasks.items() if psutil.pid_exists(where[1])}

    def agent(self, node: int, driver: int) -> int:
        """The process of a node's agent, a child of the driver."""
        for child in psutil.Process(driver).children():
            command = child.cmdline()
            if "crosstrain.launch.node.agent" in command and command[command.index("--node") + 1] == str(node):
                return child.pid
        raise LookupError(f"no agent of node {node}")

    def wait(self, holds: Any, seconds: float) -> float | None:
        """Wait until `holds()`; return how many seconds that took, None where it never did."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if holds():
                return time.monotonic() - began
            time.sleep(LOOK_SECONDS)
        return None
