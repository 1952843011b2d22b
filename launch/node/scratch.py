"""An agent's temporary folder, ports, environment, and the identity of its machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import RunFailedError
from ...core.process import PRIVATE_VARIABLES, pid_namespace, start_of
from ...engine.protocol.node_messages import Prepare

_NAME = re.compile(r"crosstrain-(\d+)-(\d+)-(\d+)-\w+")


def make_scratch() -> Path:
    """Make this process's private folder, after removing those of ended processes."""
    sweep()
    return Path(tempfile.mkdtemp(prefix=f"crosstrain-{pid_namespace()}-{os.getpid()}-{start_of(os.getpid())}-"))


def remove_scratch(folder: Path) -> None:
    """Remove a temporary folder, if it exists."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> list[Path]:
    """Remove this user's folders whose process in this PID namespace has ended; return them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob("crosstrain-*-*-*-*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or int(name[1]) != pid_namespace() or start_of(int(name[2])) == int(name[3]):
            continue
        if _is_user_folder(folder):
            remove_scratch(folder)
            removed.append(folder)
    return removed


def _is_user_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another agent was faster
        return False


# Frameworks take a port number, not a socket, so reservation is by blocks outside of Linux's ephemeral range: the process that has bound a
# block's first port owns it; foreign ports are skipped, and a port taken later fails the start, which is retried with others.

FIRST_PORT = 21000
BLOCK_PORTS = 50
BLOCKS = 180
LAST_PORT = FIRST_PORT + BLOCKS * BLOCK_PORTS - 1


class PortBlock:
    """A block of ports held by this process until `release` or its end."""

    def __init__(self) -> None:
        start = os.getpid() % BLOCKS
        for offset in range(BLOCKS):
            first = FIRST_PORT + (start + offset) % BLOCKS * BLOCK_PORTS
            lock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                lock.bind(("127.0.0.1", first))
            except OSError:
                lock.close()
                continue
            self._lock = lock
            self._next = first + 1
            self._end = first + BLOCK_PORTS
            return
        raise RunFailedError(f"all {BLOCKS} blocks of ports from {FIRST_PORT} on are in use; are other runs still going?")

    def take(self, count: int) -> list[int]:
        """Return `count` free, unused ports. Raises RunFailedError if the block has no more."""
        taken: list[int] = []
        while len(taken) < count:
            if self._next >= self._end:
                raise RunFailedError(f"no {count} free ports left up to {self._end - 1}")
            if _free(self._next):
                taken.append(self._next)
            self._next += 1
        return taken

    def release(self) -> None:
        """Release the block."""
        self._lock.close()


def _free(port: int) -> bool:
    """Return whether the port can be bound on every address, as TensorFlow's server will."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


FOREIGN_VARIABLES = frozenset(
    {
        *("TF_CONFIG", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *PRIVATE_VARIABLES,
    }
)  # hidden from tasks: the rank from another launcher, and the secrets of agents and driver
NO_GPU = "-1"  # CUDA_VISIBLE_DEVICES of a task without GPU


def task_environment(inherited: Mapping[str, str], scratch: Path | None, visible_as: str | None) -> dict[str, str]:
    """Return the agent's environment without other launchers' variables.

    `scratch` is the folder for temporary files, which both frameworks leave behind; None: unknown yet. `visible_as` is the task's GPU as
    CUDA names it; None changes nothing. Indices are in PCI order, as for nvidia-ml, unless the user has set another order.
    """
    retained = {key: value for key, value in inherited.items() if key not in FOREIGN_VARIABLES}
    changed = {} if scratch is None else {"TMPDIR": str(scratch)}
    if visible_as is not None:
        changed |= {"CUDA_VISIBLE_DEVICES": visible_as, "CUDA_DEVICE_ORDER": inherited.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return {**retained, **changed}


def expected_gpus(prepare: Prepare, visible: Sequence[Mapping[str, Any]] | None) -> list[str | None]:
    """Guess the GPUs of a node's workers; a spare with a wrong guess is not claimed."""
    workers, before = prepare.tasks, prepare.workers_before
    if not visible:
        return [None] * workers
    if prepare.device == "cpu" or len(visible) < prepare.workers_on_machine:
        return [NO_GPU] * workers
    return [str(gpu["visible_as"]) for gpu in visible[before : before + workers]]


ADDRESS_VARIABLE = "CROSSTRAIN_NODE_ADDRESS"  # this machine's address for other nodes, if the launcher knows it
ADDRESS_TOWARDS_VARIABLE = "CROSSTRAIN_NODE_ADDRESS_TOWARDS"  # a host that all nodes reach; the address is that towards it
ANY_PORT = 9  # nothing is sent there


def node_identity() -> dict[str, str]:
    """Return unique ids of this machine (``boot``) and its network namespace (``network``)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return {
        "boot": boot.read_text().strip() if boot.exists() else socket.gethostname(),
        "network": os.readlink(network) if network.exists() else "host",
    }


def address_for_others(environment: Mapping[str, str]) -> str | None:
    """Return this machine's address for other nodes, if the launcher's variables determine it."""
    if known := environment.get(ADDRESS_VARIABLE):
        return known
    towards = environment.get(ADDRESS_TOWARDS_VARIABLE)
    return address_towards(towards) if towards else None


def address_towards(host: str) -> str:
    """Return this machine's source address towards a host. Raises OSError without a route."""
    family, _, _, _, where = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address
