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
from typing import Any

import hypothesis
import pytest

from crosstrain.conformance.fork_server_pool import ForkServerPool
from crosstrain.conformance.runs import LENT_SERVERS_VARIABLE

hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair, not a test's
hypothesis.settings.load_profile("untimed")

SEED_VARIABLE = "CROSSTRAIN_TEST_SEED"
"""Seed of the tests' random cases, from `--seed` or drawn."""

for unused in ("TRAINER_CALIBRATE", "TRAINER_TENSORBOARD"):  # shorter runs; tests about either ask for it
    os.environ.setdefault(unused, "false")
_NO_OWN_FILE = tempfile.TemporaryDirectory(prefix="crosstrain-test-config-")  # removed when this process ends
os.environ["XDG_CONFIG_HOME"] = _NO_OWN_FILE.name  # the user's own options are not for tests
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # runs of several tests share the cores: waiting must not keep one busy
os.environ.setdefault("CROSSTRAIN_TEST_MARK", "none")  # on processes without another mark; see processes.py
os.environ.setdefault(SEED_VARIABLE, str(secrets.randbits(32)))  # one for all processes of a session

GATE, MACHINE = Path(__file__), Path(__file__).with_name("processes.py")
"""Files that are locked; what is in them does not matter."""

OF_LIBRARIES = ("PYTEST_", "KMP_")
"""Variables that pytest sets for each test, and scikit-learn for OpenMP when it is imported: no test's doing."""

TOGETHER = "test_*.py"
"""Files whose tests share processes. Others (``*_checks.py``) have one to themselves, into which they import a framework."""

DURATIONS = Path(__file__).with_name("durations.json")
"""Durations of tests when `--record-durations` last measured them, and by files and classes the longest fixture set-up.

Times below `RECORDED_SECONDS` are omitted.
"""

RECORDED_SECONDS = 0.05

LEFT_TO = {"clusters": "make clusters", "slow": "make conformance", "thorough": "make test-thorough"}
"""The command that runs the tests with a marker, the first of these that a test has; all others run by ``make test``."""

