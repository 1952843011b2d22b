"""Probe of a framework in a child process, as an imported framework cannot be unloaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from ..backends.base import Availability
from ..backends.loading import declared_capabilities, load_backend
from ..core.errors import UsageError
from ..core.plugins import available, find, missing_packages
from ..core.process import child_working_directory, python

TIMEOUT_SECONDS = 120.0  # beyond a cold import from a slow disk, the framework hangs


def probe(name: str) -> Availability:
    """Probe a backend in a child process; a failure is an answer.

    Raises UsageError for an unknown name.
    """
    plugin = find("backend", name)
    if not plugin.installed:
        return Availability(name, None, problem=f"the package {plugin.requires} is not installed", hint=plugin.install)
    try:
        child = subprocess.run(
            python(__name__, name),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
            cwd=child_working_directory(),
        )
    except subprocess.TimeoutExpired:
        hint = f"ask again while the machine has less to do; if that does not help, {_reinstall(plugin.install)}"
        return Availability(name, None, problem=f"no answer within {TIMEOUT_SECONDS:g} s", hint=hint)
    if child.returncode != 0:
        return Availability(name, None, problem=_death(child), hint=_reinstall(plugin.install))
    try:
        answer = json.loads(child.stdout)
    except ValueError:  # the framework's code ended the process without an error
        return Availability(name, None, problem=_death(child), hint=_reinstall(plugin.install))
    return Availability(**{**answer, "name": name, "devices": tuple(answer["devices"])})


def probe_all(names: Iterable[str] | None = None) -> list[Availability]:
    """Probe several backends (default: all known ones) concurrently, in the order of the names."""
    wanted = list(available("backend") if names is None else names)
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        return list(pool.map(probe, wanted))


def _reinstall(install: str) -> str:
    return f"install it again: {install}" if install else "see the plugin's own documentation"


def _death(child: subprocess.CompletedProcess[str]) -> str:
    cause = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    lines = child.stderr.strip().splitlines()
    return f"probing it ended with {cause}{f': {lines[-1]}' if lines else ''}"


def main(name: str) -> None:
    """Probe in this process.

    The framework's output goes to standard error, as standard output is JSON.
    """
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        capabilities = declared_capabilities(find("backend", name))
        missing = missing_packages(capabilities.packages)
        packages = f"the packages {', '.join(missing)} are" if len(missing) > 1 else f"the package {', '.join(missing)} is"
        absent = Availability(name, None, problem=f"{packages} not installed", hint=capabilities.install or None)
        availability = absent if missing else load_backend(name).probe()
    except UsageError as error:
        sys.exit(str(error))
    with os.fdopen(answer_to, "w", encoding="utf-8") as stream:
        json.dump(asdict(availability), stream)


if __name__ == "__main__":
    main(sys.argv[1])
