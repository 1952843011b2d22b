"""Packages from the user's Debian archive: fetched by apt into a folder, read as streams, installed nowhere, unpacked nowhere."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Self, cast

from ....core.errors import TrainerError, UsageError
from ....core.untrusted.console import note

__all__ = ["Package", "described", "fetch", "read_files"]

LARGEST_FILE_BYTES = 32 << 20
"""Of a file in a package; no catalogue and no page of a manual is as large."""

MOST_READ_BYTES = 512 << 20
"""Of the files of a package that are read, together; the manuals of an office suite have a tenth of it."""

MOST_FILES = 1_000_000
"""Of a package."""

LONGEST_NAME_BYTES = 1 << 15
"""Of a file in a package, folders included; Linux opens none that is longer than 4,096."""

_FETCH_SECONDS = 3600.0
_NO_APT = (
    "data: 'debian-text' is made from packages of a Debian archive by {tool!r}, which this machine has not. Use a machine with Debian or "
    "one of its descendants, or give a folder of .deb files with --data-dir (dpkg-deb reads them)."
)


@dataclass(frozen=True, slots=True)
class Package:
    """What a .deb file says of itself; `licences` are those that its copyright file names, empty where it has none or names none."""

    name: str
    version: str
    sha256: str
    licences: tuple[str, ...]


def fetch(names: Sequence[str], folder: Path) -> tuple[list[Path], list[str]]:
    """Have apt download those of the packages that the archive has into `folder`; return their files, and the names that it has not.

    What lies there already is not fetched again; what the archive names no more, such as an older version, or is damaged is removed. Raises
    UsageError where there is no apt or no package at all, and TrainerError, which leaves the folder to another try, where apt fails.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UsageError(_NO_APT.format(tool=tool))
    shown = _run(["apt-cache", "show", "--no-all-versions", *names], folder, 120.0)
    stanzas = [dict(re.findall(r"^(Package|Version|SHA256): (\S+)$", stanza, re.MULTILINE)) for stanza in shown.stdout.split("\n\n")]
    there = {stanza["Package"]: stanza for stanza in stanzas if len(stanza) == 3}
    wanted = {name: f"{name}={there[name]['Version']}" for name in names if name in there}
    if not wanted:
        raise UsageError(
            f"data: apt knows none of the packages that 'debian-text' is made from ({', '.join(names[:3])}, …). Is its list of packages "
            "there? `apt-get update` fetches it, as root."
        )
    note(f"data: fetching {len(wanted)} packages with apt-get download, to read and not to install; the largest part of half a gigabyte")
    done = _run(["apt-get", "download", "-q", *wanted.values()], folder, _FETCH_SECONDS)
    if done.returncode:
        told = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("E:")), f"exit code {done.returncode}")
        raise TrainerError(f"data: apt-get download failed: {told}. Try again, with a network and after `apt-get update`.")
    found = _sound_files({there[name]["SHA256"]: name for name in wanted}, folder)
    if lacking := [wanted[name] for name in wanted if name not in found]:
        raise TrainerError(f"data: apt-get download ended well, but there is no sound file of {', '.join(lacking)}. Try again.")
    return list(found.values()), [name for name in names if name not in there]


def _sound_files(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Return the files of packages, given by digest, that lie in a folder, and remove all others: apt keeps what is of the right size."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.deb")):
        name = names.get(_sha256(path))
        if name is None:
            path.unlink()
        else:
            found[name] = path
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: Sequence[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrainerError(f"data: `{command[0]} {command[1]}` did not end within {seconds:g} s. Try again later.") from error


def described(path: Path) -> Package:
    """Return what a .deb file says of itself. Raises UsageError where it is none."""
    if shutil.which("dpkg-deb") is None:
        raise UsageError(_NO_APT.format(tool="dpkg-deb"))
    whole = path.absolute()
    done = _run(["dpkg-deb", "--show", "--showformat=${Package}\\n${Version}", str(whole)], whole.parent, 60.0)
    name, _, version = done.stdout.partition("\n")
    if done.returncode or not name:
        raise UsageError(f"data: {str(path)!r} is no package of Debian: {done.stderr.strip()[-200:]}")
    stated = [text for _, text in read_files(path, lambda place: place == f"usr/share/doc/{name}/copyright")]
    found = re.findall(r"^License:[ \t]*(\S.*)$", stated[0].decode(errors="replace"), re.MULTILINE) if stated else []
    licences = tuple(dict.fromkeys(" ".join(one.split())[:80] for one in found))[:20]
    return Package(name, version.strip(), _sha256(path), licences)


def read_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the regular files in a package whose name is `wanted`; larger ones than any text are passed over.

    Raises UsageError for a package that is damaged, or has more text than any.
    """
    read_bytes = 0
    command = ["dpkg-deb", "--fsys-tarfile", str(path.absolute())]
    with (
        TemporaryFile() as told,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, stdin=subprocess.DEVNULL) as child,
    ):
        unpacked = cast(IO[bytes], child.stdout)
        try:
            with tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_Header) as archive:
                for count, member in enumerate(archive):
                    if count >= MOST_FILES:
                        raise UsageError(f"data: {str(path)!r} has more than {MOST_FILES:,} files.")
                    name = member.name.removeprefix("./")
                    if member.isreg() and member.size <= LARGEST_FILE_BYTES and wanted(name):
                        file = archive.extractfile(member)
                        read_bytes += member.size
                        if read_bytes > MOST_READ_BYTES:
                            raise UsageError(f"data: {str(path)!r} has more than {MOST_READ_BYTES >> 20} MiB of text.")
                        if file is not None:
                            yield name, file.read()
                    archive.members = []  # type: ignore[attr-defined]  # tarfile would remember each
            while unpacked.read(1 << 20):  # what is left is padding; dpkg-deb fails where nobody takes it
                pass
            if child.wait():
                raise _damaged(path, f"dpkg-deb ended with exit code {child.returncode}", told)
        except (tarfile.TarError, RecursionError) as error:  # the latter of a long row of long names
            child.kill()
            child.wait()
            raise _damaged(path, str(error), told) from error
        finally:
            child.kill()  # it has ended, or nobody reads on


class _Header(tarfile.TarInfo):
    """A header of the kinds that deb(5) allows, long names no longer than any; another one is no archive's end, but an error.

    tarfile takes one that it cannot read for the end, and reads those that prolong others into memory, however large they say they are.
    """

    _LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
    _FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
    _OTHERS = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the header in a block. Raises ReadError for what is none, or none of a package, and HeaderError at the archive's end."""
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(str(error)) from error
            raise
        if found.type not in (*cls._LONG, *cls._FILES, *cls._OTHERS):
            raise tarfile.ReadError(f"a header of the kind {found.type!r}, which no package has")
        if found.type in cls._LONG and not 0 <= found.size <= LONGEST_NAME_BYTES:
            raise tarfile.ReadError(f"a name of {found.size:,} bytes")
        return found


def _damaged(path: Path, problem: str, told: IO[bytes]) -> UsageError:
    """Return the error for a package, with the end of what dpkg-deb has told in a file."""
    told.seek(max(0, told.seek(0, os.SEEK_END) - 300))
    said = " ".join(told.read().decode(errors="replace").split())
    return UsageError(f"data: the package {str(path)!r} is damaged: {problem}{f' ({said})' if said else ''}. Fetch it again.")
