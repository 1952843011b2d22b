"""A local Slurm cluster: a controller, munge, and a slurmd in each network namespace."""

import os
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from bridged_hosts import BridgedHosts, bridged_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={name}(10.99.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=1
SlurmctldPort=6817
SlurmdPort=6818
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ReturnToService=2
InactiveLimit=0
KillWait=10
JobRequeue=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster: `hosts` are node0, node1 …; its commands need `environment`."""

    hosts: BridgedHosts
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def command_prefix(self) -> list[str]:
        """The prefix of a command that is to run next to the nodes."""
        return self.hosts.in_network(None)

    def do(self, *command: str) -> str:
        """Run a command of Slurm; return what it prints."""
        done = subprocess.run(
            [*self.command_prefix, *command], env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout


@contextmanager
def slurm_cluster(count: int, folder: Path):
    """Start the daemons and end them. Skips the test without Slurm or namespaces."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"Slurm is not whole here: there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons have to be started by root")
    with bridged_hosts(count, "slm") as hosts, ExitStack() as cleanup:
        cluster = SlurmCluster(hosts, folder)
        lines = [
            f"NodeName=node{node} NodeHostname={os.uname().nodename} NodeAddr={hosts.addresses[node]} CPUs=2 RealMemory=4000"
            for node in range(count)
        ]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, name=os.uname().nodename, nodes="\n".join(lines)))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)

        def start(before, *command):
            daemon = subprocess.Popen([*before, *command], env={**os.environ, **cluster.environment, "PATH": path})
            cleanup.callback(daemon.wait)
            cleanup.callback(daemon.terminate)

        files = [
            f"--{name}={folder}/{file}"
            for name, file in (("pid-file", "munged.pid"), ("log-file", "munged.log"), ("seed-file", "munged.seed"))
        ]
        start([], "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files)
        start(cluster.command_prefix, "slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
        for node in range(count):
            (folder / f"spool.node{node}").mkdir()
            start(hosts.in_network(node), "slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", f"node{node}")
        _await_idle(cluster, count)
        yield cluster


def _await_idle(cluster: SlurmCluster, count: int) -> None:
    deadline = time.monotonic() + 60
    states = ""
    while time.monotonic() < deadline:
        done = subprocess.run(
            [*cluster.command_prefix, "sinfo", "-h", "-N", "-o", "%T"],
            env={**os.environ, **cluster.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        states = done.stdout.split()
        if states == ["idle"] * count:
            return
        time.sleep(0.3)
    logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in cluster.folder.glob("*.log"))
    raise AssertionError(f"Slurm's nodes are {states}, not idle: {done.stderr}\n{logs}")
