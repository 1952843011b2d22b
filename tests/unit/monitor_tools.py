"""Real processes for the monitor's tests: Python programs that report and wait."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator

BURN = """
import os, sys, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))

def say(text="ready"):
    print(text, flush=True)
    return sys.stdin.readline()
"""


class Program:
    """A child program. `line` reads its output, `go` lets it continue, `reap` waits for its end."""

    def __init__(self, code: str, *arguments: str) -> None:
        source = BURN + textwrap.dedent(code)
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._popen.pid

    def line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def has_output(self) -> bool:
        return bool(select.select([self._popen.stdout], [], [], 0)[0])

    def go(self, text: str = "") -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{text}\n")
        self._popen.stdin.flush()

    def reap(self) -> resource.struct_rusage:
        """Wait for the end as an agent does, and return the kernel's resource usage."""
        _, status, usage = os.wait4(self.pid, 0)
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        return usage

    def end(self) -> None:
        if self._popen.returncode is None:
            self._popen.kill()
            self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def program(code: str, *arguments: str) -> Iterator[Program]:
    started = Program(code, *arguments)
    try:
        yield started
    finally:
        started.end()


def charged_seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime
