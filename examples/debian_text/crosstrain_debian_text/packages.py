"""Text from Debian packages: translated messages of programs, and manuals in both languages."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Self, cast

from crosstrain.core.console import note
from crosstrain.core.errors import TrainerError, UsageError

from .documents import blocks, cleaned_message, cleaned_paragraph, paired, read_mo, read_po, wrong_with

PACKAGES = (
    # messages of programs
    "abiword-common", "aptitude-common", "audacity-data", "bluefish-data", "debconf-i18n", "digikam-data",
    "epiphany-browser-data", "evolution-common", "freeciv-data", "geany-common", "gedit-common", "gimp-data",
    "gnome-control-center-data", "gnucash-common", "gnumeric-common", "gnupg-l10n", "gramps", "homebank-data",
    "inkscape", "kate5-data", "kdenlive-data", "kdevelop-l10n", "kexi-data", "kmymoney-common", "krita-l10n",
    "libc-l10n", "libgtk-3-common", "libreoffice-l10n-de", "nautilus-data", "pidgin-data",
    "plasma-workspace-data", "python3-django", "rhythmbox-data", "rpm-i18n", "skrooge-common", "tellico-data",
    "util-linux-locales", "vlc-l10n", "wesnoth-1.16-data", "wordpress-l10n",
    # manuals, German and English
    "debian-faq", "debian-faq-de", "debian-handbook", "debian-reference-de", "debian-reference-en",
    "developers-reference", "developers-reference-de", "gimp-help-de", "gimp-help-en", "gnome-user-docs",
    "libreoffice-help-de", "libreoffice-help-en-us", "maint-guide", "maint-guide-de", "mate-user-guide",
)  # fmt: skip
"""Of Debian 12; packages missing in another release are skipped."""

MAX_FILE_BYTES = 32 << 20  # larger than any catalogue or page of a manual
MAX_READ_BYTES = 512 << 20  # read per package; ten times the manuals of an office suite
MAX_FILES = 1_000_000  # per package
MAX_NAME_BYTES = 1 << 15  # of a path in a package; Linux opens none longer than 4,096
_FETCH_SECONDS = 3600.0
_NO_APT = (
    "data: 'debian-text' is made from packages of a Debian archive by {tool!r}, which this machine has not. Use a machine with Debian or "
    "one of its descendants, or give a folder of .deb files with --data-dir (dpkg-deb reads them)."
)


@dataclass(frozen=True, slots=True)
class Package:
    """Metadata of a .deb file; `licences` are those that its copyright file names."""

    name: str
    version: str
    sha256: str
    licences: tuple[str, ...]


def fetch(names: Sequence[str], folder: Path) -> tuple[list[Path], list[str]]:
    """Download the available packages into `folder`.

    Return their files and the unavailable names. Keeps files from an earlier attempt, unless outdated or damaged. Raises UsageError without
    apt or any package, and TrainerError, which keeps the folder for another attempt, if apt fails.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UsageError(_NO_APT.format(tool=tool))
    shown = _run(["apt-cache", "show", "--no-all-versions", *names], folder, 120.0)
    stanzas = [dict(re.findall(r"^(Package|Version|SHA256): (\S+)$", stanza, re.MULTILINE)) for stanza in shown.stdout.split("\n\n")]
    known = {stanza["Package"]: stanza for stanza in stanzas if len(stanza) == 3}
    wanted = {name: f"{name}={known[name]['Version']}" for name in names if name in known}
    if not wanted:
        raise UsageError(
            f"data: apt knows none of the packages that 'debian-text' is made from ({', '.join(names[:3])}, …). Is its list of packages "
            "there? `apt-get update` fetches it, as root."
        )
    note(f"data: fetching {len(wanted)} packages with apt-get download, to read and not to install; the largest part of half a gigabyte")
    done = _run(["apt-get", "download", "-q", *wanted.values()], folder, _FETCH_SECONDS)
    if done.returncode:
        message = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("E:")), f"exit code {done.returncode}")
        raise TrainerError(f"data: apt-get download failed: {message}. Try again, with a network and after `apt-get update`.")
    files = _sound_files({known[name]["SHA256"]: name for name in wanted}, folder)
    if missing := [wanted[name] for name in wanted if name not in files]:
        raise TrainerError(f"data: apt-get download ended well, but there is no sound file of {', '.join(missing)}. Try again.")
    return list(files.values()), [name for name in names if name not in known]