DESELECTED = pytest.StashKey[Counter[str]]()
"""Number of deselected tests of this session's folders, by the command that runs them."""

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that processes ignore where the one that starts them does."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores SIGINT, which processes of tests would inherit: Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, metavar="N", help="repeat the random cases of a session, which printed this at its beginning")
    parser.addoption("--shorter-than", type=float, metavar="SECONDS", help=f"skip tests that took longer by {DURATIONS.name}")
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of the tests to {DURATIONS.name}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Share fork servers among all runs of a session; see `ForkServerPool`."""
    if sys.platform == "linux" and LENT_SERVERS_VARIABLE not in os.environ:
        pool = ForkServerPool()
        os.environ[LENT_SERVERS_VARIABLE] = pool.name
        config.add_cleanup(pool.close)
    if (seed := config.getoption("seed")) is not None:
        os.environ[SEED_VARIABLE] = str(seed)
    config.stash[DESELECTED] = Counter()
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


def pytest_report_header() -> str:
    """Return the header with the seed of the random cases."""
    return f"random cases: --seed {os.environ[SEED_VARIABLE]}"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Mark the cases that a test's marker `quick_cases` does not name as `thorough`.

    Refuse unknown names.
    """
    made = yield
    cases = {item.callspec.id if hasattr(item, "callspec") else "": item for item in made} if isinstance(made, list) else {}
    markers = [marker for item in [*cases.values()][:1] for marker in item.iter_markers("quick_cases")]
    if markers:
        quick = markers[0].args
        left_to = {case: LEFT_TO.keys() & {mark.name for mark in item.iter_markers()} for case, item in cases.items()}
        wrong = [case for case in quick if left_to.get(case, True)]
        if wrong or not quick or len(markers) > 1:
            raise collector.CollectError(f"{made[0].nodeid}: quick_cases has to name, once, cases that no marker leaves out: not {wrong}")
        for case in cases.keys() - set(quick):
            cases[case].add_marker("thorough")
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files and classes first, and put those with tests marked `alone` last.

    So no process is left with a long file at the end, and none waits for another's long test before each test that is `alone`.
    """
    measured, seconds = json.loads(DURATIONS.read_bytes()), Counter[str]()
    if (limit := config.getoption("shorter_than")) is not None:
        longest = Counter[str]()  # of the cases of a test: they may share the results of the first
        for item in items:
            longest[_test(item)] = max(longest[_test(item)], measured.get(item.nodeid, 0.0), measured.get(_scope(item.nodeid), 0.0))
        config.hook.pytest_deselected(items=[item for item in items if longest[_test(item)] > limit])
        items[:] = [item for item in items if longest[_test(item)] <= limit]
    alone = {_scope(item.nodeid) for item in items if item.get_closest_marker("alone")}
    for item in items:
        seconds[_scope(item.nodeid)] += measured.get(item.nodeid, RECORDED_SECONDS / 10)
    items.sort(key=lambda item: (_scope(item.nodeid) in alone, -seconds[_scope(item.nodeid)], _scope(item.nodeid)))


class DurationRecorder:
    """Writes `DURATIONS` when a session ends; tests that did not run keep what they had."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a phase of a test that passes."""
        if not report.passed:
            return
        self.seconds[report.nodeid] += report.duration
        if report.when == "setup":
            scope = _scope(report.nodeid)
            self.seconds[scope] = max(self.seconds[scope], report.duration)

    def pytest_sessionfinish(self) -> None:
        """Write one line a test, without those of removed files."""
        before = json.loads(DURATIONS.read_bytes()) if DURATIONS.exists() else {}
        ran = {_scope(test) for test in self.seconds}
        for scope in before.keys() & ran:  # perhaps not with all of its tests
            self.seconds[scope] = max(self.seconds[scope], before[scope])
        known = {test: round(seconds, 2) for test, seconds in (before | self.seconds).items() if _is_there(test)}
        long = {test: seconds for test, seconds in known.items() if seconds >= RECORDED_SECONDS}
        DURATIONS.write_text(json.dumps(long, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def _is_there(test: str) -> bool:
    """Whether the file of a test is there, and has the test where that is a function of its own."""
    file, _, name = test.partition("::")
    path = DURATIONS.parents[1] / file
    return path.exists() and (not name.startswith("test_") or f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8"))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count deselected tests by the command that runs them."""
    for item in items:
        item.config.stash[DESELECTED][next((LEFT_TO[marker] for marker in LEFT_TO if item.get_closest_marker(marker)), "make test")] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker process to the reporting one; all collect the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(session.config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process that has ended."""
    node.config.stash[DESELECTED] = Counter(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report the number of tests of other commands, unless tests were chosen by name."""
    if (deselected := config.stash[DESELECTED]) and not config.option.keyword:
        counts = ", ".join(f"{count:,} ({command})" for command, count in sorted(deselected.items()))
        terminalreporter.write_line(f"Tests left to other commands: {counts}")


def _test(item: pytest.Item) -> str:
    """The name that the cases of a parametrised test share."""
    return item.nodeid.partition("[")[0]


def _scope(nodeid: str) -> str:
    """The unit of one process (``--dist loadscope``): a class, or the functions of a file."""
    return nodeid.rsplit("::", 1)[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while no other process (``pytest -n``) runs one.

    Waiting is no part of a test's time. The waiting process blocks the gate, so that no further test begins before it.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with ExitStack() as held:
        with _locked(GATE, fcntl.LOCK_EX):
            held.enter_context(_locked(MACHINE, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule() -> Generator[None, pytest.Module, pytest.Module]:
    """Import a test file immediately and refuse one whose import changes the environment.

    Tests of other files would inherit it.
    """
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
    """Fail a test that leaves changed variables or signal handlers.

    Processes of later tests would inherit them.
    """
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
    """Restore signal handlers after an interrupted run in this process."""
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
def seed() -> int:
    """Seed of a test's random cases; `--seed` repeats them."""
    return int(os.environ[SEED_VARIABLE])


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def make_environment() -> Callable[[Path, Sequence[str]], Path]:
    """Return a function that makes a virtual environment without packages of some names.

    It consists of links to the installed packages. Its interpreter is returned; it and its children see nothing else.
    """

    def make(folder: Path, without: Sequence[str]) -> Path:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        (site,) = folder.glob("lib/python*/site-packages")
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if not entry.name.startswith(tuple(without)) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
        return folder / "bin" / "python"

    return make
