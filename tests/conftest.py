"""Fixtures that several folders of tests share."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import hypothesis
import pytest

from crosstrain.conformance.fork_server_pool import ForkServerPool
from crosstrain.conformance.runs import LENT_SERVERS_VARIABLE

hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair, not a test's
hypothesis.settings.load_profile("untimed")

for unused in ("TRAINER_CALIBRATE", "TRAINER_TENSORBOARD"):  # shorter runs; tests about either ask for it
    os.environ.setdefault(unused, "false")
_NO_OWN_FILE = tempfile.TemporaryDirectory(prefix="crosstrain-test-config-")  # removed when this process ends
os.environ["XDG_CONFIG_HOME"] = _NO_OWN_FILE.name  # the user's own options are not for tests
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # runs of several tests share the cores: what waits must not keep one busy
os.environ.setdefault("CROSSTRAIN_TEST_MARK", "none")  # on whatever is started without a mark of its own; see processes.py
os.environ.setdefault("CROSSTRAIN_TEST_SEED", str(secrets.randbits(32)))  # one for all processes of a session

GATE, MACHINE = Path(__file__), Path(__file__).with_name("processes.py")
"""Files that are locked; what is in them does not matter."""

OF_LIBRARIES = ("PYTEST_", "KMP_")
"""Variables that pytest sets for each test, and scikit-learn for OpenMP when it is imported: no test's doing."""

TOGETHER = "test_*.py"
"""Files whose tests share processes. Others (``*_checks.py``) have one to themselves, into which they import a framework."""

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that the tests of each scope took when `--record-durations` last measured them; see `_scope`."""

UNMEASURED_SECONDS = 60.0
"""What a scope that has not been measured yet is taken to need, so that it starts early."""

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that processes ignore where the one that starts them does."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job is started so, and whatever the tests start would inherit it: Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat what a test that draws its cases printed under this seed")
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file and class to {DURATIONS.name}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have all runs of a session fork their tasks from the same few processes; see `ForkServerPool`."""
    if sys.platform == "linux" and LENT_SERVERS_VARIABLE not in os.environ:
        pool = ForkServerPool()
        os.environ[LENT_SERVERS_VARIABLE] = pool.name
        config.add_cleanup(pool.close)
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files and classes first, and put those with tests marked `alone` last.

    So no process is left with a long file at the end, and none waits for another's long test before each test that is `alone`.
    """
    alone = {_scope(item.nodeid) for item in items if item.get_closest_marker("alone")}
    seconds = json.loads(DURATIONS.read_bytes())
    items.sort(key=lambda item: (_scope(item.nodeid) in alone, -seconds.get(_scope(item.nodeid), UNMEASURED_SECONDS), _scope(item.nodeid)))


class DurationRecorder:
    """Writes `DURATIONS` when a session ends; scopes of which no test ran keep what they had."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a test's set-up, call or tear-down."""
        self.seconds[_scope(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write one line a scope, those of removed files left out."""
        before = json.loads(DURATIONS.read_bytes()) if DURATIONS.exists() else {}
        root = DURATIONS.parents[1]
        now = {scope: round(seconds, 1) for scope, seconds in (before | self.seconds).items() if (root / scope.split("::")[0]).exists()}
        DURATIONS.write_text(json.dumps(now, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def _scope(nodeid: str) -> str:
    """What one process tests as a whole (``--dist loadscope``): a class, or the functions of a file."""
    return nodeid.rsplit("::", 1)[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where several processes test (``pytest -n``), run a test marked `alone` while none of the others runs any.

    Waiting is no part of a test's time. Whoever wants the machine stands in the gate meanwhile, so that no further test begins before it.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with ExitStack() as held:
        with _locked(GATE, fcntl.LOCK_EX):
            held.enter_context(_locked(MACHINE, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule() -> Generator[None, pytest.Module, pytest.Module]:
    """Import a file of tests at once, and refuse one whose import changes the environment: tests of other files would inherit it."""
    before = dict(os.environ)
    module = yield
    if not module.path.match(TOGETHER):
        return module
    _ = module.obj
    if changed := _environment_put_back(before):
        raise module.CollectError(f"importing {module.path} has changed the environment: {', '.join(changed)}")
    return module


@pytest.fixture(autouse=True)
def what_is_inherited_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which this process has other variables or answers a signal otherwise: what later tests start would inherit it."""
    variables, handlers = dict(os.environ), {number: signal.getsignal(number) for number in HANDED_ON}
    yield
    changed = _environment_put_back(variables) if request.path.match(TOGETHER) else []
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            changed.append(f"the handler of {number.name}")
    if changed:
        pytest.fail(f"the test has left other than it found: {', '.join(changed)}")


def _environment_put_back(before: dict[str, str]) -> list[str]:
    """Give this process the variables `before`, and return the names of those that were others."""
    now = dict(os.environ)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name) and not name.startswith(OF_LIBRARIES))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return changed


@pytest.fixture
def signals_as_before(what_is_inherited_is_left: None) -> Iterator[None]:
    """For a test that interrupts a run within this process, which ignores signals from then on."""
    before = {number: signal.getsignal(number) for number in HANDED_ON}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, how)
        yield


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
