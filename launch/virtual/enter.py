"""Enter a virtual node and execute: ``enter.py OWNER USER NETWORK CGROUP_FILES -- COMMAND``.

OWNER is the pid that must still be the parent; USER and NETWORK are descriptors of namespaces (USER may be ``-`` for none); CGROUP_FILES
are ``cgroup.procs`` files joined by ``:`` (or ``-``). The program keeps the pid, and gets no capability that the user does not have. Runs
as ``python -I -S enter.py``, so it imports only the standard library.
"""

import ctypes
import os
import signal
import sys

EXIT_CANNOT_ENTER = 126
EXIT_NO_PROGRAM = 127
_CAPABILITY_VERSION_3 = 0x20080522


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter(user: str, network: str, cgroups: str) -> None:
    """Join the groups, then the namespaces, where group files are foreign. Raises OSError."""
    if cgroups != "-":
        for file in cgroups.split(":"):
            with open(file, "w") as processes:
                processes.write("0")
    for descriptor in (user, network):
        if descriptor != "-":
            call("setns", int(descriptor), 0)
            os.close(int(descriptor))


def drop_capabilities() -> None:
    """Drop the capabilities from joining a user namespace, as exec does. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable ones, twice 32 of each
    call("capset", header, none)


def main() -> None:
    """Enter and execute; exit with 126 or 127 and a line on standard error on failure."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    owner, user, network, cgroups, dashes, *program = sys.argv[1:]
    if dashes != "--" or not program:
        sys.exit("usage: enter.py OWNER USER NETWORK CGROUP_FILES -- PROGRAM ARGUMENTS")
    try:
        parent = int(owner)
        enter(user, network, cgroups)
        if os.getppid() != parent:
            raise ProcessLookupError(0, "the process that started this one has ended")
    except OSError as error:
        sys.stderr.write(f"trainer: cannot enter the virtual node: {error}\n")
        sys.exit(EXIT_CANNOT_ENTER)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"trainer: cannot run {program[0]!r}: {error.strerror}\n")
        sys.exit(EXIT_NO_PROGRAM)


if __name__ == "__main__":
    main()
