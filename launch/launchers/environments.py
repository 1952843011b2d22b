"""The place of a process that torchrun, TF_CONFIG, Kubernetes or a user started."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.cluster import ProcsPerNode, node_by_worker, to_procs_per_node, workers_by_node
from ...core.console import note
from ...core.errors import InterruptedRunError, ResumableRunError, RunFailedError, UsageError

if TYPE_CHECKING:
    from .host_list import Host

Variables = Mapping[str, str]
CONTROL_PORTS = 8  # how many ports above the contract's own are tried for the control channel, if the contract names none


@dataclass(frozen=True, slots=True)
class Membership:
    """One of several processes that were started elsewhere, by the `contract` of this name.

    `rendezvous` is the driver's host with its possible ports, in the order to try. `shape` has the job's fields that the contract decides.
    `standbys` counts the processes of all nodes that are no agents. `ports` are those of tasks by name, if the contract assigns them.
    `starts_again`: failed processes are restarted in place; the run resumes once all have ended. SIGTERM then precedes a kill.
    """

    contract: str
    node: int
    local_rank: int
    rendezvous: tuple[str, tuple[int, ...]]
    shape: Mapping[str, int | tuple[int, ...]]
    standbys: int = 0
    addresses: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    starts_again: bool = False

    @property
    def loss_exit_code(self) -> int:
        """The others' exit code when a process is lost; that of a resumable run with restarts."""
        return ResumableRunError.exit_code if self.starts_again else RunFailedError.exit_code

    @property
    def is_driver(self) -> bool:
        """Whether this process is the driver and node 0's agent."""
        return self.node == 0 and self.local_rank == 0


@dataclass(frozen=True, slots=True)
class Options:
    """A process's options, None if not given; `nodes` also if only the driver knows it."""

    rendezvous: str | None = None
    node_rank: int | None = None
    nodes: int | None = None
    procs_per_node: ProcsPerNode = 1


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port from 1 to 65535")
    return host, int(port)


def _ports_above(port: int, used: Collection[int] = ()) -> tuple[int, ...]:
    return tuple(candidate for candidate in range(port + 1, port + 1 + CONTROL_PORTS + len(used)) if candidate not in used)[:CONTROL_PORTS]


RETRY_SECONDS = 0.5


class NameResolver:
    """Resolves names before nodes are isolated; retries for `timeout_seconds` in all."""

    def __init__(self, timeout_seconds: float, interrupted: Callable[[], bool]) -> None:
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._interrupted = interrupted
        self._told: set[str] = set()

    def address(self, host: str) -> str:
        """Return a host's address. Raises RunFailedError after the timeout, InterruptedRunError."""
        while True:
            try:
                return socket.gethostbyname(host)
            except OSError as error:
                self.wait_for_retry(host, f"has no address: {error.strerror}")

    def wait_for_retry(self, host: str, why: str) -> None:
        """Wait before the next try, and log the reason once; raises as `address` does."""
        if self._interrupted():
            raise InterruptedRunError(f"interrupted by the user, while the host {host!r} {why}")
        if time.monotonic() >= self._deadline:
            raise RunFailedError(f"the host {host!r} {why}; it was looked up for {self._timeout_seconds:g} s (--start-timeout)")
        if host not in self._told:
            self._told.add(host)
            note(f"trainer: the host {host!r} {why}; it is looked up again until --start-timeout ({self._timeout_seconds:g} s)")
        time.sleep(RETRY_SECONDS)


BY_HAND = "--rendezvous"  # the name of this contract


def manual(environment: Variables, options: Options) -> Membership | None:
    """Return the place from the command line, if given."""
    rendezvous, node_rank, nodes = options.rendezvous, options.node_rank, options.nodes
    if rendezvous is None and node_rank is None:
        return None
    if rendezvous is None or node_rank is None:
        raise UsageError("--node-rank and --rendezvous belong together: give both on every node, the same HOST:PORT everywhere")
    if node_rank < 0 or (nodes is not None and node_rank >= nodes):
        only_rank = "0, as the run has one node; give --nodes on each of them"
        allowed = "0 and more" if nodes is None else only_rank if nodes == 1 else f"0 to {nodes - 1} (--nodes {nodes})"
        raise UsageError.of("--node-rank", node_rank, allowed)
    shape = {} if nodes is None else {"nodes": nodes}
    return Membership(BY_HAND, node_rank, 0, _rendezvous(rendezvous), shape)


