"""Fixtures of several fault tests: the toy backend, and a separate disk."""

import os
import subprocess
from pathlib import Path

import pytest

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.fixture
def disk(tmp_path, request):
    """A file system of a few kilobytes, or of as many as the test names."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = getattr(request, "param", "120k")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # also where a test that failed has left a file open
