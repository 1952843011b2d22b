"""Pytest suite for launchers; subclass `LauncherConformance` in a pytest module."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar

import pytest

from ..core.process import python
from ..launch.launchers.base import Launcher, NodeChannel
from ..launch.launchers.host_list import LooksAtHosts
from .runs import Launched, await_end, greetings, stop, visible_agents

START_SECONDS = 120.0  # for agents' greetings
END_SECONDS = 15.0  # for the end of agents, which end their tasks first


class LauncherConformance:
    """Cases for a launcher that starts the nodes from the driver's process.

    Name the launcher and two or more nodes::

        class TestMyLauncher(LauncherConformance):
            launcher = "mine"
            hosts = ("node0", "node1")
            unknown_host = "nowhere"

    Every case starts real agents without training; local ones are checked after their end, some after SIGSTOP.

    - `launcher`: its name; `hosts`: as of ``--hosts``; `options`: other options about nodes, by name; `settings`: fields of the job, with
      the number of ``nodes`` without hosts.
    - `unknown_host`: name of a host that does not exist; None skips the case.
    """

    launcher: ClassVar[str]
    hosts: ClassVar[Sequence[str]] = ()
    options: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    unknown_host: ClassVar[str | None] = None

    @classmethod
    def launched(cls, **changes: Any) -> Launched:
        """Return the launch request."""
        return Launched(**{"launcher": cls.launcher, "hosts": cls.hosts, "options": cls.options, "settings": cls.settings, **changes})

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[tuple[Launcher, list[NodeChannel], list[int]]]:
        """Start the nodes; yield launcher, channels and visible agents' processes. Ends them."""
        launcher = cls.launched().make()
        watchdog = threading.Timer(START_SECONDS, launcher.kill)  # bounds every wait
        watchdog.start()
        try:
            launcher.prestart()
            channels = list(launcher.start())
            assert [channel.node for channel in channels] == list(range(len(channels)))
            assert list(launcher.start()) == channels, "a second `start` has to return the same channels"
            greeted = greetings(channels)
            for channel, hello in zip(channels, greeted, strict=True):
                assert hello.node == channel.node
                assert channel.address or hello.address, f"nobody says the address of node {channel.node}"
            watchdog.cancel()
            yield launcher, channels, visible_agents(greeted)
        finally:
            watchdog.cancel()
            launcher.close()

    def test_agents_greet_and_end_with_the_launcher(self) -> None:
        """Each node has an agent; `close` ends all, and does nothing a second time."""
        with self.started() as (launcher, channels, pids):
            launcher.check()
            launcher.ended(0)
            launcher.close()
            assert await_end(pids, 1.0) == []
            for channel in channels:
                if channel.process is not None:
                    channel.process.wait(1.0)
            launcher.close()

    def test_an_agent_that_is_cut_off_ends(self) -> None:
        """A cut-off agent ends, even a hung one, while others continue."""
        with self.started() as (_, channels, pids):
            stop(pids[:1])
            channels[0].cut_off()
            if channels[0].process is not None:
                channels[0].process.wait(END_SECONDS)
            assert await_end(pids[:1], END_SECONDS) == []
            assert await_end(pids[1:], 0.0) == pids[1:]

    def test_a_lost_agent_has_a_successor(self) -> None:
        """A lost agent is replaced, unless the launcher has no place for it."""
        with self.started() as (launcher, channels, pids):
            stop(pids[-1:])
            another = launcher.replace(channels[-1].node)
            assert await_end(pids[-1:], END_SECONDS) == []
            if another is not None:
                assert another.node == channels[-1].node
                (hello,) = greetings([another])
                assert hello.node == another.node

    def test_what_is_killed_is_gone(self) -> None:
        """`kill` does not wait, and ends hung agents."""
        with self.started() as (launcher, _, pids):
            stop(pids)
            launcher.kill()
            assert await_end(pids, END_SECONDS) == []

    @pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
    def test_nothing_outlives_a_driver_that_is_killed(self, stopped: bool) -> None:
        """A driver's processes end with it, also when it is killed."""
        command = python("crosstrain.conformance.runs", json.dumps(asdict(self.launched())))
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as driver:
            watchdog = threading.Timer(START_SECONDS, driver.kill)
            watchdog.start()
            assert driver.stdout is not None
            line = driver.stdout.readline()
            watchdog.cancel()
            pids: list[int] = json.loads(line) if line else []
            if stopped:
                stop(pids)
            driver.kill()
        assert line, "the agents have not greeted; what the driver said is above"
        assert await_end(pids, END_SECONDS) == []

    def test_a_host_that_there_is_not_is_named(self) -> None:
        """`trainer doctor` and the start of a run name the unknown host."""
        if self.unknown_host is None:
            pytest.skip("no name of an unknown host is given")
        hosts = [*self.hosts[:1], self.unknown_host]
        launcher = self.launched(hosts=hosts).make()
        assert isinstance(launcher, LooksAtHosts), "the launcher cannot look at hosts: it has no `look`"
        try:
            findings = launcher.look(START_SECONDS)
        finally:
            launcher.close()
        assert {finding.host for finding in findings if finding.state == "bad" and finding.unreached} == {self.unknown_host}
