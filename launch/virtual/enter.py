"""Enter a virtual node, then become the program: ``enter.py OWNER USER NETWORK CGROUP_FILES -- PROGRAM ARGUMENTS``.

OWNER is the id of the process that must still be the parent; USER and NETWORK are open descriptors of namespaces (USER is ``-``
where there is none); CGROUP_FILES are ``cgroup.procs`` files joined by ``:`` (or ``-``). The program keeps this process's id, has
been limited since its first instruction, and gets no capability that the user lacks.

Runs as ``python -I -S enter.py`` and therefore imports nothing but the standard library. A process that becomes no other program calls
`enter` instead.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

EXIT_CANNOT_ENTER = 126
EXIT_NO_PROGRAM = 127

_CAPABILITY_VERSION_3 = 0x20080522


def _join(descriptor: str) -> None:
    """Join one namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(int(descriptor), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(int(descriptor))


def enter(user: str, network: str, cgroups: str) -> None:
    """Join the node's groups, then its namespaces: the files of the groups belong to the user outside. Raises OSError."""
    if cgroups != "-":
        for file in cgroups.split(":"):
            with open(file, "w") as processes:
                processes.write("0")
    for descriptor in (user, network):
        if descriptor != "-":
            _join(descriptor)


def drop_capabilities() -> None:
    """Give up what a user namespace has given to whoever joins it, as the start of another program does. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable ones, twice 32 of each
    if libc.capset(header, none) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _enter(owner: int, user: str, network: str, cgroups: str) -> None:
    enter(user, network, cgroups)
    if os.getppid() != owner:
        raise ProcessLookupError(0, "the process that started this one has ended")


def _fail(code: int, message: str) -> NoReturn:
    sys.stderr.write(f"trainer: {message}\n")
    sys.exit(code)


def main() -> None:
    """Enter and become the program; end with 126 or 127 and a line on standard error where that fails."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    owner, user, network, cgroups, dashes, *program = sys.argv[1:]
    if dashes != "--" or not program:
        sys.exit("usage: enter.py OWNER USER NETWORK CGROUP_FILES -- PROGRAM ARGUMENTS")
    try:
        _enter(int(owner), user, network, cgroups)
    except OSError as error:
        _fail(EXIT_CANNOT_ENTER, f"cannot enter the virtual node: {error}")
    try:
        os.execvp(program[0], program)
    except OSError as error:
        _fail(EXIT_NO_PROGRAM, f"cannot run {program[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