def _rendezvous(text: str) -> tuple[str, tuple[int, ...]]:
    try:
        host, port = _endpoint(text)
    except ValueError as error:
        raise UsageError.of("--rendezvous", text, "HOST:PORT, such as 10.0.0.1:29400, with a port from 1 to 65535") from error
    return host, (port,)


PORT = 29400  # the port of the suggested command, as in README.md


def step_tasks(environment: Variables) -> int:
    """Return the number of processes in this process's Slurm step; 1 outside of any."""
    text = environment.get("SLURM_STEP_NUM_TASKS", "").strip() or "1"
    if not text.isdecimal():
        raise UsageError.of("SLURM_STEP_NUM_TASKS", text, "a whole number, as Slurm sets it; or unset it")
    return int(text)


def refuse_step(environment: Variables, typed: Sequence[str], parse_hosts: Callable[[str, str], Sequence[Host]]) -> None:
    """Raise UsageError in a Slurm step of several tasks; `typed` follows ``trainer``."""
    tasks = step_tasks(environment)
    if tasks <= 1:
        return
    if any(part == "--repeats" or part.startswith("--repeats=") for part in typed):
        raise UsageError(
            f"--repeats: starts runs on nodes of its own, and Slurm started {tasks} of these processes in one step (SLURM_STEP_NUM_TASKS), "
            f"each of which would do all of them; type: srun --ntasks 1 trainer {shlex.join(typed)}"
        )
    listed = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    nodes = int(listed) if listed.isdecimal() and int(listed) and tasks % int(listed) == 0 else tasks
    host = "HOST-OF-NODE-0"
    for variable in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"):
        with suppress(UsageError):  # not set, or no list of Slurm's
            host = parse_hosts(environment.get(variable, ""), variable)[0].name
    workers = f" --procs-per-node {tasks // nodes}" if tasks > nodes else ""
    inner = f"trainer {shlex.join(typed)} --nodes {nodes}{workers} --rendezvous {host}:{PORT} --node-rank $SLURM_NODEID"
    raise UsageError(
        f"Slurm started {tasks} of these processes in one step (SLURM_STEP_NUM_TASKS), and each would train the whole job alone; type: "
        f"srun --nodes {nodes} --ntasks-per-node 1 bash -c {shlex.quote(inner)}, with TRAINER_SECRET set, "
        "or say --launcher local if each is to train alone"
    )


_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_WORLD, *_LOCAL)


