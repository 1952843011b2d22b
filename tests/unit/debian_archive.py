"""A local package archive with its own apt configuration.

Nothing of this machine's apt is used.
"""

import gzip
import hashlib
import http.server
import io
import os
import subprocess
import tarfile
import threading
from contextlib import contextmanager


class LocalArchive:
    """An archive whose packages are in ``archive`` below `folder`.

    `address` is where apt finds that folder, by default the folder itself.
    """

    def __init__(self, folder, monkeypatch, address=None):
        self.folder = folder / "archive"
        self.folder.mkdir()
        self._published = 0
        for name in ("etc/apt.conf.d", "etc/preferences.d", "etc/sources.list.d", "state/lists/partial", "cache/archives/partial"):
            (folder / "apt" / name).mkdir(parents=True)
        (folder / "apt" / "status").touch()
        (folder / "apt" / "etc" / "sources.list").write_text(f"deb [trusted=yes] {address or f'file:{self.folder}'} ./\n")
        directories = {"Dir::Etc": "etc", "Dir::State": "state", "Dir::Cache": "cache", "Dir::State::status": "status"}
        lines = [f'{key} "{folder}/apt/{value}";\n' for key, value in directories.items()]
        more = 'APT::Sandbox::User "root";\nAcquire::http::Proxy "DIRECT";\nAcquire::Retries "0";\n'
        (folder / "apt.conf").write_text("".join(lines) + more)
        monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))

    def publish(self, made):
        """Publish only these packages, (file, control) each, and update apt's index."""
        stanzas = []
        for path, control in made:
            size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
            stanzas.append(f"{control}Filename: ./{path.name}\nSize: {size}\nSHA256: {digest}\n")
        self._published += 1
        index = self.folder / "Packages"
        index.write_text("\n".join(stanzas))
        changed = index.stat().st_mtime + 10 * self._published  # apt would not see a change within a second
        os.utime(index, (changed, changed))
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)


@contextmanager
def served(folder):
    """Serve a folder over HTTP; yield its address and the list of requested paths."""
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            server.shutdown()
            thread.join()


def write_package(path, data_tar_gz, name="some"):
    """Write a package with arbitrary bytes that dpkg-deb takes for a packed archive."""
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w:gz") as archive:
        control_fields = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <a@b.c>\nDescription: none\n".encode()
        header = tarfile.TarInfo("./control")
        header.size = len(control_fields)
        archive.addfile(header, io.BytesIO(control_fields))
    members = (("debian-binary", b"2.0\n"), ("control.tar.gz", control.getvalue()), ("data.tar.gz", data_tar_gz))
    content = b"!<arch>\n"
    for member, data in members:
        content += f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    path.write_bytes(content)
    return path


def member(name, content=b"", kind=tarfile.REGTYPE, size=None):
    """Return a file of a tar archive: its header and its content in whole blocks.

    The header may state another size.
    """
    header = tarfile.TarInfo(name)
    header.type, header.size = kind, len(content) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def packed(*members):
    """Return a whole archive of these members, compressed."""
    return gzip.compress(b"".join(members) + bytes(2 * tarfile.BLOCKSIZE), compresslevel=1)
