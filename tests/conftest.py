"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

os.environ.setdefault("TRAINER_CALIBRATE", "false")  # shorter runs; tests about calibration ask for it


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job is started so, and whatever the tests start would inherit it: Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def make_environment() -> Callable[[Path, Sequence[str]], Path]:
    """Return a function that makes a virtual environment of links to what is installed here, save what starts with one of some names.

    Its interpreter is returned; it and its children see nothing else.
    """

    def make(folder: Path, without: Sequence[str]) -> Path:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        (site,) = folder.glob("lib/python*/site-packages")
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if not entry.name.startswith(tuple(without)) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
        return folder / "bin" / "python"

    return make