def torchrun(environment: Variables, options: Options) -> Membership | None:
    """Return the place from torchrun's variables; None if one is missing."""
    world = _given(environment)
    if len(world) < len(_TORCHRUN):
        return None
    rank, size = _rank_and_size(world)
    local_rank, local_size = _number(world, "LOCAL_RANK"), _number(world, "LOCAL_WORLD_SIZE")
    if local_size < 1 or size % local_size:
        raise UsageError(f"WORLD_SIZE {size} and LOCAL_WORLD_SIZE {local_size} do not fit; every node needs the same number of processes")
    if rank % local_size != local_rank:
        raise UsageError(
            f"RANK {rank}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_size} do not fit; "
            f"node by node, process {rank} of {size} is number {rank % local_size} of its node"
        )
    nodes = size // local_size
    shape = {"nodes": nodes, "procs_per_node": local_size}
    return Membership("torchrun", rank // local_size, local_rank, (world["MASTER_ADDR"], _ports_above(_port(world))), shape, size - nodes)


def world_size(environment: Variables, options: Options) -> Membership | None:
    """Return the place of a process with a rank but no local rank; None in a world of one."""
    world, procs_per_node = _given(environment), options.procs_per_node
    if not world:
        return None
    wanted = _TORCHRUN if any(name in world for name in _LOCAL) else _WORLD
    missing = [name for name in wanted if name not in world]
    if missing:
        raise UsageError(
            f"the environment has {' '.join(world)}, as if something had started this process among others, but not {' '.join(missing)}; "
            "set what is missing, unset what is there, or say --launcher local to train here alone"
        )
    rank, size = _rank_and_size(world)
    port = _port(world)
    if size == 1:
        return None
    nodes, places = _layout(procs_per_node, size)
    shape: dict[str, int | tuple[int, ...]] = {"nodes": nodes, "procs_per_node": procs_per_node}
    node = places[rank]
    return Membership("WORLD_SIZE", node, rank - places.index(node), (world["MASTER_ADDR"], (port,)), shape, size - nodes)


def _layout(procs_per_node: ProcsPerNode, size: int) -> tuple[int, tuple[int, ...]]:
    if isinstance(procs_per_node, tuple):
        if sum(procs_per_node) != size:
            listed = ",".join(map(str, procs_per_node))
            raise UsageError(f"--procs-per-node: got {listed}, {sum(procs_per_node)} in all, but WORLD_SIZE is {size}; make them agree")
        return len(procs_per_node), node_by_worker(procs_per_node)
    if size % procs_per_node:
        raise UsageError(
            f"--procs-per-node: got {procs_per_node}, but WORLD_SIZE is {size}; every node needs the same number of processes, "
            f"so that it divides {size}, or one number is given for each node, such as 1,{size - 1}"
        )
    return size // procs_per_node, node_by_worker(workers_by_node(procs_per_node, size // procs_per_node))


def _rank_and_size(world: Variables) -> tuple[int, int]:
    rank, size = _number(world, "RANK"), _number(world, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK {rank} and WORLD_SIZE {size} do not fit; ranks run from 0 to WORLD_SIZE - 1")
    return rank, size


def _port(world: Variables) -> int:
    port = _number(world, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError.of("MASTER_PORT", port, "a port from 1 to 65535")
    return port


def _number(world: Variables, name: str) -> int:
    try:
        return int(world[name])
    except ValueError as error:
        raise UsageError.of(name, world[name], "a whole number") from error


def _given(environment: Variables) -> dict[str, str]:
    return {name: environment[name].strip() for name in _TORCHRUN if environment.get(name, "").strip()}


_ROLES = ("chief", "worker", "ps")


def tf_config(environment: Variables, options: Options) -> Membership | None:
    """Return the place from ``TF_CONFIG``: ``cluster`` (role → host:port list) and ``task``."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        cluster: dict[str, list[str]] = {role: list(addresses) for role, addresses in config["cluster"].items()}
        own_role, own_index = str(config["task"]["type"]), int(config["task"]["index"])
        everyone = [(role, index, *_endpoint(address)) for role in _ROLES for index, address in enumerate(cluster.get(role, []))]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"TF_CONFIG: got {text[:120]!r} ({type(error).__name__}: {error}); needs cluster (role: [host:port, …]) and task (type, index)"
        ) from error
    unknown = sorted(set(cluster) - set(_ROLES))
    if unknown:
        raise UsageError.of("TF_CONFIG", ", ".join(unknown), f"the roles {', '.join(_ROLES)}", _ROLES)
    entry_here = next((entry for entry in everyone if entry[:2] == (own_role, own_index)), None)
    if entry_here is None:
        listed = ", ".join(f"{role} {_span(len(cluster[role]))}" for role in _ROLES if cluster.get(role)) or "no task at all"
        raise UsageError(f"TF_CONFIG: this process is to be {own_role} {own_index}, but the cluster has {listed}; mend task or cluster")
    hosts = list(dict.fromkeys(host for _, _, host, _ in everyone))
    ranks = [entry for entry in everyone if entry[0] == "worker" or (entry[0] == "chief" and "ps" not in cluster)]
    per_host = {host: [entry for entry in ranks if entry[2] == host] for host in hosts}
    by_node = tuple(len(entries) for entries in per_host.values())
    if 0 in by_node:
        counts = ", ".join(f"{host}: {len(entries)}" for host, entries in per_host.items())
        raise UsageError(
            f"TF_CONFIG: every host needs a worker (found {counts}); where each task is in a container of its own, have workers alone: "
            "with --mode async and --ps the first of these nodes also get chief and parameter servers"
        )
    ordered = [entry for host in hosts for entry in per_host[host]]
    ports = {f"worker-{number}": port for number, (_, _, _, port) in enumerate(ordered)}
    ports |= {f"{role}-{index}": port for role, index, _, port in everyone if role == "ps" or (role == "chief" and "ps" in cluster)}
    node = hosts.index(entry_here[2])
    here = [entry for entry in everyone if entry[2] == entry_here[2]]
    used = {port for _, _, _, port in everyone}
    control = max(port for _, _, host, port in everyone if host == hosts[0])
    shape: dict[str, int | tuple[int, ...]] = {"nodes": len(hosts), "procs_per_node": to_procs_per_node(by_node)}
    if "ps" in cluster:
        shape["ps"] = len(cluster["ps"])
    return Membership(
        "TF_CONFIG",
        node,
        here.index(entry_here),
        (hosts[0], _ports_above(control, used)),
        shape,
        len(everyone) - len(hosts),
        tuple(hosts),
        ports,
    )


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


INDEX = "JOB_COMPLETION_INDEX"
_KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_PROCESSES = "PET_NPROC_PER_NODE"
_BY_DEVICES = ("auto", "cpu", "gpu")  # values that torchrun would resolve; here the job has the number of processes


def indexed_job(environment: Variables, options: Options) -> Membership | None:
    """Return the place of a pod of an Indexed Job, JobSet or TrainJob; None without rendezvous."""
    index = environment.get(INDEX, "").strip()
    if not index or options.rendezvous is None or options.node_rank is not None:
        return None
    nodes = options.nodes
    if not index.isdecimal() or (nodes is not None and int(index) >= nodes):
        raise UsageError.of(INDEX, index, "a whole number" if nodes is None else f"0 to {nodes - 1} (--nodes {nodes})")
    shape = {} if nodes is None else {"nodes": nodes}
    return Membership(INDEX, int(index), 0, _rendezvous(options.rendezvous), shape, starts_again=True)


def kubeflow(environment: Variables, options: Options) -> Membership | None:
    """Return the place of a pod of a TrainJob or PyTorchJob from torchrun's variables."""
    variables = {name: environment[name].strip() for name in (*_KUBEFLOW, _PROCESSES) if environment.get(name, "").strip()}
    if any(name not in variables for name in _KUBEFLOW):
        return None
    nodes, node = (_whole_number(variables, name) for name in ("PET_NNODES", "PET_NODE_RANK"))
    if not 0 <= node < nodes:
        raise UsageError(f"PET_NODE_RANK {node} and PET_NNODES {nodes} do not fit; nodes run from 0 to PET_NNODES - 1")
    if nodes == 1:
        return None
    shape = {"nodes": nodes}
    if variables.get(_PROCESSES, "auto") not in _BY_DEVICES:
        shape["procs_per_node"] = _whole_number(variables, _PROCESSES)
    try:
        host, port = _endpoint(f"{variables['PET_MASTER_ADDR']}:{variables['PET_MASTER_PORT']}")
    except ValueError as error:
        raise UsageError.of("PET_MASTER_PORT", variables["PET_MASTER_PORT"], "a port from 1 to 65535") from error
    return Membership("Kubeflow (PET_NNODES)", node, 0, (host, (port,)), shape, starts_again=True)


def _whole_number(variables: Variables, name: str) -> int:
    if not variables[name].isdecimal():
        allowed = "one number of nodes, not a range, as a run does not change it by itself" if ":" in variables[name] else "a whole number"
        raise UsageError.of(name, variables[name], allowed)
    return int(variables[name])


JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for a job's command and its children, not for processes on nodes


def in_ray_job(environment: Variables) -> bool:
    """Return whether this is the environment of a Ray job's command or its child."""
    return bool(environment.get(JOB_VARIABLE))


# A node's first process is its agent, the first of all also the driver; the others wait, so that their launcher sees the exit code.

ENVIRONMENTS: Sequence[Callable[[Variables, Options], Membership | None]] = (
    indexed_job,
    manual,
    torchrun,
    kubeflow,
    tf_config,
    world_size,
)  # each returns a place, or None outside of its contract; the first place counts


def detect(
    environment: Variables, rendezvous: str | None, node_rank: int | None, nodes: int | None, procs_per_node: ProcsPerNode = 1
) -> Membership | None:
    """Return this process's place; None if it is alone. Raises UsageError for a bad contract."""
    options = Options(rendezvous, node_rank, nodes, procs_per_node)
    places = (place_of(environment, options) for place_of in ENVIRONMENTS)
    return next((place for place in places if place is not None), None)
