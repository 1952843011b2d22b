"""The Ray launcher: its requests, its description of missing resources, and its selection."""

import importlib.util
import re

import pytest

from crosstrain.cli.group import invoke
from crosstrain.core.errors import MissingPackageError, UsageError
from crosstrain.core.job import Job
from crosstrain.launch.launchers.environments import in_ray_job
from crosstrain.launch.launchers.host_list import Host
from crosstrain.launch.launchers.ray import RayLauncher, make
from crosstrain.launch.launchers.ray_state import bundles_everywhere, bundles_for_workers, describe_bundles, shortage
from crosstrain.launch.launchers.registry import LaunchRequest, choose_launcher, name_of_launcher

SMALL = {"Alive": True, "Resources": {"CPU": 1.0}}
LARGE = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
DEAD = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}


@pytest.mark.parametrize(
    ("threads", "device", "nodes", "bundles"),
    [
        (None, "cpu", [LARGE], [{"CPU": 1}, {"CPU": 2}]),
        (4, "cpu", [], [{"CPU": 4}, {"CPU": 8}]),
        (None, "gpu", [SMALL], [{"CPU": 1, "GPU": 1}, {"CPU": 2, "GPU": 2}]),
        (None, "auto", [SMALL, LARGE], [{"CPU": 1, "GPU": 1}, {"CPU": 2, "GPU": 2}]),
        (None, "auto", [SMALL, DEAD], [{"CPU": 1}, {"CPU": 2}]),
    ],
)
def test_bundle_has_the_resources_of_its_workers(threads, device, nodes, bundles):
    assert bundles_for_workers((1, 2), threads, device, nodes) == bundles


@pytest.mark.parametrize(
    ("bundles", "nodes", "text"),
    [
        ([{"CPU": 1}] * 3, [], "3 nodes with 1 CPU each; the cluster has no node yet"),
        ([{"CPU": 1}] * 3, [SMALL, DEAD], "3 nodes with 1 CPU each; the cluster has 1 node, 1 of them large enough"),
        ([{"CPU": 2}, {"CPU": 1}], [SMALL, LARGE], "1 node with 2 CPUs and 1 with 1 CPU; the cluster has 2 nodes, 1 of them large enough"),
        ([{"CPU": 1, "GPU": 1}], [LARGE], "1 node with 1 CPU and 1 GPU; the cluster has 1 node, large enough, but others use it"),
        ([{"CPU": 1}] * 2, [SMALL, LARGE], "2 nodes with 1 CPU each; the cluster has 2 nodes, 2 of them large enough, but others use them"),
    ],
)
def test_missing_resources_are_described(bundles, nodes, text):
    assert shortage(nodes, bundles) == text
    assert text.startswith(describe_bundles(bundles))


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.example.org:6379", "ray://head:10001", "[fd00::1]:6379"])
def test_valid_address_is_accepted(address):
    assert isinstance(make(LaunchRequest(Job(nodes=2), print, options={"ray_address": address})), RayLauncher)


@pytest.mark.parametrize("address", ["", "10.0.0.1", "local", "http://head:8265", "ray://", "-x:1", "head:6379 --help", "head:123456"])
def test_invalid_address_is_refused(address):
    with pytest.raises(UsageError, match=r"--ray-address: got .*allowed: auto, HOST:PORT"):
        make(LaunchRequest(Job(nodes=2), print, options={"ray_address": address}))


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ({}, {"hosts": (Host("node0"),)}, "'ray' starts the nodes where Ray gives them; leave --hosts and --hostfile out"),
        ({"bandwidth": "100mbit"}, {}, "bandwidth: got '100mbit', which is for virtual nodes; these were started by Ray"),
    ],
)
def test_conflicting_launch_option_is_refused(job, options, message):
    with pytest.raises(UsageError, match=message):
        make(LaunchRequest(Job(**job), print, **options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray-address", "auto", "--hosts", "a,b"], "--ray-address and --hosts: both say where the nodes are"),
        (["--ray-address", "auto", "--launcher", "local"], "--ray-address: --launcher local does not take it, .* or give --launcher ray"),
        (
            ["--ray-address", "auto", "--rendezvous", "127.0.0.1:1", "--node-rank", "0", "--nodes", "2"],
            "--ray-address: asks for nodes, but",
        ),
        (["--ray-address", "http://head"], "--ray-address: got 'http://head'; allowed: auto"),
        (["--launcher", "ray", "--network", "isolated"], "network: got 'isolated', which is for virtual nodes"),
    ],
)
def test_conflicting_options_end_the_command(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "0" * 32)
    assert invoke(["run", "--backend", "torch", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_missing_ray_names_the_package(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find_spec(name, *more))
    with pytest.raises(MissingPackageError, match=r"launcher 'ray' needs the package 'ray'.*pip install 'crosstrain\[ray\]'"):
        choose_launcher(LaunchRequest(Job(launcher="ray"), print))


def test_ray_is_selected_by_name_address_or_job():
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert in_ray_job(job)
    assert not in_ray_job({"RAY_ADDRESS": "10.0.0.1:6379"})
    named, within = {"options": {"ray_address": "auto"}}, {"environment": job}

    def chosen(launcher, **options):
        return name_of_launcher(LaunchRequest(Job(launcher=launcher), print, **options))

    assert [chosen("ray"), chosen("auto", **named), chosen("auto", **within)] == ["ray"] * 3
    assert [chosen("auto"), chosen("local", **named, **within)] == ["local"] * 2


def test_placement_on_each_node_uses_no_resources():
    """Nodes without a CPU, such as some heads, are not used."""
    nodes = [
        {**LARGE, "NodeManagerAddress": "10.0.0.2"},
        {**DEAD, "NodeManagerAddress": "10.0.0.3"},
        {**SMALL, "NodeManagerAddress": "10.0.0.1"},
        {"Alive": True, "Resources": {"memory": 1.0}, "NodeManagerAddress": "10.0.0.4"},
    ]
    assert bundles_everywhere(nodes) == [{"node:10.0.0.1": 0.001}, {"node:10.0.0.2": 0.001}]