def _sound_files(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Return the packages' files by name, and remove others.

    Apt keeps damaged files of the right size.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.deb")):
        name = names.get(_sha256(path))
        if name is None:
            path.unlink()
        else:
            files[name] = path
    return files


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
    """Return a .deb file's metadata. Raises UsageError for other files."""
    if shutil.which("dpkg-deb") is None:
        raise UsageError(_NO_APT.format(tool="dpkg-deb"))
    whole = path.absolute()
    done = _run(["dpkg-deb", "--show", "--showformat=${Package}\\n${Version}", str(whole)], whole.parent, 60.0)
    name, _, version = done.stdout.partition("\n")
    if done.returncode or not name:
        raise UsageError(f"data: {str(path)!r} is no package of Debian: {done.stderr.strip()[-200:]}")
    stated = [text for _, text in read_files(path, lambda place: place == f"usr/share/doc/{name}/copyright")]
    stated_licences = re.findall(r"^License:[ \t]*(\S.*)$", stated[0].decode(errors="replace"), re.MULTILINE) if stated else []
    licences = tuple(dict.fromkeys(" ".join(licence.split())[:80] for licence in stated_licences))[:20]
    return Package(name, version.strip(), _sha256(path), licences)


def read_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of `wanted` regular files, except too large ones.

    Raises UsageError for an invalid package.
    """
    read_bytes = 0
    command = ["dpkg-deb", "--fsys-tarfile", str(path.absolute())]
    with (
        TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL) as child,
    ):
        unpacked = cast(IO[bytes], child.stdout)
        try:
            with tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_Header) as archive:
                for count, member in enumerate(archive):
                    if count >= MAX_FILES:
                        raise UsageError(f"data: {str(path)!r} has more than {MAX_FILES:,} files.")
                    name = member.name.removeprefix("./")
                    if member.isreg() and member.size <= MAX_FILE_BYTES and wanted(name):
                        file = archive.extractfile(member)
                        read_bytes += member.size
                        if read_bytes > MAX_READ_BYTES:
                            raise UsageError(f"data: {str(path)!r} has more than {MAX_READ_BYTES >> 20} MiB of text.")
                        if file is not None:
                            yield name, file.read()
                    archive.members = []  # type: ignore[attr-defined]  # tarfile would remember each
            while unpacked.read(1 << 20):  # the rest is padding; dpkg-deb fails if it is not read
                pass
            if child.wait():
                raise _damage_error(path, f"dpkg-deb ended with exit code {child.returncode}", log)
        except (tarfile.TarError, RecursionError) as error:  # RecursionError: a long sequence of long names
            child.kill()
            child.wait()
            raise _damage_error(path, str(error), log) from error
        finally:
            child.kill()  # has ended, unless the caller stopped early


class _Header(tarfile.TarInfo):
    """A header allowed by deb(5), with bounded names.

    tarfile would stop at invalid ones, and read any size into memory.
    """

    _LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
    _FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
    _OTHERS = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises ReadError for an invalid header, and HeaderError at the archive's end."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(str(error)) from error
            raise
        if header.type not in (*cls._LONG, *cls._FILES, *cls._OTHERS):
            raise tarfile.ReadError(f"a header of the kind {header.type!r}, which no package has")
        if header.type in cls._LONG and not 0 <= header.size <= MAX_NAME_BYTES:
            raise tarfile.ReadError(f"a name of {header.size:,} bytes")
        return header


def _damage_error(path: Path, problem: str, log: IO[bytes]) -> UsageError:
    log.seek(max(0, log.seek(0, os.SEEK_END) - 300))
    message = " ".join(log.read().decode(errors="replace").split())
    return UsageError(f"data: the package {str(path)!r} is damaged: {problem}{f' ({message})' if message else ''}. Fetch it again.")


_CATALOGUE = re.compile(r"(?:.*/)?de(?:_DE)?(?:\.UTF-8)?/LC_MESSAGES/[^/]+\.[mp]o|(?:.*/)?(?:[^/]*[-_.])?de(?:_DE)?\.[mp]o")
_PAGE = re.compile(r".+\.(?:html|page|docbook|xml)(?:\.gz)?")
_LANGUAGE = re.compile(r"(?<=/)(C|en|en-US|en_US|de|de-DE|de_DE)(?=/)|(?<=[._-])(en|de)(?=\.(?:html|xml)(?:\.gz)?$)")
_OF_PACKAGE = re.compile(r"-(en-us|en|de)(?=/|$)")


class Extraction:
    """Reads packages one after another; `left_out` counts skipped texts by reason."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = sorted(files, key=lambda path: path.name)
        self.packages: list[Package] = []
        self.left_out: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    def pairs(self) -> list[tuple[str, str]]:
        """Return the distinct English and German pairs, in an order that only packages determine."""
        pairs: dict[tuple[str, str], None] = {}
        for package, pair in self._read_pairs():
            wrong = wrong_with(*pair)
            if wrong is None and pair in pairs:
                wrong = "there already"
            if wrong is not None:
                self.left_out[wrong] += 1
            else:
                pairs[pair] = None
                self.found[package] += 1
        return list(pairs)

    def _read_pairs(self) -> Iterator[tuple[str, tuple[str, str]]]:
        pages: dict[str, dict[str, tuple[str, bytes]]] = {}
        for path in self.files:
            package = described(path)
            self.packages.append(package)
            licences = ", ".join(package.licences) or f"see usr/share/doc/{package.name}/copyright in it"
            note(f"data: reading {package.name} {package.version} ({licences})")
            contents: dict[str, bytes] = {}
            for name, content in read_files(path, lambda name: bool(_CATALOGUE.fullmatch(name) or _PAGE.fullmatch(name))):
                contents[name] = content
            for name in sorted(contents):
                if _CATALOGUE.fullmatch(name):
                    yield from ((package.name, cleaned_message(*pair)) for pair in self._messages(name, contents[name]))
                else:
                    key, language = _place(package.name, name)
                    pages.setdefault(key, {}).setdefault(language, (package.name, contents[name]))
        for key in sorted(pages):
            if len(pages[key]) == 2:
                (package_name, source), (_, target) = pages[key]["en"], pages[key]["de"]
                texts = [_page_text(page) for page in (source, target)]
                if texts[0] is not None and texts[1] is not None:
                    for pair in paired(blocks(texts[0]), blocks(texts[1])):
                        yield package_name, (cleaned_paragraph(pair[0]), cleaned_paragraph(pair[1]))

    def _messages(self, name: str, content: bytes) -> Iterator[tuple[str, str]]:
        try:
            if name.endswith(".mo"):
                yield from read_mo(content)
            else:
                yield from read_po(content.decode())
        except ValueError:
            self.left_out["in a catalogue that cannot be read"] += 1


def _place(package: str, name: str) -> tuple[str, str]:
    """Return a page's common name in both languages, and its language, English if it names none."""
    match = _LANGUAGE.search(f"/{name}")
    language = "de" if (match and (match[1] or match[2]).startswith("de")) or package.endswith("-de") else "en"
    plain = _LANGUAGE.sub("*", f"/{name}").removesuffix(".gz").replace("/*/", "/").replace(".*.", ".")
    return f"{_OF_PACKAGE.sub('', package)}:{_OF_PACKAGE.sub('', plain)}", language


def _page_text(content: bytes) -> str | None:
    if content[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            content = unpacker.decompress(content, MAX_FILE_BYTES)
        except zlib.error:
            return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
