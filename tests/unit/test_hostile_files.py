"""Damaged files of runs, sweeps, checkpoints and datasets never crash or hang a command.

`make test` has the same cases every time; `make conformance` others in each session. ``--seed N`` repeats those of a seed; a failure
shows the number, and what was done to which file.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_runs import (
    CHECKPOINT,
    CHECKPOINT_FILES,
    HOSTILE,
    LINE_FILES,
    RUN_FILES,
    STORE_FILES,
    build,
    damage,
    replace_by,
    sign_checkpoint,
)

SESSION_SEED = int(os.environ["CROSSTRAIN_TEST_SEED"])
CASES_HERE, SECONDS_HERE = 60, 40.0
"""Of `make test`, at most; `make conformance` has thousands of cases."""

MAX_SECONDS = 10.0
MAX_BYTES = 200 << 20
"""More than the undamaged run needs."""

QUICK = [
    *(["runs", "--out", "out"], ["runs", "--out", "out", "--json"], ["runs", "show", "out/one"], ["runs", "show", "out/one", "--json"]),
    *(["compare", "out/one", "out/two"], ["compare", "out/one", "out/two", "--layout=rows"], ["compare", "out", "--json"]),
    *(
        ["compare", "out/one", "out/two", "--curves", "loss"],
        ["compare", "out/one", "--latex"],
        ["compare", "out/one", "out/two", "--markdown"],
    ),
    *(["explain", "out/one"], ["explain", "out/one", "--json"], ["predict", "out/one"], ["predict", "out/one", "out/two", "--json"]),
    *(["watch", "out/one", "--wait", "0"], ["watch", "out/one", "--wait", "0", "--json"]),
    *(["runs", "export", "out/one", "-o", "tables", "--overwrite"], ["runs", "export", "out/one", "--what", "steps", "-o", "-"]),
    *(["export", "out/one", "--describe"], ["run", "--resume", "out/one", "--steps", "+10", "--print-config"]),
]
SLOW = [["report", "out/one", "out/two", "-o", "page.html"], ["plot", "out/one", "out/two", "-o", "plots", "--format", "svg"]]
OF_CHECKPOINT = [
    *(["export", "out/one", "--format", "safetensors"], ["export", "out/one", "--describe"], ["runs", "show", "out/one"]),
    *(
        ["evaluate", "out/one"],
        ["evaluate", f"out/one/{CHECKPOINT}", "--json"],
        ["run", "--resume", "out/one", "--steps", "+10", "--print-config"],
    ),
    *(["run", "--resume", "out/one", "--force", "--optimizer", "adam", "--print-config"], ["runs", "show", "out/one", "--json"]),
]
OF_STORE = [
    ["data", "list"],
    ["data", "list", "--json"],
    ["data", "verify", "digits"],
    ["evaluate", "out/one"],
    ["data", "verify", "--json"],
]
OF_SWEEP = [["compare", "out/swept"], ["runs", "--out", "out"], ["sweep", "--resume", "out/swept", "--dry-run"]]
PLAIN = [
    *(
        ["runs", "--out", "out"],
        ["runs", "show", "out/one"],
        ["compare", "out/one", "out/two"],
        ["compare", "out/one", "out/two", "--layout=rows"],
    ),
    *(["explain", "out/one"], ["predict", "out/one"], ["watch", "out/one", "--wait", "0"], QUICK[-1], SLOW[0]),
]
DELETING = [["runs", "delete", "out/one", "--yes"], ["runs", "delete", "out/swept", "--yes"], ["data", "remove", "digits"]]


class Commands:
    """Runs batches of commands below a folder, by a server that is restarted when it ends."""

    def __init__(self, cache: Path) -> None:
        self._environment = {**os.environ, "TRAINER_DATA_CACHE": str(cache), "COLUMNS": "100"}
        self._server: subprocess.Popen[str] | None = None

    def run(self, folder: Path, commands: list[list[str]], limit_seconds: int = 60) -> dict:
        if self._server is None:
            script = Path(__file__).with_name("hostile_server.py")
            self._server = subprocess.Popen(
                [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
            )
        self._server.stdin.write(json.dumps({"folder": str(folder), "commands": commands, "limit_seconds": limit_seconds}) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait()
            self._server.stdout.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Create a folder with everything undamaged, which is copied to ``work`` for each case."""
    root = tmp_path_factory.mktemp("hostile")
    before = os.environ.get("TRAINER_DATA_CACHE")
    os.environ["TRAINER_DATA_CACHE"] = str(root / "whole" / "cache")
    try:
        build(root / "whole")
    finally:
        os.environ.pop("TRAINER_DATA_CACHE")
        if before is not None:
            os.environ["TRAINER_DATA_CACHE"] = before
    return root


