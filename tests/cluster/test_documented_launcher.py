"""The launcher of docs/adding-a-launcher.md, copied from the page, passes its suite."""

import json
import os
import sys
from typing import ClassVar

import pytest
from bridged_hosts import bridged_hosts
from documents import ROOT, blocks, entry_points, write_package

from crosstrain.conformance.launcher_suite import LauncherConformance
from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs/adding-a-launcher.md"


@pytest.fixture(scope="module")
def namespaces():
    with bridged_hosts(2, "netns") as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Write the page's files; this process and its children find them and the toy backend."""
    folder = tmp_path / "installed"
    folder.mkdir()
    assert "crosstrain_netns/__init__.py" in {path.relative_to(folder).as_posix() for path in write_package(PAGE, folder)}
    folders = [str(folder), str(ROOT / "tests/toy")]
    for path in folders:
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("SSH_CONNECTION", "10.7.7.7 50000 10.8.8.8 22")  # a driver that was typed over ssh
    yield
    sys.modules.pop("crosstrain_netns", None)


def documented_suite() -> type[LauncherConformance]:
    """The suite of the page, with the toy in place of its backend, which loads faster."""
    (code,) = (body for body in blocks(PAGE, "python") if "LauncherConformance" in body)
    names: dict[str, type[LauncherConformance]] = {}
    exec(code, names)
    assert names["TestNetns"].settings["backend"]
    return names["TestNetns"]


@pytest.mark.thorough
class TestNetns(documented_suite()):  # type: ignore[misc]
    settings: ClassVar = {"backend": "toy"}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def named(cls, namespaces):
        cls.hosts = namespaces.namespaces


def test_documented_launcher_trains_and_checks_hosts(namespaces, tmp_path):
    hosts = ["--launcher", "netns", "--hosts", ",".join(namespaces.namespaces)]
    job = ["--backend", "toy", "--steps", "20", "--batch-size", "30", "--no-tensorboard", "--out", str(tmp_path), "--name", "run"]
    done = trainer("run", *hosts, *job, "--quiet")
    assert done.returncode == 0, done.stderr
    cluster = json.loads((tmp_path / "run/job.json").read_text())["cluster"]
    assert cluster["addresses"] == [*namespaces.addresses]
    looked = trainer("doctor", *hosts, "--json")
    assert looked.returncode == 0, looked.stdout + looked.stderr
    findings = {(finding["host"], finding["what"]): finding for finding in json.loads(looked.stdout)["findings"]}
    for host, address in zip(namespaces.namespaces, namespaces.addresses, strict=True):
        assert findings[host, "network"]["found"] == f"{address} on eth; reaches the others"
        assert "is the same machine" in findings[host, "machine"]["found"]


def test_host_file_of_user_names_hosts(namespaces, tmp_path, monkeypatch):
    (tmp_path / "crosstrain").mkdir()
    (tmp_path / "crosstrain/trainer.toml").write_text(f'hosts = "{",".join(namespaces.namespaces)}"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    looked = trainer("doctor", "--launcher", "netns", "--json")
    assert json.loads(looked.stdout)["hosts"] == [*namespaces.namespaces], looked.stderr


def test_page_contains_the_tests_of_this_file():
    (shown,) = (body for body in blocks(PAGE, "python") if "LauncherConformance" in body)
    names = {}
    exec(shown, names)  # our own page
    assert names["TestNetns"].launcher in entry_points(PAGE)["crosstrain.launchers"]
    assert {name for name in vars(names["TestNetns"]) if not name.startswith("__")} <= {*vars(LauncherConformance)} | {
        *LauncherConformance.__annotations__
    }
