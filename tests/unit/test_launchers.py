"""Launchers: each can be made by its name, ``auto`` takes the first that serves a run, and a package may bring one of its own."""

import sys
import types
from dataclasses import replace

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import BUILT_IN, Plugin
from crosstrain.launch.environments.base import Membership
from crosstrain.launch.launchers.host_list import Host
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.launch.launchers.registry import AUTOMATIC, LaunchRequest, choose_launcher
from crosstrain.launch.launchers.remote import RemoteLauncher, shape_of_hosts
from crosstrain.launch.launchers.rendezvous import ExternalLauncher
from crosstrain.launch.launchers.slurm import SrunStarter

JOINED = Membership("torchrun", 0, 0, ("127.0.0.1", (29500,)), {})
HOSTS = (Host("node0"), Host("node1"))


def test_what_auto_takes_can_be_named():
    names = [name for name, _ in AUTOMATIC]
    assert len(set(names)) == len(names)
    assert set(names) == {plugin.name for plugin in BUILT_IN["launcher"]}


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("local", {}, LocalLauncher),
        ("rendezvous", {"membership": JOINED, "secret": b"secret", "asked": {"nodes": 2}}, ExternalLauncher),
        ("ssh", {"hosts": HOSTS}, RemoteLauncher),
    ],
)
def test_auto_follows_what_was_given(name, given, kind):
    for launcher in ("auto", name):
        run = LaunchRequest(Job(nodes=2, launcher=launcher), print, **given)
        made = choose_launcher(run)
        assert type(made) is kind
        assert made.job is run.job


def test_a_package_brings_a_launcher(monkeypatch):
    module = types.ModuleType("launcher_of_a_test")
    module.make = lambda run: ("made", run.job.nodes)
    monkeypatch.setitem(sys.modules, "launcher_of_a_test", module)
    row = Plugin("of-a-test", "launcher_of_a_test:make")
    monkeypatch.setattr("crosstrain.core.plugins.available", lambda kind: {row.name: row} if kind == "launcher" else {})
    assert choose_launcher(LaunchRequest(Job(nodes=7, launcher="of-a-test"), print)) == ("made", 7)


@pytest.mark.parametrize(
    ("job", "given", "message"),
    [
        ({"launcher": "local"}, {"membership": JOINED}, "'local' starts all nodes on this machine, and torchrun has them elsewhere"),
        ({"launcher": "local"}, {"hosts": HOSTS}, "'local' starts all nodes on this machine, and --hosts has them elsewhere"),
        ({"launcher": "ssh"}, {}, "name them by --hosts node0,node1 or --hostfile"),
        ({"launcher": "rendezvous"}, {}, "give --rendezvous and --node-rank on each"),
        ({"launcher": "shh"}, {}, "got 'shh'; allowed: auto, rendezvous, local, ssh.*ssh"),
        ({"bandwidth": "100mbit"}, {"hosts": HOSTS}, "bandwidth: got '100mbit', which is for virtual nodes; these were started by ssh"),
    ],
)
def test_what_cannot_start_the_run_is_refused(job, given, message):
    with pytest.raises(UsageError, match=message):
        choose_launcher(LaunchRequest(Job(nodes=2, **job), print, **given))


def test_hosts_decide_the_shape():
    assert shape_of_hosts(HOSTS) == {"nodes": "2"}
    assert shape_of_hosts([Host("a", 2), replace(HOSTS[0], processes=None)]) == {"nodes": "2", "procs_per_node": "2,1"}


def test_a_host_that_was_lost_is_the_last_that_another_node_is_put_on():
    """It may be back when all others of Slurm's allocation have failed."""
    a, b, c, d = (Host(name) for name in "abcd")
    starter = SrunStarter([a, b], "srun", [c, d])
    placed = []
    for _ in range(4):
        starter.relocate(1)
        placed.append(starter.hosts[1])
    assert placed == [c, d, b, c]
    assert starter.hosts[0] == a
    alone = SrunStarter([a, b], "srun", [])
    alone.relocate(1)
    assert (alone.hosts, alone.spares) == ([a, b], [])