@pytest.fixture(scope="module")
def commands(place):
    runner = Commands(place / "work" / "cache")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def undamaged(place, commands):
    """Return the seconds and bytes of each command on the undamaged files, where all succeed."""
    costs = {}
    for command in (*QUICK, *SLOW, *OF_CHECKPOINT, *OF_STORE, *OF_SWEEP, *DELETING):
        answer = commands.run(fresh(place), [command])
        (result,) = answer["results"]
        assert (result["code"], result["problem"]) == (0, None), (command, result)
        costs[tuple(command)] = (result["seconds"], answer["memory_bytes"])
    return costs


def fresh(place: Path) -> Path:
    shutil.rmtree(place / "work", ignore_errors=True)
    shutil.copytree(place / "whole", place / "work", symlinks=True)
    return place / "work"


def damaged_files(place: Path) -> list[tuple[str, list[list[str]]]]:
    """Return each file that is damaged, and the commands that read it."""
    store = next(path for path in (place / "whole" / "cache").iterdir() if path.name.startswith("digits"))
    run = [(f"out/one/{name}", QUICK) for name in (*RUN_FILES, *RUN_FILES, *LINE_FILES)]
    run += [(f"out/two/{name}", [command for command in QUICK if "out/two" in command]) for name in RUN_FILES]
    run += [(f"out/one/{CHECKPOINT}/{name}", OF_CHECKPOINT) for name in CHECKPOINT_FILES]
    run += [(f"cache/{store.name}/{name}", OF_STORE) for name in STORE_FILES]
    return [*run, ("out/swept/sweep.json", OF_SWEEP), *((f"out/one/{name}", SLOW) for name in (*RUN_FILES, *LINE_FILES))]


def check(place, commands, undamaged, seed, number, *, most_commands):
    """Run one case: damage one or two files, and run some of the commands that read them."""
    chance = random.Random(f"{seed} {number}")
    work = fresh(place)
    name, readers = chance.choice(damaged_files(place))
    if readers is SLOW and chance.random() < 0.7:  # they take ten times as long
        readers = QUICK
    hows = ("bytes", "value", "value", "value", "signed", "kind")
    done = [damage(work / name, chance.choice(hows), chance)]
    if chance.random() < 0.2 and (work / name).is_file() and not name.endswith(".npy") and "hole" not in done[0]:
        done.append(damage(work / name, "bytes", chance))
    chosen = chance.sample(readers, min(most_commands, len(readers)))
    if chance.random() < 0.1:
        chosen = [*chosen, chance.choice(DELETING)]
    answer = commands.run(work, chosen)
    case = f"--seed {seed}, case {number}: {name}: {'; '.join(done)}"
    for command, result in itertools.zip_longest(chosen, answer["results"]):
        assert result is not None, f"{case}: {command} ended by signal {answer['signal']}"
        assert result["problem"] is None, f"{case}: {command}: {result['problem']}"
        assert result["code"] in (0, 1, 2), f"{case}: {command} exits with {result['code']}"
        usual = undamaged[tuple(command)][0]
        assert result["seconds"] < usual + MAX_SECONDS, f"{case}: {command} took {result['seconds']:.1f} s instead of {usual:.1f} s"
    most = max(undamaged[tuple(command)][1] for command in chosen)
    taken = answer["memory_bytes"]
    assert taken < most + MAX_BYTES, f"{case}: {chosen} took {taken >> 20} MiB instead of {most >> 20} MiB"


def requested_seed(request, capsys, default):
    """Return and print the requested seed, or else `default`."""
    requested = request.config.getoption("seed")
    seed = default if requested is None else requested
    with capsys.disabled():
        print(f"\nhostile files: --seed {seed}")
    return seed


@pytest.mark.thorough
def test_any_damage_is_at_most_an_error(place, commands, undamaged, request, capsys):
    seed = requested_seed(request, capsys, 1)
    end = time.monotonic() + SECONDS_HERE
    for number in range(CASES_HERE):
        if number > CASES_HERE // 3 and time.monotonic() > end:
            break
        check(place, commands, undamaged, seed, number, most_commands=4)
    assert number > CASES_HERE // 3


def outcome(commands, work, *command):
    (result,) = commands.run(work, [list(command)])["results"]
    assert result["problem"] is None
    return result["code"], result["error"].strip().splitlines()[-1] if result["error"] else ""


@pytest.mark.thorough
def test_damaged_run_is_listed_with_others(place, commands):
    work = fresh(place)
    replace_by(work / "out" / "one" / "summary.json", "link to a device")
    replace_by(work / "out" / "two" / "status.json", "pipe")
    (work / "out" / "swept" / "loop").symlink_to("loop")
    os.rename(os.fsencode(work / "out" / "one"), os.fsencode(work / "out") + b"/o\xff")
    (listed,) = commands.run(work, [["runs", "--out", "out", "--json"]])["results"]
    assert (listed["code"], listed["problem"]) == (0, None)
    assert outcome(commands, work, "compare", "out/two")[0] == 0
    assert "status.json: a pipe, not a file" in outcome(commands, work, "watch", "out/two")[1]


