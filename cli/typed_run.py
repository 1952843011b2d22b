"""What `trainer run` was given, apart from the settings of the job: what is typed, and which of the user's own options count for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from ..core.errors import UsageError
from ..core.settings.personal import GivenOption
from ..core.settings.sources import Resolved, given_settings
from ..launch.environments.detect import detect
from ..launch.launchers.host_list import Host
from ..launch.launchers.registry import FOLLOW_OTHERS, placed_without, takes_option
from ..launch.launchers.remote import shape_of_hosts
from .options import FURTHER_PLACES, given_hosts, given_options

__all__ = ["TypedRun"]


@dataclass(frozen=True)
class TypedRun:
    """What the command was given, apart from the settings of the job."""

    ctx: click.Context
    config: str | None
    resume: Path | None
    rendezvous: str | None
    node_rank: int | None
    secret_file: Path | None
    personal: Mapping[str, GivenOption]
    quiet: bool
    like: str | None = None
    automatic: Resolved | None = None
    """With ``--resume auto``: the job as it is typed, alike for every process, whether the run begins or goes on."""

    @cached_property
    def hosts(self) -> Sequence[Host]:
        """The hosts of the nodes. Those of the user's own file stand for every run, so they count where nothing else places this one's."""
        named = self.named_hosts
        return () if named is None or not self._counts(named) else given_hosts(self.personal)

    @property
    def named_hosts(self) -> GivenOption | None:
        """The option that names hosts, whether they count or not."""
        return next((self.personal[name] for name in ("hosts", "hostfile") if name in self.personal), None)

    @property
    def hosts_set_aside(self) -> bool:
        """Whether hosts are named where they do not count, as the nodes of this run are elsewhere."""
        named = self.named_hosts
        return named is not None and not self._counts(named)

    @cached_property
    def further_places(self) -> Mapping[str, str]:
        """What else says where the nodes are, such as ``ray_address``, by name; those of the user's own file count as its hosts do."""
        given = [self.personal[name] for name in FURTHER_PLACES if name in self.personal]
        return {one.option.name: one.value for one in given if not one.of_own_file or self._counts(one)}

    @cached_property
    def _launcher(self) -> str:
        """The launcher that was asked for, ``auto`` where none was."""
        return str(given_settings(given_options(self.ctx), os.environ, self.config).get("launcher", "auto"))

    def _counts(self, given: GivenOption) -> bool:
        """Whether an option that says where nodes are does so for this run: it is typed, or for a launcher that was named and takes it.

        Where none was named, a variable counts, and what stands in the user's own file if nothing else has placed this run.
        """
        if given.typed:
            return True
        if self._launcher not in FOLLOW_OTHERS:
            return takes_option(self._launcher, given.option.name)
        if not given.of_own_file:
            return True
        started = self.rendezvous is not None or self.node_rank is not None or detect(os.environ, None, None, None) is not None
        return takes_option(self._launcher, given.option.name) and not started and not placed_without(given.option.name, os.environ)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The settings of the job that were typed, with those that the hosts decide. Raises UsageError where these disagree."""
        typed = given_options(self.ctx)
        decided = shape_of_hosts(self.hosts) if self.hosts else {}
        for key, value in decided.items():
            if typed.get(key, value) != value:
                whose = self.named_hosts
                assert whose is not None
                remedy = "; --launcher local leaves the hosts alone" if whose.of_own_file else ""
                raise UsageError(f"{key}: got {typed[key]}, but {whose.key} says {value}; leave it out or make them agree{remedy}")
        if self.automatic is not None and self.resume is not None:
            typed = {key: value for key, value in typed.items() if key not in ("out", "name")}  # they have led to the run
        return {**typed, **decided}

    @cached_property
    def given_settings(self) -> dict[str, Any]:
        """Of a run that goes on: the settings that were given for that, by flag, variable or file."""
        return given_settings(self.options, os.environ, self.config)
