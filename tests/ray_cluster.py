"""A local Ray cluster: a network namespace, process numbers and /tmp/ray for each node."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from bridged_hosts import BridgedHosts, bridged_hosts

from crosstrain.core.process import command_ending_with_parent

PORT = 6379
HUB = "10.99.0.254"
"""The address of the hosts' bridge."""

FOLDER = Path("/tmp/ray")
"""Folder of Ray's files; paths of sockets have to be short."""

RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command `ray` of this environment."""

ENVIRONMENT = {
    "RAY_TMPDIR": str(FOLDER.parent),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_infeasible_task_early_exit": "0",
    "RAY_raylet_start_wait_time_s": "90",
    "OMP_NUM_THREADS": "",
}
SMALL = ("--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats")

STATE = """
import json, logging, ray
from ray._private import state
ray.init(address={address!r}, logging_level=logging.ERROR, log_to_driver=False)
groups = [group["state"] for group in ray.util.placement_group_table().values()]
actors = [actor["State"] for actor in state.actors().values()]
print("STATE", json.dumps({{"groups": groups, "actors": actors, "free": ray.available_resources().get("CPU", 0)}}))
"""


def require_ray():
    """Skip the test where Ray is not installed, or where no namespaces can be made."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed here")
    if os.geteuid() != 0:
        pytest.skip("namespaces for the nodes of a Ray cluster are made by root")


@dataclass
class RayNode:
    """A node: `process` is the parent of all that runs there, `leader` its first process."""

    process: subprocess.Popen
    leader: int
    log: Path

    @property
    def command_prefix(self) -> list[str]:
        """The prefix of a command that is to run on the node."""
        return ["nsenter", f"--target={self.leader}", "--mount", "--pid", "--net"]

    def processes(self, *names: str) -> list[int]:
        """The living processes of the node whose command line has one of these in it."""
        inside = os.stat(f"/proc/{self.leader}/ns/pid").st_ino
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.stat(entry / "ns/pid").st_ino == inside:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    if any(name in command for name in names):  # of a zombie there is none
                        pids.append(int(entry.name))
            except OSError:
                continue
        return pids

    def end(self) -> None:
        """Kill all processes of the node together, like a power failure."""
        self.process.kill()
        self.process.wait()


@dataclass
class RayCluster:
    """A cluster: `nodes` in the order of `hosts`, the first with the head.

    Commands of users run on the first.
    """

    hosts: BridgedHosts
    nodes: list[RayNode] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.hosts.addresses[0]}:{PORT}"

    def of_run(self) -> list[int]:
        """Processes of a run on the nodes, except the driver and its client."""
        names = ("crosstrain.launch.node", "crosstrain.launch.preflight", "crosstrain.engine", "NodeHolder")
        return [pid for node in self.nodes if node.process.poll() is None for pid in node.processes(*names)]

    def state(self) -> dict:
        """Live placement groups and actors of the cluster, and its free CPUs."""
        script = STATE.format(address=self.address)
        done = subprocess.run([*self.nodes[0].command_prefix, sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        line = next((line for line in done.stdout.splitlines() if line.startswith("STATE")), None)
        assert line is not None, done.stdout + done.stderr
        state = json.loads(line.removeprefix("STATE"))
        return {
            "groups": [entry for entry in state["groups"] if entry != "REMOVED"],
            "actors": [entry for entry in state["actors"] if entry != "DEAD"],
            "free": state["free"],
        }

    def restart(self, node: int, folder: Path) -> None:
        """Restart a node that has ended."""
        self.nodes[node] = _start(self, node, folder)


@contextmanager
def ray_cluster(count: int, folder: Path, *, dashboard: bool = False):
    """Start the nodes and end them; with its dashboard the head takes jobs.

    Skips the test where Ray is not installed, or no namespace can be made.
    """
    require_ray()
    with bridged_hosts(count, "ray") as hosts, ExitStack() as cleanup:
        cluster = RayCluster(hosts)
        cleanup.callback(_remove_folder)
        for number in range(count):
            cluster.nodes.append(_start(cluster, number, folder, dashboard=dashboard))
            cleanup.callback(lambda number=number: cluster.nodes[number].end())
            if number == 0:
                _await_nodes(cluster, 1)
        _await_nodes(cluster, count)
        yield cluster


@contextmanager
def ray_node(command: list[str], before: list[str], log: Path, environment: dict[str, str]):
    """Have a command be the first process of a node, and end all that it has started with it."""
    node = _node(command, before, log, environment)
    try:
        yield node
    finally:
        node.end()
        _remove_folder()


def _start(cluster: RayCluster, number: int, folder: Path, *, dashboard: bool = False) -> RayNode:
    address = cluster.hosts.addresses[number]
    route = ["ip", "route", "replace", "default", "via", HUB]  # Ray looks from which address packets leave for the world
    subprocess.run([*cluster.hosts.in_network(number), *route], check=True)
    place = ["--head", f"--port={PORT}", f"--include-dashboard={dashboard}"] if number == 0 else [f"--address={cluster.address}"]
    command = [*RAY, "start", "--block", *place, f"--node-ip-address={address}", *SMALL]
    return _node(command, cluster.hosts.in_network(number), folder / f"ray{number}.log", {})


def _node(command: list[str], before: list[str], log: Path, environment: dict[str, str]) -> RayNode:
    FOLDER.mkdir(exist_ok=True)
    script = f'mount -t tmpfs none {FOLDER} && exec "$@"'
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    kept = {key: value for key, value in {**os.environ, **ENVIRONMENT, **environment}.items() if value}
    with log.open("ab") as output:
        words = command_ending_with_parent([*before, *alone, "sh", "-c", script, "sh", *command])
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=kept)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 10
    while not (child := children.read_text().split()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return RayNode(process, int(child[0]), log)


def _await_nodes(cluster: RayCluster, count: int) -> None:
    script = f"""
import logging, ray, time
ray.init(address={cluster.address!r}, logging_level=logging.ERROR, log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < {count}:
    time.sleep(0.2)
print("all are there")
"""
    deadline = time.monotonic() + 90
    done = None
    while time.monotonic() < deadline:
        done = subprocess.run(
            [*cluster.nodes[0].command_prefix, "timeout", "60", sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        ended = [node.log.read_text() for node in cluster.nodes if node.process.poll() is not None]
        assert not ended, ended
        time.sleep(0.5)
    raise AssertionError(f"the Ray nodes do not come: {done.stdout}{done.stderr} {[node.log.read_text() for node in cluster.nodes]}")


def _remove_folder() -> None:
    """Remove the nodes' mount folder unless it is another's."""
    try:
        FOLDER.rmdir()
    except OSError:
        return
