"""Runs, a sweep and a dataset, and ways to damage their files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from model_checkpoints import save_model
from report_runs import make_run

from crosstrain.checkpoint.files import ALGORITHM
from crosstrain.core.settings.sweeps import Grid
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.launch.sweep_folder import Request, SweepFolder
from crosstrain.records.store.jsonl import write_document

CHECKPOINT = "checkpoints/step-000000040"
RUN_FILES = ("job.json", "env.json", "status.json", "summary.json", "calibration.json")
LINE_FILES = ("steps.jsonl", "evals.jsonl", "events.jsonl", "system.jsonl")
CHECKPOINT_FILES = ("checkpoint.json", "manifest.json", "parameters.safetensors", "optimizer.safetensors")
STORE_FILES = ("manifest.json", "verified.json", "test_labels.npy")

HOSTILE = (
    *("null", "true", "false", "0", "-0.0", "1", "-1", "2", "0.5", "-1e-300", "5e-324", "1e-30", "1e12", "1e30", "1e308", "-1e308"),
    *(
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "4095",
        "65536",
        "1000000000",
        "9007199254740992",
        "9223372036854775807",
        "-9223372036854775808",
    ),
    *(
        "18446744073709551615",
        "1" * 30,
        "1" * 5000,
        '""',
        '"NaN"',
        '"-Infinity"',
        '"0"',
        '"../../../etc/passwd"',
        '"/dev/zero"',
        '"\\u0000"',
    ),
    *(
        '"\\udcff"',
        '"\\u001b]0;x\\u0007"',
        '"[/red]"',
        '"{}%s"',
        '"async"',
        '"sync"',
        '"running"',
        '"2026-01-01"',
        '"9999-12-31T23:59:59-23:59"',
    ),
    *(
        '"accuracy>=0.9"',
        '"1epoch"',
        '"0steps"',
        '"100mbit"',
        '"1e999gbit"',
        '"image-folder:/dev"',
        '"synthetic-images:999999999"',
        '"resnet18"',
    ),
    *("[]", "{}", "[null]", "[[]]", "[{}]", '{"a": 1}', "[1, 2, 3, 4, 5, 6, 7, 8]", '["x", "y"]', "[0.0]", "[-1]", "[1e308, 1e308]"),
    "[" * 31 + "]" * 31,
    "[" * 5000 + "]" * 5000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    "[" + "0," * 100_000 + "0]",
    "[" + "{}," * 5000 + "{}]",
    '"' + "x" * 200_000 + '"',
    '"' + "\u202e\u4e2d" * 2000 + '"',
)
"""Values as text of a file; not all of them are JSON."""

KINDS = ("pipe", "socket", "folder", "link to a device", "link to a pipe", "link in a loop", "link to nothing", "hole", "empty", "gone")


def build(root: Path) -> None:
    """Create input of commands below `root`: two runs, a sweep and data in ``cache``.

    The runs are ``out/one`` and ``out/two``; the sweep is ``out/swept``.
    """
    digits = open_dataset("digits")
    assert digits.path.is_relative_to(root)  # the cache of this test
    out = root / "out"
    for name, mode in (("one", "sync"), ("two", "async")):
        path = make_run(out, name, steps=80, mode=mode, calibrated=True, gpus=mode == "sync", cores_per_node=[1.0], bandwidth="100mbit")
        _complete_run(path, mode)
        save_model(path, "logreg", (1, 8, 8), step=40, info=digits.info, digest=digits.digest)
        _describe_checkpoint(path / CHECKPOINT, json.loads((path / "job.json").read_text()))
    request = Request(None, {"backend": "torch", "data": "digits"}, Grid({"batch_size": [5, 10]}))
    with SweepFolder(out / "swept", request, request.plan({}), ["trainer", "sweep"]) as sweep:
        for entry in sweep.entries:
            entry.state, entry.attempts, entry.seconds = "succeeded", 1, 1.0
            make_run(out / "swept", entry.point.name, steps=40)
        sweep.write("succeeded")


def _complete_run(path: Path, mode: str) -> None:
    """Add what a real run has but tests of reports do not need."""
    job = json.loads((path / "job.json").read_text())
    tasks = [{"role": "worker", "index": node, "node": node, "leading": True} for node in range(2)]
    extra = {
        "total_steps": 80,
        "epochs": None,
        "steps": 80,
        "dataset": {"name": "digits", "data_dir": None, "digest": "0", "input_shape": [1, 8, 8], "classes": 10, "sizes": {"train": 1437}},
        "sources": {"model": "default"},
        "cluster": {"tasks": tasks, "addresses": ["10.77.0.1", "10.77.0.2"], "ports": {"worker-0": 27001}},
        "threads_per_task": [1, 1],
        "segments": [_segment(0, 0, 0.0), {**_segment(40, 800, 0.9), "checkpoint": "step-000000040", "changed": {}}],
    }
    write_document(path / "job.json", {**job, **extra})
    env = json.loads((path / "env.json").read_text())
    for node, host in enumerate(env["nodes"]):
        address = {"addresses": [f"10.77.0.{node + 1}"], "up": True, "speed_bits_per_second": 10**9}
        host |= {
            "cores_logical": 2,
            "cores_affinity": 2,
            "interfaces": {"eth0": address},
            "gpus": [{"name": "A GPU", "memory_total_bytes": 1}],
        }
    tree = {"commit": "0123456789abcdef" + 24 * "0", "changed": True}
    env["code"] = {"packages": {"crosstrain": "0.1.0"}, "typed_in": tree, "crosstrain": tree}
    write_document(path / "env.json", env)
    seconds = {"data_seconds": 0.0005, "compute_seconds": 0.004, "half_compute_seconds": 0.0025, "communicate_seconds": 0.004}
    workers = [{"worker": node, "node": node, **seconds, "message_seconds": 0.001, "spread": 0.01} for node in range(2)]
    write_document(
        path / "calibration.json",
        {"seconds": 1.0, "payload_bytes": 2600, "batch_size": 10, "half_batch_size": 5, "workers": workers, "native": {"x_seconds": 0.1}},
    )
    summary = json.loads((path / "summary.json").read_text())
    shares = [{"worker": node, **node_shares} for node, node_shares in enumerate(summary["time_shares"]["nodes"])]
    write_document(
        path / "summary.json",
        {
            **summary,
            "resumed": 1,
            "network_source": ["interface", "sockets"],
            "nodes_sharing_cores": 2,
            "checkpoints": {
                "saved": 1,
                "failed": 1,
                "stall_seconds": {"mean": 0.1, "max": 0.2},
                "write_seconds": {"mean": 0.3, "max": 0.4},
                "bytes": 5000,
            },
            "time_shares": {**summary["time_shares"], "workers": shares},
        },
    )


def _segment(step: int, examples: int, seconds: float) -> dict[str, Any]:
    started = "2026-05-01T10:00:00.000+00:00"
    return {"started_at": started, "command": ["trainer", "run"], "step": step, "epoch": 0, "examples": examples, "run_seconds": seconds}


def _describe_checkpoint(checkpoint: Path, job: dict[str, Any]) -> None:
    """Give a checkpoint the job of its run, and realistic figures."""
    fields = json.loads((checkpoint / "checkpoint.json").read_text())
    settings = {
        name: value for name, value in job.items() if name in ("mode", "nodes", "batch_size", "optimizer", "momentum", "seed", "precision")
    }
    spent = {"init_seconds": 1.0, "train_seconds": 0.4, "eval_seconds": 0.5, "checkpoint_seconds": 0.0, "train_seconds_by_node": [0.4, 0.4]}
    fields |= {
        "job": {**fields["job"], **settings, "model": "logreg", "data": "digits", "data_dir": None},
        "spent": {**spent, "updates": 40},
    }
    fields |= {"run_seconds": 0.9, "epoch": 0, "examples": 800, "scalars": {"loss_scale": 1.0}}
    (checkpoint / "checkpoint.json").write_text(json.dumps(fields))
    sign_checkpoint(checkpoint)


# Damage --------------------------------------------------------------------------------------------------------------


def sign_checkpoint(folder: Path) -> None:
    """Rewrite the digests in a checkpoint's manifest, as an attacker could."""
    listed = [path for path in folder.iterdir() if path.name != "manifest.json" and path.is_file()]
    files = {path.name: {"bytes": path.stat().st_size, ALGORITHM: xxhash.xxh3_128(path.read_bytes()).hexdigest()} for path in listed}
    sign(folder / "manifest.json", {"schema": 2, "files": files})


