"""Virtual nodes: several nodes on one Linux machine, each with an address, a link and traffic counters of its own.

    with VirtualNetwork(3, 100e6, lambda node: 1.0) as network:
        processes = [network.popen(node, ["ping", "-c", "1", "127.0.0.1"]) for node in range(3)]

Nothing has a name in the file system except the CPU groups, and nothing remains after the caller's end, however it comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...core.errors import UsageError
from ...core.process import ending_in_words, isolated_python, python
from ...core.units import bandwidth_text
from .addressing import INTERFACE, LEAST_BITS_PER_SECOND, MESSAGE_BYTES, MOST_BITS_PER_SECOND, MOST_NODES, address
from .cpu_quota import CpuGroup
from .errors import MissingCapabilityError, NetworkLostError, VirtualNodeCapability

__all__ = ["Possibility", "VirtualNetwork", "possible"]

_CLOSE_SECONDS = 10.0
_GROUP_SECONDS = 1.0
_ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True, slots=True)
class _Started:
    """What exists between `start` and `close`; `bridge` is kept open so that the nodes can talk even if the holder is killed."""

    holder: subprocess.Popen[bytes]
    control: socket.socket
    bridge: int
    user: int | None
    networks: tuple[int, ...]
    processes_files: tuple[str | None, ...]


class VirtualNetwork:
    """Nodes 0, 1, … of one run, joined by one switch, with no way to or from the outside.

    `bandwidth_bits_per_second` limits each node's link in each direction (frames, without preamble and gap); None: as fast as the
    machine copies. `cores_of(node)` is the node's CPU limit in cores, or None. Raises UsageError for figures that cannot be.
    """

    interface = INTERFACE
    """Name of the interface that leads to the other nodes; GLOO_SOCKET_IFNAME needs it."""

    def __init__(self, nodes: int, bandwidth_bits_per_second: float | None, cores_of: Callable[[int], float | None]) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise UsageError.of("nodes", nodes, f"1 to {MOST_NODES} virtual nodes on one machine")
        rate = bandwidth_bits_per_second
        if rate is not None and not LEAST_BITS_PER_SECOND <= rate <= MOST_BITS_PER_SECOND:
            raise UsageError.of("bandwidth", bandwidth_text(rate), "12kbit to 34gbit for virtual nodes")
        self._rate = rate
        self._cores = tuple(cores_of(node) for node in range(nodes))
        for node, limit in enumerate(self._cores):
            if limit is not None and not 0.001 <= limit <= 10_000:
                raise UsageError.of("cores_per_node", f"{limit:g}", f"0.001 to 10000 cores (node {node})")
        self._started: _Started | None = None
        self._programs: list[subprocess.Popen[Any]] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Make the nodes. Raises MissingCapabilityError (a UsageError) where the machine cannot, with nothing left behind."""
        if self._started is not None:
            raise RuntimeError("the virtual network has been started already")
        if sys.platform != "linux":
            raise MissingCapabilityError("namespaces", "Virtual nodes need Linux", "Use --network host.")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            holder = _start_holder(theirs)
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
        """Return the CPU limit of a node in cores, or None where it has none."""
        return self._cores[node]

    @property
    def rootless(self) -> bool:
        """Whether the nodes live in a user namespace, because the caller is an ordinary user."""
        return self._running().user is not None

    @property
    def holder_pid(self) -> int:
        """Id of the one helper process; it is a child of the caller, who should not mistake its end for a task's."""
        return self._running().holder.pid

    def popen(self, node: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start a program in a node; takes what `subprocess.Popen` takes, except ``shell``, ``executable`` and ``close_fds``.

        The returned process is the program itself: a direct child of the caller, in the node's CPU group since its first
        instruction. A program that does not exist ends with code 127, one that cannot enter the node with 126, each with a line on
        its standard error.
        """
        refused = {"shell", "executable", "close_fds"} & popen_kwargs.keys()
        if refused:
            raise TypeError(f"popen in a virtual node does not take {', '.join(sorted(refused))}")
        started = self._running()
        descriptors = [started.networks[node]] + ([] if started.user is None else [started.user])
        inherited = [*popen_kwargs.pop("pass_fds", ()), *descriptors]
        place = [
            str(os.getpid()),
            "-" if started.user is None else str(started.user),
            str(started.networks[node]),
            started.processes_files[node] or "-",
        ]
        program = subprocess.Popen(isolated_python(str(_ENTER), *place, "--", *argv), pass_fds=inherited, **popen_kwargs)
        self._programs.append(program)
        return program

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """Return what a process has to join to be in a node: descriptors of its namespaces by their kinds, and the files of CPU groups.

        The second as `enter` of ``enter.py`` takes it, and the first by the names of its parameters.
        """
        started = self._running()
        user = {} if started.user is None else {"user": started.user}
        return {**user, "network": started.networks[node]}, started.processes_files[node] or "-"

    def peer_counters(self) -> list[tuple[int, int]]:
        """Return for each node (bytes received from it, bytes sent to it), counted at the switch's end of its cable, whole frames."""
        started = self._running()
        try:
            with self._lock:
                started.control.send(json.dumps({"do": "counters"}).encode())
                answer = started.control.recv(MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            raise RuntimeError("the holder of the virtual network has ended, so nobody can count any more")
        return [(received, sent) for received, sent in json.loads(answer)["counters"]]

    def check(self) -> None:
        """Raise NetworkLostError where the holder has ended: nobody would count any more, or tidy up."""
        code = None if self._started is None else self._started.holder.poll()
        if code is not None:
            raise NetworkLostError(f"the holder of the virtual network (process {self.holder_pid}) {ending_in_words(code)}")

    def close(self) -> None:
        """Take the nodes away; processes still in them get half a second and are then killed. A second call does nothing."""
        started, self._started = self._started, None
        if started is None:
            return
        with self._lock, started.control:
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the holder was killed: what it held goes with our descriptors
                started.control.send(json.dumps({"do": "close"}).encode())
            _wait_or_kill(started.holder)
        for program in self._programs:  # the holder cannot see one that was still on its way into its node
            _kill_if_running(program)
        self._programs.clear()
        for file in filter(None, started.processes_files):  # gone already, unless the holder was killed
            CpuGroup(Path(file).parent).remove(_GROUP_SECONDS)
        for descriptor in (started.bridge, started.user, *started.networks):
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _running(self) -> _Started:
        if self._started is None:
            raise RuntimeError("the virtual network is not running")
        return self._started


def _start_holder(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the holder in a session of its own, so that Ctrl-C does not reach it."""
    return subprocess.Popen(
        python("crosstrain.launch.virtual.namespace_holder", str(theirs.fileno())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def _ask_for_nodes(holder: subprocess.Popen[bytes], ours: socket.socket, rate: float | None, cores: Sequence[float | None]) -> _Started:
    try:
        ours.send(json.dumps({"bits_per_second": rate, "cores": cores}).encode())
        message, descriptors, _, _ = socket.recv_fds(ours, MESSAGE_BYTES, MOST_NODES + 2)
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
    """Kill a child of ours without reaping it: its status is the caller's to read."""
    if program.returncode is not None:
        return
    try:
        if os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(program.pid, signal.SIGKILL)
    except ChildProcessError:
        return  # the caller has reaped it by its id


def _wait_or_kill(holder: subprocess.Popen[bytes]) -> None:
    try:
        holder.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


@dataclass(frozen=True, slots=True)
class Possibility:
    """What this machine allows; `reason` and `remedy` belong to `ok`, the other reasons to what they are named after.

    `rootless` is whether a user namespace was needed. Where `ok` is False the limits are not possible either.
    """

    ok: bool
    rootless: bool
    reason: str | None
    remedy: str | None
    bandwidth: bool
    bandwidth_reason: str | None
    cpu_quota: bool
    cpu_quota_reason: str | None


def possible() -> Possibility:
    """Find out by making one node with both limits, running a program in it, and taking it away; about a quarter of a second."""
    rate: float | None = 1e9
    cores: float | None = 1.0
    lacks: dict[VirtualNodeCapability, MissingCapabilityError] = {}
    rootless = False
    while "namespaces" not in lacks:
        try:
            with VirtualNetwork(1, rate, lambda _, limit=cores: limit) as network:  # type: ignore[misc]
                rootless = network.rootless
                _run_something(network)
            break
        except MissingCapabilityError as lack:
            lacks[lack.capability] = lack
            rate = None if "bandwidth" in lacks else rate
            cores = None if "cpu_quota" in lacks else cores
    return _possibility(rootless, lacks)


def _run_something(network: VirtualNetwork) -> None:
    program = network.popen(0, isolated_python("-c", ""), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, written = program.communicate()
    if program.returncode != 0:
        reason = f"A program could not be started in a virtual node ({written.decode(errors='replace').strip()})"
        raise MissingCapabilityError("namespaces", reason, "Use --network host.")


def _possibility(rootless: bool, lacks: dict[VirtualNodeCapability, MissingCapabilityError]) -> Possibility:
    none, bandwidth, quota = (lacks.get(capability) for capability in ("namespaces", "bandwidth", "cpu_quota"))
    return Possibility(
        ok=none is None,
        rootless=rootless,
        reason=none.reason if none else None,
        remedy=none.remedy if none else None,
        bandwidth=not (none or bandwidth),
        bandwidth_reason=str(bandwidth or none) if bandwidth or none else None,
        cpu_quota=not (none or quota),
        cpu_quota_reason=str(quota or none) if quota or none else None,
    )
