"""The address of a node for others: from its launcher, not from the driver's environment."""

import subprocess
from dataclasses import dataclass

import pytest

from crosstrain.core.job import Job
from crosstrain.launch.launchers import slurm, ssh
from crosstrain.launch.launchers.base import StartedAgent
from crosstrain.launch.launchers.ssh import RemoteLauncher, start_elsewhere
from crosstrain.launch.node.scratch import address_for_others

OF_A_LOGIN = "10.7.7.7 50000 10.8.8.8 22"
"""What sshd has given the shell in which the driver was typed."""


@dataclass(frozen=True)
class Here:
    """Starts commands on this machine, in the driver's environment."""

    address: str
    name = "here"

    def start(self, node, command):
        process, stream, _ = start_elsewhere("one", ["env", *command])
        return StartedAgent(process, stream, self.address, isolated=None, host="one")


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"CROSSTRAIN_NODE_ADDRESS": "10.0.0.1"}, "10.0.0.1"),
        ({"CROSSTRAIN_NODE_ADDRESS": "10.0.0.1", "CROSSTRAIN_NODE_ADDRESS_TOWARDS": "127.0.0.1"}, "10.0.0.1"),
        ({"CROSSTRAIN_NODE_ADDRESS": "", "CROSSTRAIN_NODE_ADDRESS_TOWARDS": "127.0.0.1"}, "127.0.0.1"),
        ({"SSH_CONNECTION": OF_A_LOGIN, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_STEP_ID": "0"}, None),
    ],
)
def test_launcher_passes_the_node_s_address(environment, address):
    assert address_for_others(environment) == address


@pytest.mark.parametrize(
    ("script", "environment", "address"),
    [
        (ssh.WITH_ADDRESS, {"SSH_CONNECTION": OF_A_LOGIN}, "10.8.8.8"),
        (ssh.WITH_ADDRESS, {"SSH_CONNECTION": "fd00::1 50000 fd00::2 22"}, "fd00::2"),
        (ssh.WITH_ADDRESS, {}, None),
        (slurm.WITH_ADDRESS, {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "CROSSTRAIN_NODE_ADDRESS": "10.9.9.9"}, "127.0.0.1"),
        (slurm.WITH_ADDRESS, {}, None),
    ],
)
def test_ssh_and_slurm_addresses_come_from_their_variables(script, environment, address):
    done = subprocess.run(["sh", "-c", script, "sh", "/usr/bin/env"], env=environment, capture_output=True, text=True, check=True)
    assert address_for_others(dict(line.split("=", 1) for line in done.stdout.splitlines())) == address


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_hosts_are_probed_at_the_launcher_s_address(address, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", OF_A_LOGIN)
    launcher = RemoteLauncher(Job(nodes=1), Here(address))
    try:
        findings = {finding.what: finding for finding in launcher.look(60)}
    finally:
        launcher.close()
    network = findings["network"]
    if address:
        assert (network.state, network.found.split()[0]) == ("ok", "127.0.0.1")
    else:
        assert (network.state, network.found) == ("bad", "does not say under which address the others reach it")
