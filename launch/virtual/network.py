"""Virtual nodes on one Linux machine, each with an address, link and traffic counters.

    with VirtualNetwork(3, 100e6, lambda node: 1.0) as network:
        processes = [network.popen(node, ["ping", "-c", "1", "127.0.0.1"]) for node in range(3)]

Only the CPU groups have names in the file system, and nothing remains after any end of the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...core.errors import UsageError
from ...core.process import ending_in_words, isolated_python, python
from ...core.units import bandwidth_text
from .cpu_quota import CpuGroup
from .namespaces import (
    INTERFACE,
    MAX_BITS_PER_SECOND,
    MAX_NODES,
    MESSAGE_BYTES,
    MIN_BITS_PER_SECOND,
    MissingCapabilityError,
    NetworkLostError,
    VirtualNodeCapability,
    address,
)

_CLOSE_SECONDS = 10.0
_GROUP_SECONDS = 1.0
_ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True, slots=True)
class _Started:
    """State between `start` and `close`; `bridge` keeps the links alive if the holder is killed."""

    holder: subprocess.Popen[bytes]
    control: socket.socket
    bridge: int
    user: int | None
    networks: tuple[int, ...]
    processes_files: tuple[str | None, ...]


class VirtualNetwork:
    """Nodes 0, 1, … of one run on one switch, isolated from the outside.

    `bandwidth_bits_per_second` limits each direction of a node's link (frames, without preamble and gap); None: no limit. `cores_of(node)`
    is the node's CPU limit in cores, or None. Raises UsageError for values out of range.
    """

    interface = INTERFACE  # name of the interface to the other nodes; GLOO_SOCKET_IFNAME needs it

    def __init__(self, nodes: int, bandwidth_bits_per_second: float | None, cores_of: Callable[[int], float | None]) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise UsageError.of("nodes", nodes, f"1 to {MAX_NODES} virtual nodes on one machine")
        rate = bandwidth_bits_per_second
        if rate is not None and not MIN_BITS_PER_SECOND <= rate <= MAX_BITS_PER_SECOND:
            raise UsageError.of("bandwidth", bandwidth_text(rate), "12kbit to 34gbit for virtual nodes")
        self._rate = rate
        self._cores = tuple(cores_of(node) for node in range(nodes))
        for node, limit in enumerate(self._cores):
            if limit is not None and not 0.001 <= limit <= 10_000:
                raise UsageError.of("cores_per_node", f"{limit:g}", f"0.001 to 10000 cores (node {node})")
        self._started: _Started | None = None
        self._programs: list[subprocess.Popen[Any]] = []

    def start(self) -> None:
        """Make the nodes. Raises MissingCapabilityError (a UsageError), leaving nothing behind."""
        if self._started is not None:
            raise RuntimeError("the virtual network has been started already")
        if sys.platform != "linux":
            raise MissingCapabilityError("namespaces", "Virtual nodes need Linux", "Use --network host.")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            holder = subprocess.Popen(
                python("crosstrain.launch.virtual.namespace_holder", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it
            )
        try:
            self._started = _ask_for_nodes(holder, ours, self._rate, self._cores)
        except BaseException:
            ours.close()
            _wait_or_kill(holder)
            raise
        finally:
            if holder.stderr is not None:
                holder.stderr.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nodes' IPv4 addresses, in order."""
        return tuple(address(node) for node in range(len(self._cores)))

    def cores(self, node: int) -> float | None:
        """Return a node's CPU limit in cores, if any."""
        return self._cores[node]

    @property
    def rootless(self) -> bool:
        """Whether the nodes are in a user namespace, as the caller is an ordinary user."""
        return self._running().user is not None

    @property
    def holder_pid(self) -> int:
        """Pid of the holder, a child of the caller."""
        return self._running().holder.pid

    def popen(self, node: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start a program in a node, with options of `Popen`.

        ``shell``, ``executable`` and ``close_fds`` are not supported. The process is the program itself, in the node's CPU group from its
        first instruction. It exits with 127 if the program does not exist, 126 if it cannot enter the node, with a line on standard error.
        """
        refused = {"shell", "executable", "close_fds"} & popen_kwargs.keys()
        if refused:
            raise TypeError(f"popen in a virtual node does not take {', '.join(sorted(refused))}")
        namespaces, groups = self.place(node)
        inherited = [*popen_kwargs.pop("pass_fds", ()), *namespaces.values()]
        place = [str(os.getpid()), str(namespaces.get("user", "-")), str(namespaces["network"]), groups]
        program = subprocess.Popen(isolated_python(str(_ENTER), *place, "--", *argv), pass_fds=inherited, **popen_kwargs)
        self._programs.append(program)
        return program

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """Return a node's namespaces (``user``, ``network``) and files of CPU groups for `enter`."""
        started = self._running()
        user = {} if started.user is None else {"user": started.user}
        return {**user, "network": started.networks[node]}, started.processes_files[node] or "-"

    def check(self) -> None:
        """Raise NetworkLostError if the holder, which cleans up, has ended."""
        code = None if self._started is None else self._started.holder.poll()
        if code is not None:
            raise NetworkLostError(f"the holder of the virtual network (process {self.holder_pid}) {ending_in_words(code)}")

    def close(self) -> None:
        """Remove the nodes; their processes are killed after half a second. Idempotent."""
        started, self._started = self._started, None
        if started is None:
            return
        with started.control:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the holder was killed
                started.control.send(json.dumps("close").encode())
            _wait_or_kill(started.holder)
        for program in self._programs:  # the holder does not see those that had not entered their node
            _kill_if_running(program)
        self._programs.clear()
        for file in filter(None, started.processes_files):  # exists only if the holder was killed
            CpuGroup(Path(file).parent).remove(_GROUP_SECONDS)
        for descriptor in (started.bridge, started.user, *started.networks):
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> _Started:
        if self._started is None:
            raise RuntimeError("the virtual network is not running")
        return self._started


def _ask_for_nodes(holder: subprocess.Popen[bytes], ours: socket.socket, rate: float | None, cores: Sequence[float | None]) -> _Started:
    try:
        ours.send(json.dumps({"bits_per_second": rate, "cores": cores}).encode())
        message, descriptors, _, _ = socket.recv_fds(ours, MESSAGE_BYTES, MAX_NODES + 2)
    except (BrokenPipeError, ConnectionResetError):
        message, descriptors = b"", []
    answer = json.loads(message or b"{}")
    if "lacking" in answer:
        capability, reason, remedy = answer["lacking"]
        raise MissingCapabilityError(capability, reason, remedy)
    if "ready" not in answer:
        written = holder.stderr.read().decode(errors="replace") if holder.stderr else ""
        raise RuntimeError(f"the holder of the virtual network failed:\n{answer.get('failed', written)}")
    ready = answer["ready"]
    bridge, user = descriptors.pop(0), descriptors.pop() if ready["rootless"] else None
    return _Started(holder, ours, bridge, user, tuple(descriptors), tuple(ready["processes_files"]))


def _kill_if_running(program: subprocess.Popen[Any]) -> None:
    """Kill a child without reaping it, as the caller reads its status."""
    if program.returncode is not None:
        return
    try:
        if os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(program.pid, signal.SIGKILL)
    except ChildProcessError:
        return  # the caller has reaped it by its pid


def _wait_or_kill(holder: subprocess.Popen[bytes]) -> None:
    try:
        holder.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


@dataclass(frozen=True, slots=True)
class Possibility:
    """Missing capabilities of this machine; without namespaces, limits do not work either."""

    rootless: bool
    missing: Mapping[VirtualNodeCapability, MissingCapabilityError]


def possible() -> Possibility:
    """Run a program in one node with both limits, which takes about a quarter of a second."""
    rate: float | None = 1e9
    cores: float | None = 1.0
    missing: dict[VirtualNodeCapability, MissingCapabilityError] = {}
    rootless = False
    while "namespaces" not in missing:
        try:
            with VirtualNetwork(1, rate, lambda _, limit=cores: limit) as network:  # type: ignore[misc]
                rootless = network.rootless
                _run_something(network)
            break
        except MissingCapabilityError as error:
            missing[error.capability] = error
            rate = None if "bandwidth" in missing else rate
            cores = None if "cpu_quota" in missing else cores
    return Possibility(rootless, missing)


def _run_something(network: VirtualNetwork) -> None:
    program = network.popen(0, isolated_python("-c", ""), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, written = program.communicate()
    if program.returncode != 0:
        reason = f"A program could not be started in a virtual node ({written.decode(errors='replace').strip()})"
        raise MissingCapabilityError("namespaces", reason, "Use --network host.")