@pytest.mark.quick_cases("folder")
@pytest.mark.parametrize("kind", ["gone", "folder", "link in a loop", "link to nothing"])
def test_run_without_status_is_not_watched_forever(place, commands, kind):
    work = fresh(place)
    replace_by(work / "out" / "one" / "status.json", kind)
    code, output = outcome(commands, work, "watch", "out/one", "--wait", "0")
    assert code == 2
    assert "status.json" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a = " + b"[" * 5000, "nested too deep"),
        (b"steps = " + b"1" * 5000, "not valid TOML"),
        (b"seed = 0x" + b"f" * 900_000, "not valid TOML: a whole number has more than 64 bits"),
        (b"cores_per_node = [1, [2, 0x" + b"f" * 5000 + b"]]", "more than 64 bits"),
        (b".".join([b"a"] * 200_000) + b" = 1", "a line with more than 10,000 dots"),
        (b"[" + b".".join([b"a"] * 300_000) + b"]", "a line with more than 10,000 dots"),
        (b"lr." + b".".join([b"a"] * 9000) + b" = 1", "not valid TOML: it is nested more than 32 levels deep"),
        (b'mode = "' + b"x" * 900_000 + b'"', r"^.{0,10100}x…' \(from file "),
        (b"schedule = {a = 1}", r"^error: schedule: got .* allowed: constant, step, cosine, noam"),
        (b"nodes = 2\ncores_per_node = [1, true]", r"^error: cores_per_node: got '1,true' \(from file "),
        (b'"a\\nerror: forged" = 1', r"^error: a\\x0aerror: forged \("),
        (b"#" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_settings_are_read_within_bounds(tmp_path, commands, place, text, message):
    path = tmp_path / "a.toml"
    path.write_bytes(text)
    code, output = outcome(commands, fresh(place), "run", "--config", str(path), "--print-config")
    assert code == 2
    assert re.search(message, output)
    assert "larger than 1 MiB" in outcome(commands, place, "run", "--config", "/dev/zero", "--print-config")[1]


@pytest.mark.slow
def test_slow_thousands_of_damages_are_at_most_errors(place, commands, undamaged, request, capsys):
    seed = requested_seed(request, capsys, SESSION_SEED)
    for number in range(2000):
        check(place, commands, undamaged, seed, 10_000 + number, most_commands=6)


@pytest.mark.slow
def test_slow_any_field_may_be_null_missing_or_changed(place, commands, request, capsys):
    """Each field of a run's documents, the first two of a list, the first line of line files."""
    seed = requested_seed(request, capsys, SESSION_SEED)
    chance = random.Random(seed)
    work = fresh(place)
    for name in (*RUN_FILES, *LINE_FILES, f"{CHECKPOINT}/checkpoint.json"):
        path = work / "out" / "one" / name
        whole = path.read_text()
        first, rest = whole.split("\n", 1) if name.endswith(".jsonl") else (whole, "")
        readers = OF_CHECKPOINT if name.startswith(CHECKPOINT) else PLAIN
        for place_in, value in itertools.product(places(json.loads(first)), ("null", None, chance.choice(HOSTILE))):
            path.write_text(f"{altered(json.loads(first), place_in, value)}\n{rest}")
            if name.startswith(CHECKPOINT):
                sign_checkpoint(path.parent)
            shutil.rmtree(work / "out" / "one" / "exports", ignore_errors=True)
            answer = commands.run(work, readers)
            for command, result in itertools.zip_longest(readers, answer["results"]):
                case = f"--seed {seed}: {name}: {place_in}: {'missing' if value is None else value[:60]}: {command}"
                assert result is not None, f"{case} ended by signal {answer['signal']}"
                assert result["problem"] is None, f"{case}: {result['problem']}"
                assert result["code"] in (0, 1, 2), case
        path.write_text(whole)
        if name.startswith(CHECKPOINT):
            sign_checkpoint(path.parent)


def places(tree, above=()):
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))[:2] if isinstance(tree, list) else []
    for key, item in items:
        yield (*above, key)
        yield from places(item, (*above, key))


def altered(tree, place_in, value):
    """Return a tree's JSON with other text at a place, or, without text, without the place."""
    holder = tree
    for key in place_in[:-1]:
        holder = holder[key]
    if value is None:
        del holder[place_in[-1]]
        return json.dumps(tree)
    holder[place_in[-1]] = "@@"
    return json.dumps(tree).replace('"@@"', value)