def sign(path: Path, fields: dict[str, Any]) -> None:
    """Write a manifest with its digest."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**fields, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}))


def damage(path: Path, how: str, chance: random.Random) -> str:
    """Damage a file and return a description.

    `how` is ``bytes``, ``value``, ``signed`` (a value, with matching digests) or ``kind``.
    """
    if how == "kind":
        return replace_by(path, chance.choice(KINDS))
    if how == "bytes" or path.suffix in (".npy",) or not path.exists():
        return _damage_bytes(path, chance)
    change = _damage_value(path, chance)
    if how == "signed" and path.parent.name.startswith("step-"):
        if path.name == "manifest.json":
            _sign_loosely(path)
        else:
            sign_checkpoint(path.parent)
    elif how == "signed" and path.name == "manifest.json":
        _sign_loosely(path)
    return f"{change}, {how}"


def _sign_loosely(path: Path) -> None:
    try:
        fields = json.loads(path.read_text())
        del fields["manifest_sha256"]
        sign(path, fields)
    except (ValueError, RecursionError, TypeError, KeyError):  # it is not a JSON object any more
        pass


def _damage_bytes(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes()) if path.exists() else bytearray()
    do = chance.choice(("flip", "flip", "flip", "cut", "put", "repeat", "random", "zeros"))
    place = chance.randrange(len(data) + 1)
    if do == "flip":
        for _ in range(chance.choice((1, 1, 2, 8))):
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif do == "cut":
        del data[place:]
    elif do == "put":
        data[place:place] = chance.randbytes(chance.randrange(1, 40))
    elif do == "repeat":
        data += data[place:]
    elif do == "random":
        data = bytearray(chance.randbytes(chance.randrange(200)))
    else:
        data[place:] = bytes(len(data) - place)
    path.write_bytes(data)
    return f"{path.name}: {do}"


def _damage_value(path: Path, chance: random.Random) -> str:
    """Put a hostile value into a JSON file, a line or an array header; or remove one."""
    before, text, after = _split_text(path, chance)
    tree = json.loads(text)
    places: list[tuple[Any, Any]] = []
    _walk(tree, places)
    holder, key = chance.choice(places)
    value = chance.choice(HOSTILE)
    do = chance.choice(("set", "set", "set", "set", "delete", "add"))
    if do == "delete":
        del holder[key]
        value = ""
    elif do == "add" and isinstance(holder, list):
        holder.append("@@")
    else:
        holder[key] = "@@"
    text = json.dumps(tree).replace('"@@"', value)
    path.write_bytes(before(text) + text.encode() + after)
    return f"{path.name}: {do} {key!r} {value[:40]}"


def _walk(tree: Any, places: list[tuple[Any, Any]]) -> None:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, item in items:
        places.append((tree, key))
        _walk(item, places)


def _split_text(path: Path, chance: random.Random) -> tuple[Callable[[str], bytes], str, bytes]:
    """Return the bytes before the JSON (as a function of the new JSON), the JSON, and the rest."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", data[:8])
        extra_bytes = chance.choice((0, 0, 0, 1, -1, 2**40, 2**63))
        return lambda text: struct.pack("<Q", max(0, len(text) + extra_bytes)), data[8 : 8 + length].decode(), data[8 + length :]
    if path.suffix == ".jsonl":
        lines = data.splitlines(keepends=True)
        number = chance.randrange(len(lines))
        return lambda _: b"".join(lines[:number]), lines[number].decode(), b"".join([b"\n", *lines[number + 1 :]])
    return lambda _: b"", data.decode(), b""


def replace_by(path: Path, kind: str) -> str:
    """Replace a file by one of `KINDS`, and return a description."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # an address is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "link to a pipe":
        os.mkfifo(path.with_name("a-pipe"))
        path.symlink_to("a-pipe")
    elif kind == "link in a loop":
        path.symlink_to(path.name)
    elif kind == "link to nothing":
        path.symlink_to("nothing")
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 36)
    elif kind == "empty":
        path.touch()
    return f"{path.name}: {kind}"
