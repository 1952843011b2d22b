"""Launchers: selected by name, by `auto`, or provided by a package."""

import json
import re
import sys
import types
from dataclasses import replace

import pytest

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import BUILT_IN, Plugin
from crosstrain.launch.launchers.base import LauncherDefaults
from crosstrain.launch.launchers.environments import Membership
from crosstrain.launch.launchers.host_list import Host
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.launch.launchers.registry import (
    AUTOMATIC,
    Allocation,
    LauncherPlugin,
    LaunchRequest,
    allocated,
    choose_launcher,
    launcher_taking,
    placed_without,
    takes_option,
)
from crosstrain.launch.launchers.rendezvous import ExternalLauncher
from crosstrain.launch.launchers.slurm import SrunStarter
from crosstrain.launch.launchers.ssh import RemoteLauncher, shape_of_hosts

JOINED = Membership("torchrun", 0, 0, ("127.0.0.1", (29500,)), {})
HOSTS = (Host("node0"), Host("node1"))


def test_automatic_launchers_have_names():
    names = [name for name, _ in AUTOMATIC]
    assert len(set(names)) == len(names)
    assert set(names) == {plugin.name for plugin in BUILT_IN["launcher"]}


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("local", {}, LocalLauncher),
        ("rendezvous", {"membership": JOINED, "secret": b"secret", "asked": {"nodes": 2}}, ExternalLauncher),
        ("ssh", {"hosts": HOSTS}, RemoteLauncher),
    ],
)
def test_auto_selects_launcher_from_the_request(name, options, kind):
    for launcher in ("auto", name):
        run = LaunchRequest(Job(nodes=2, launcher=launcher), print, **options)
        made = choose_launcher(run)
        assert type(made) is kind
        assert made.job is run.job


class Idle(LauncherDefaults):
    """A launcher that starts nothing."""

    def __init__(self, run):
        self.job, self.hosts = run.job, run.hosts

    def start(self):
        return []

    def close(self):
        """Nothing was started."""

    kill = close


@pytest.fixture
def brought(monkeypatch):
    """Install `make` as a package's entry point for the launcher ``of-a-test``."""

    def bring(make):
        module = types.ModuleType("launcher_of_a_test")
        module.LAUNCHER = make
        monkeypatch.setitem(sys.modules, "launcher_of_a_test", module)
        row = Plugin("of-a-test", "launcher_of_a_test:LAUNCHER", provider="a-package")
        monkeypatch.setattr("crosstrain.core.plugins.available", lambda kind: {row.name: row} if kind == "launcher" else {})

    return bring


def test_package_provides_launcher_as_a_function(brought):
    brought(Idle)
    made = choose_launcher(LaunchRequest(Job(nodes=7, launcher="of-a-test"), print))
    assert made.job.nodes == 7
    assert not takes_option("of-a-test", "hosts")


def test_package_declares_what_its_launcher_accepts(brought):
    brought(LauncherPlugin(Idle, takes=("hosts", "hostfile"), allocation=lambda environment: Allocation(HOSTS, "ITS_NODES")))
    assert isinstance(choose_launcher(LaunchRequest(Job(launcher="of-a-test"), print)), Idle)
    assert [takes_option("of-a-test", name) for name in ("hosts", "python", "ray_address")] == [True, False, False]
    assert allocated("of-a-test", {}) == (HOSTS, "ITS_NODES")
    assert allocated("auto", {}) == ((), None)


def test_allocation_is_read_by_the_launcher(brought):
    brought(Idle)
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[0-1]"}
    for launcher, variable in {"auto": "SLURM_JOB_NODELIST", "slurm": "SLURM_JOB_NODELIST", "local": None, "of-a-test": None}.items():
        assert allocated(launcher, variables) == ([*HOSTS], variable)


@pytest.mark.parametrize("around", [{"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}])
def test_launchers_detect_processes_with_nodes(around):
    assert placed_without("hosts", around)
    assert not placed_without("hosts", {})
    assert placed_without("ray_address", around) == ("SLURM_JOB_ID" in around)
    assert launcher_taking("ray_address") == "ray"


def test_hosts_file_is_for_launchers_that_accept_it(brought, tmp_path, monkeypatch, capsys):
    (tmp_path / "crosstrain").mkdir()
    (tmp_path / "crosstrain/trainer.toml").write_text('hosts = "node[0-1]"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    sweep = ["sweep", "quickstart", "--backend", "torch", "--grid", "lr=0.1,0.2", "--dry-run", "--launcher", "of-a-test"]
    nodes = {}
    for takes in (("hosts", "hostfile"), ()):
        brought(LauncherPlugin(Idle, takes=takes))
        assert invoke(["run", "--backend", "torch", "--launcher", "of-a-test", "--print-config", "--json"]) == 0
        nodes[takes] = json.loads(capsys.readouterr().out)["nodes"]["value"]
        assert invoke(sweep) == (2 if takes else 0)
        capsys.readouterr()
        assert invoke(["doctor", "--launcher", "of-a-test"]) == 2
        assert "--launcher: got 'of-a-test', which starts nothing on other hosts" in capsys.readouterr().err
    assert nodes == {("hosts", "hostfile"): 2, (): 1}


def fails(run):
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: None, r"has returned None, which is no launcher: missing check, close, .*start"),
        (fails, r"has raised ValueError: no idea \(.*test_launchers.py, line \d+\)"),
    ],
    ids=["nothing", "raises"],
)
def test_invalid_package_launcher_is_reported_by_name(brought, make, message, capsys):
    brought(make)
    assert invoke(["run", "--backend", "torch", "--launcher", "of-a-test"]) == 2
    output = capsys.readouterr().err
    assert re.search(rf"--launcher: 'of-a-test' \(launcher_of_a_test:LAUNCHER, of the package 'a-package'\) {message}", output), output
    assert "Traceback" not in output


def test_doctor_and_run_name_the_same_flag(capsys):
    for command in ("run", "doctor"):
        assert invoke([command, "--launcher", "ssh"]) == 2
        assert "--launcher: 'ssh' starts the nodes on other machines; name them by --hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ({"launcher": "local"}, {"membership": JOINED}, "'local' starts all nodes on this machine, and torchrun has them elsewhere"),
        ({"launcher": "local"}, {"hosts": HOSTS}, "'local' starts all nodes on this machine, and --hosts has them elsewhere"),
        ({"launcher": "ssh"}, {}, "name them by --hosts node0,node1 or --hostfile"),
        ({"launcher": "rendezvous"}, {}, "give --rendezvous and --node-rank on each"),
        ({"launcher": "shh"}, {}, "got 'shh'; allowed: auto, rendezvous, local, ssh.*ssh"),
        ({"bandwidth": "100mbit"}, {"hosts": HOSTS}, "bandwidth: got '100mbit', which is for virtual nodes; these were started by ssh"),
    ],
)
def test_launcher_that_cannot_start_is_refused(job, options, message):
    with pytest.raises(UsageError, match=message):
        choose_launcher(LaunchRequest(Job(nodes=2, **job), print, **options))


def test_hosts_decide_the_number_of_nodes():
    assert shape_of_hosts(HOSTS) == {"nodes": "2"}
    assert shape_of_hosts([Host("a", 2), replace(HOSTS[0], processes=None)]) == {"nodes": "2", "procs_per_node": "2,1"}


def test_lost_host_is_reused_last():
    """It may be back when all other hosts of a Slurm allocation have failed."""
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
