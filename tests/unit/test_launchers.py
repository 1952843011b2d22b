"""The table of launchers: each row can be made, and the first that serves a run, or the one that it names, is taken."""

import sys
import types

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.launch.environments.base import Membership
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.launch.launchers.registry import LAUNCHERS, LauncherRow, LaunchRequest, choose_launcher
from crosstrain.launch.launchers.rendezvous import ExternalLauncher

JOINED = Membership("torchrun", 0, 0, ("127.0.0.1", (29500,)), {})


def test_names_are_those_that_a_job_can_ask_for_and_more():
    names = [row.name for row in LAUNCHERS]
    assert len(set(names)) == len(names)
    assert set(Job.model_fields["launcher"].annotation.__args__) - {"auto"} <= set(names)


@pytest.mark.parametrize(("membership", "kind"), [(None, LocalLauncher), (JOINED, ExternalLauncher)])
def test_auto_follows_who_started_this_process(membership, kind):
    job = Job(nodes=2)
    launcher = choose_launcher(LaunchRequest(job, print, membership, b"secret", {"nodes": 2}))
    assert type(launcher) is kind
    assert launcher.job is job


def test_a_launcher_is_a_file_and_a_row(monkeypatch):
    """The row comes before the others, and is the one that serves this run."""
    module = types.ModuleType("launcher_of_a_test")
    module.make = lambda run: ("made", run.job.nodes)
    monkeypatch.setitem(sys.modules, "launcher_of_a_test", module)
    row = LauncherRow("of a test", "nothing", "launcher_of_a_test", lambda run: run.job.nodes == 7)
    assert choose_launcher(LaunchRequest(Job(nodes=7), print), [row, *LAUNCHERS]) == ("made", 7)
    assert type(choose_launcher(LaunchRequest(Job(nodes=2), print), [row, *LAUNCHERS])) is LocalLauncher


def test_a_launcher_that_is_named_and_cannot_serve_the_run_is_refused():
    with pytest.raises(UsageError, match="launcher: got 'local', which cannot start the nodes of this run; there are rendezvous, local"):
        choose_launcher(LaunchRequest(Job(launcher="local"), print, JOINED))
