"""Hosts for ssh: an sshd in each of some network namespaces, with temporary keys."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from bridged_hosts import BridgedHosts, bridged_hosts

GREETING = "Welcome to a host that prints before it obeys"
"""On standard output, without a line end: what a shell's start-up file may do."""

BANNER = "Who is let in here has asked for it"
"""In each of the thirty lines of the daemon's banner, which ssh shows on standard error."""


@dataclass(frozen=True)
class SshHosts:
    """Hosts for ssh: `hosts` are node0, node1 … in the configuration of `environment`'s `ssh`.

    That one is first on the PATH. stranger is node0 too, which refuses its user.
    """

    hosts: BridgedHosts
    folder: Path
    daemons: list[subprocess.Popen]

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    @property
    def command_prefix(self) -> list[str]:
        """The prefix of a command that is to run next to the hosts."""
        return self.hosts.command_prefix(None)

    @contextmanager
    def hidden(self, host: int, folder: Path):
        """Within the block a host sees an empty folder in this one's place."""
        inside = ["nsenter", "--mount", "--target", str(self.daemons[host].pid)]
        subprocess.run([*inside, "mount", "-t", "tmpfs", "none", folder], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", folder], check=True)

    def forget_key(self, host: int) -> None:
        """Take a host's key out of the known ones."""
        known = self.folder / "known_hosts"
        known.write_text("".join(line for line in known.read_text().splitlines(True) if self.hosts.addresses[host] not in line))

    def know_keys(self) -> None:
        """Have every host's key among the known ones."""
        key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{address} {key}" for address in self.hosts.addresses))


@contextmanager
def ssh_hosts(count: int, folder: Path):
    """Start the daemons and end them. Skips the test without sshd or namespaces."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None:
        pytest.skip("there is no sshd here")
    if os.geteuid() != 0:
        pytest.skip("an sshd that lets its users in has to be started by root")
    with bridged_hosts(count, "ssh") as hosts:
        daemons: list[subprocess.Popen] = []
        ssh = SshHosts(hosts, folder, daemons)
        _write_files(ssh)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        try:
            for host in range(count):
                log = folder / f"sshd{host}.log"
                daemons.append(subprocess.Popen([*hosts.command_prefix(host), sshd, "-D", "-f", folder / "sshd_config", "-E", log]))
            for host in range(count):
                _await_port(ssh, host)
            yield ssh
        finally:
            for daemon in daemons:
                daemon.terminate()
                daemon.wait()


def _write_files(ssh: SshHosts) -> None:
    folder = ssh.folder
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    public = (folder / "user_key.pub").read_text()
    (folder / "authorized_keys").write_text(f"""command="printf '{GREETING}'; eval \\"$SSH_ORIGINAL_COMMAND\\"" {public}""")
    ssh.know_keys()
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
        f"UseDNS no\nPidFile none\nSetEnv TRAINER_DATA_CACHE={folder}/cache\nBanner {folder}/banner\n"
    )
    (folder / "banner").write_text(f"{BANNER}\n" * 30)
    names = "".join(f"Host node{host}\n  HostName {address}\n" for host, address in enumerate(ssh.hosts.addresses))
    (folder / "ssh_config").write_text(
        f"{names}Host stranger\n  HostName {ssh.hosts.addresses[0]}\n  IdentityFile {folder}/no_key\n"
        f"Host node*\n  IdentityFile {folder}/user_key\n"
        f"Host *\n  User root\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
    )
    (folder / "bin").mkdir()
    script = folder / "bin/ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    script.chmod(0o755)


def _await_port(ssh: SshHosts, host: int) -> None:
    """Wait until a host's daemon answers."""
    probe = f"import socket; print(socket.create_connection(({ssh.hosts.addresses[host]!r}, 22), 2).recv(8))"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done = subprocess.run([*ssh.command_prefix, "python3", "-c", probe], capture_output=True, text=True, check=False)
        if "SSH-2.0" in done.stdout:
            return
        time.sleep(0.1)
    raise AssertionError(f"sshd of host {host} does not answer: {done.stderr} {(ssh.folder / f'sshd{host}.log').read_text()}")
