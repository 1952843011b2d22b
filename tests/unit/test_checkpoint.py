"""Checkpoints round-trip in a standard format; damage is named and skipped."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_tools import arrays, entries, large_arrays, meta, save, save_until
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.checkpoint import (
    ArrayEntry,
    CheckpointWriter,
    DamagedCheckpointError,
    best_checkpoints,
    find_checkpoint,
    list_checkpoints,
    newest_sound,
    prune,
    read_checkpoint,
    read_lock,
)
from crosstrain.checkpoint.files import map_arrays
from crosstrain.checkpoint.writer import remove
from crosstrain.cli.run_request import find_run_or_checkpoint
from crosstrain.core.errors import UsageError
from crosstrain.metrics import LOSS
from crosstrain.metrics.base import ACCURACY

FILES = ("parameters.safetensors", "optimizer.safetensors", "checkpoint.json", "manifest.json")


def same(arrays, expected):
    return list(arrays) == list(expected) and all(
        np.array_equal(arrays[key], value) and arrays[key].dtype == value.dtype for key, value in expected.items()
    )


def sorted_by_file(values):
    return {key: values[key] for key in sorted(values, key=lambda key: key.startswith("slots/"))}


class TestRoundTrip:
    @pytest.mark.parametrize("chunk", [1, 7, 4096, 10**6])
    def test_saved_checkpoint_is_read(self, tmp_path, chunk):
        path = save(tmp_path, chunk=chunk)
        assert path == tmp_path / "checkpoints" / "step-000000500"
        assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
        checkpoint = read_checkpoint(path)
        assert checkpoint.meta == meta(500)
        assert same(checkpoint.arrays, sorted_by_file(arrays(500)))
        assert sorted(checkpoint.parameters) == ["dense.bias", "dense.weight"]
        assert list(checkpoint.buffers) == ["norm.running_mean"]

    @pytest.mark.parametrize("chunk", [300_007, 2**20, 10**7])
    def test_files_in_several_chunks(self, tmp_path, chunk):
        assert same(read_checkpoint(save(tmp_path, values=large_arrays(), chunk=chunk)).arrays, sorted_by_file(large_arrays()))

    def test_safetensors_library_reads_it(self, tmp_path):
        path, values = save(tmp_path), arrays(500)
        parameters = safetensors.numpy.load_file(path / "parameters.safetensors")
        expected = {key.partition("/")[2]: value for key, value in values.items() if not key.startswith("slots/")}
        assert same(dict(sorted(parameters.items())), dict(sorted(expected.items())))
        slots = safetensors.numpy.load_file(path / "optimizer.safetensors")
        assert np.array_equal(slots["momentum/dense.weight"], values["slots/momentum/dense.weight"])

    @settings(max_examples=60, deadline=None)
    @given(
        shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=6),
        dtypes=st.lists(st.sampled_from(["<f4", "<f8", "<f2", "|u1", "<i8", "|b1"]), min_size=6, max_size=6),
        chunk=st.integers(1, 300),
    )
    def test_any_shape_and_type_is_written(self, tmp_path_factory, shapes, dtypes, chunk):
        values = {f"parameters/p{n}": np.ones(shape, dtypes[n]) * (n % 2) for n, shape in enumerate(shapes)}
        values = {key: value.astype(dtypes[n]) for n, (key, value) in enumerate(values.items())}
        file = save(tmp_path_factory.mktemp("run"), values=values, chunk=chunk) / "parameters.safetensors"
        expected = {key.removeprefix("parameters/"): value for key, value in values.items()}
        assert same(map_arrays(file), expected)
        library = safetensors.numpy.load_file(file)
        assert {name: value.shape for name, value in library.items()} == {name: value.shape for name, value in expected.items()}

    @settings(max_examples=30, deadline=None)
    @given(shapes=st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=6), chunk=st.integers(1, 300))
    def test_any_shape_is_read(self, tmp_path_factory, shapes, chunk):
        values = {f"parameters/p{n}": np.full(shape, n, np.float32) for n, shape in enumerate(shapes)}
        assert same(read_checkpoint(save(tmp_path_factory.mktemp("run"), values=values, chunk=chunk)).arrays, values)

    def test_values_are_aligned(self, tmp_path):
        raw = (save(tmp_path) / "parameters.safetensors").read_bytes()
        assert (8 + int.from_bytes(raw[:8], "little")) % 8 == 0

    def test_non_finite_figures_round_trip(self, tmp_path):
        path = save(tmp_path, metrics={"loss": math.inf, "accuracy": math.nan}, scalars={"loss_scale": 65536.0})
        loaded = read_checkpoint(path).meta
        assert loaded.metrics["loss"] == math.inf
        assert math.isnan(loaded.metrics["accuracy"])
        assert loaded.scalars == {"loss_scale": 65536.0}
        json.loads((path / "checkpoint.json").read_text(), parse_constant=lambda name: pytest.fail(name))

    def test_state_without_slots_has_no_optimizer_file(self, tmp_path):
        path = save(tmp_path, values={"parameters/p": np.ones(3, np.float32)})
        assert not (path / "optimizer.safetensors").exists()
        assert list(read_checkpoint(path).arrays) == ["parameters/p"]

    def test_arrays_are_read_only(self, tmp_path):
        with pytest.raises(ValueError, match="read-only"):
            read_checkpoint(save(tmp_path)).arrays["parameters/dense.bias"][0] = 1

    def test_checkpoint_is_readable_only_by_owner(self, tmp_path):
        path = save(tmp_path)
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0


class TestWrongUse:
    def test_missing_bytes(self, tmp_path):
        writer = CheckpointWriter(tmp_path / "checkpoints", meta(), entries(arrays()))
        writer.write(b"\0" * 100)
        with pytest.raises(ValueError, match=r"\d+ bytes of the checkpoint's arrays are missing"):
            writer.seal()
        assert list((tmp_path / "checkpoints").iterdir()) == []

    def test_too_many_bytes(self, tmp_path):
        writer = CheckpointWriter(tmp_path / "checkpoints", meta(), [ArrayEntry("parameters/p", "<f4", (2,))])
        with pytest.raises(ValueError, match="more bytes"):
            writer.write(b"\0" * 9)
        assert list((tmp_path / "checkpoints").iterdir()) == []

    @pytest.mark.parametrize(
        ("key", "dtype"), [("weights/p", "<f4"), ("parameters/", "<f4"), ("parameters/p", ">f4"), ("parameters/p", "<c8")]
    )
    def test_unsupported_array_is_refused(self, tmp_path, key, dtype):
        with pytest.raises(ValueError, match=r"no key|no type"):
            CheckpointWriter(tmp_path / "checkpoints", meta(), [ArrayEntry(key, dtype, (2,))])
        assert list((tmp_path / "checkpoints").iterdir()) == []

    def test_aborted_write_leaves_nothing(self, tmp_path):
        save(tmp_path, 1)
        writer = CheckpointWriter(tmp_path / "checkpoints", meta(2), entries(arrays()))
        writer.write(b"\0" * 5000)
        writer.abort()
        writer.abort()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
        with pytest.raises(ValueError, match="given up"):
            writer.seal()

    def test_sealed_checkpoint_has_no_name(self, tmp_path):
        parent = tmp_path / "checkpoints"
        for ends in (CheckpointWriter.abort, CheckpointWriter.publish):
            writer = CheckpointWriter(parent, meta(1), [ArrayEntry("parameters/p", "<f4", (2,))])
            writer.write(b"\0" * 8)
            writer.seal()
            assert not (parent / "step-000000001").exists()
            ends(writer)
            assert [path.name for path in parent.iterdir()] == ([] if ends is CheckpointWriter.abort else ["step-000000001"])


class TestLeftovers:
    """Leftovers under hidden names do not keep a checkpoint from being saved."""

    def test_leftovers_other_than_folders_are_ignored(self, tmp_path):
        parent = tmp_path / "checkpoints"
        parent.mkdir()
        (tmp_path / "mine").mkdir()
        (parent / ".step-000000001.draft-a").symlink_to(tmp_path / "mine")
        (parent / ".step-000000002.gone-b").symlink_to(tmp_path / "nowhere")
        (parent / ".step-000000003.old-c").write_text("mine")
        save(tmp_path, 5)
        assert list_checkpoints(tmp_path) == [parent / "step-000000005"]
        assert len(list(parent.iterdir())) == 4
        assert (tmp_path / "mine").is_dir()

    @pytest.mark.skipif(os.geteuid() != 0, reason="a folder that nobody can remove is one on which something is mounted")
    def test_unremovable_leftover_stays_until_removable(self, tmp_path, caplog):
        parent = tmp_path / "checkpoints"
        save(tmp_path, 1)
        busy = parent / "step-000000001" / "busy"
        busy.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", busy], check=True)
        try:
            remove(parent / "step-000000001")
            assert "could not be removed" in caplog.text
            save(tmp_path, 2)
            assert list_checkpoints(tmp_path) == [parent / "step-000000002"]
            (gone,) = parent.glob(".step-000000001.gone-*")
        finally:
            subprocess.run(["umount", *parent.glob("*/busy")], check=True)
        save(tmp_path, 3)
        assert not gone.exists()


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x01
    path.write_bytes(raw)


class TestDamage:
    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_flipped_bit_anywhere(self, tmp_path, file, where):
        path = save(tmp_path)
        flip(path / file, int(where * ((path / file).stat().st_size - 2)))
        with pytest.raises(DamagedCheckpointError) as caught:
            read_checkpoint(path)
        assert caught.value.file == file
        assert file in str(caught.value)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("left", [0, 10, -1])
    def test_truncated_file(self, tmp_path, file, left):
        path = save(tmp_path)
        size = (path / file).stat().st_size
        os.truncate(path / file, left if left >= 0 else size - 3)
        with pytest.raises(DamagedCheckpointError, match=rf"{file} .*(bytes instead of|JSON)"):
            read_checkpoint(path)

    @pytest.mark.parametrize("file", FILES)
    def test_missing_file(self, tmp_path, file):
        path = save(tmp_path)
        (path / file).unlink()
        with pytest.raises(DamagedCheckpointError, match=f"{file} is missing"):
            read_checkpoint(path)

    def test_foreign_file_changes_nothing(self, tmp_path):
        path = save(tmp_path)
        (path / "notes.txt").write_text("mine")
        (path / "extra.safetensors").write_bytes(b"\xff" * 64)
        assert same(read_checkpoint(path).arrays, sorted_by_file(arrays(500)))

    def test_manifest_of_other_checkpoint_is_refused(self, tmp_path):
        first, second = save(tmp_path, 1), save(tmp_path, 2)
        (second / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
        with pytest.raises(DamagedCheckpointError, match="differs from its digest"):
            read_checkpoint(second)

    def test_manifest_of_earlier_release_is_read(self, tmp_path):
        """It has sha256 digests; such checkpoints are read, and their damage is found."""
        path = save(tmp_path)
        files = [path / name for name in FILES if name != "manifest.json"]
        fields = {
            "schema": 1,
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()} for file in files},
        }
        digest = sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps({**fields, "manifest_sha256": digest}))
        assert same(read_checkpoint(path).arrays, sorted_by_file(arrays(500)))
        flip(path / "parameters.safetensors", 2000)
        with pytest.raises(DamagedCheckpointError, match=r"parameters\.safetensors differs from its digest"):
            read_checkpoint(path)

    def test_manifest_of_later_release_is_refused(self, tmp_path):
        path = save(tmp_path)
        fields = {"schema": 3, "files": {}}
        digest = sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps({**fields, "manifest_sha256": digest}))
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json has schema 3; this release reads 1 and 2"):
            read_checkpoint(path)

    def test_previous_one_is_used_and_damage_named(self, tmp_path):
        for step in (100, 200, 300):
            save(tmp_path, step)
        flip(tmp_path / "checkpoints/step-000000300/parameters.safetensors", 2000)
        (tmp_path / "checkpoints/step-000000200/manifest.json").unlink()
        checkpoint, damaged = newest_sound(tmp_path)
        assert checkpoint.meta.step == 100
        assert [(error.path.name, error.file) for error in damaged] == [
            ("step-000000300", "parameters.safetensors"),
            ("step-000000200", "manifest.json"),
        ]

    def test_only_damaged_checkpoints(self, tmp_path):
        for step in (100, 200):
            flip(save(tmp_path, step) / "checkpoint.json", 20)
        with pytest.raises(UsageError, match=r"no sound checkpoint(?s:.*)step-000000200.*checkpoint.json(?s:.*)step-000000100"):
            find_checkpoint(tmp_path)

    def test_no_checkpoint(self, tmp_path):
        with pytest.raises(UsageError, match="has no checkpoint"):
            find_checkpoint(tmp_path)
        with pytest.raises(UsageError, match="there is no folder"):
            find_checkpoint(tmp_path / "nowhere")

    def test_checkpoint_folder_is_used_directly(self, tmp_path):
        older = save(tmp_path, 100)
        save(tmp_path, 200)
        assert find_checkpoint(older)[0].meta.step == 100
        flip(older / "optimizer.safetensors", 900)
        with pytest.raises(DamagedCheckpointError, match=r"optimizer\.safetensors"):
            find_checkpoint(older)

    def test_schema_of_a_later_release(self, tmp_path):
        path = save(tmp_path, schema_number=2)
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json has no schema 1"):
            read_checkpoint(path)


class TestKeeping:
    def test_newest_and_the_best(self, tmp_path):
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, math.nan), (10, 0.7), (1_000_000_000, 0.6)):
            save(tmp_path, step, metrics={"accuracy": accuracy, "loss": 1 - accuracy})
        removed = prune(tmp_path, 2, ACCURACY.info)
        assert [path.name for path in removed] == ["step-000000004", "step-000000003", "step-000000001"]
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000000", "step-000000010", "step-000000002"]
        assert [path.name for path in prune(tmp_path, 1, LOSS)] == ["step-000000010"]
        assert [path.name for path in prune(tmp_path, 1)] == ["step-000000002"]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1000000000"]

    def test_newest_and_the_few_best(self, tmp_path):
        """Neither removes what the other retains; the best are those of all."""
        figures = {1: 0.1, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.2, 6: math.nan, 7: 0.3}
        for step, accuracy in figures.items():
            save(tmp_path, step, metrics={"accuracy": accuracy, "loss": 1.0})
        assert [path.name[-1] for path in best_checkpoints(tmp_path, ACCURACY.info)] == list("243751")
        assert [path.name[-1] for path in prune(tmp_path, 2, ACCURACY.info, 3)] == ["5", "1"]
        assert [path.name[-1] for path in list_checkpoints(tmp_path)] == list("76432")
        assert prune(tmp_path, 2, ACCURACY.info, 3) == []
        assert [path.name[-1] for path in prune(tmp_path, 1, LOSS, 2)] == ["6", "4"]

    def test_without_evaluations_there_is_no_best(self, tmp_path):
        for step in (1, 2):
            save(tmp_path, step)
        assert [path.name for path in prune(tmp_path, 1, LOSS)] == ["step-000000001"]

    def test_locked_checkpoint_is_pruned_later(self, tmp_path):
        first, _ = save(tmp_path, 1), save(tmp_path, 2)
        with read_lock(first) as locked:
            assert locked
            assert prune(tmp_path, 1) == []
        assert prune(tmp_path, 1) == [first]
        with read_lock(first) as locked:
            assert not locked

    def test_running_run_always_has_sound_newest(self, tmp_path):
        """Also between the moments when a reader looks for it and reads it."""
        save(tmp_path, 1)
        enough = threading.Event()

        def save_repeatedly():
            step = 1
            while not enough.is_set():
                step += 1
                save(tmp_path, step, arrays(0))
                prune(tmp_path, 1)

        writer = threading.Thread(target=save_repeatedly)
        writer.start()
        try:
            results = [newest_sound(tmp_path) for _ in range(400)]
        finally:
            enough.set()
            writer.join()
        assert all(damaged == [] for _, damaged in results)
        assert results[0][0].meta.step < results[-1][0].meta.step

    def test_saving_a_step_again_replaces_it(self, tmp_path):
        save(tmp_path, 5, arrays(1))
        path = save(tmp_path, 5, arrays(2))
        assert same(read_checkpoint(path).arrays, sorted_by_file(arrays(2)))
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000005"]

    def test_checkpoint_in_progress_is_no_leftover(self, tmp_path):
        first = CheckpointWriter(tmp_path / "checkpoints", meta(1), entries(arrays(1)))
        save(tmp_path, 2)
        first.write(b"".join(value.tobytes() for value in arrays(1).values()))
        first.seal()
        assert same(read_checkpoint(first.publish()).arrays, sorted_by_file(arrays(1)))


class TestSuddenDeath:
    @pytest.mark.quick_cases("new")
    @pytest.mark.parametrize("step", [200, 100], ids=["new", "again"])
    def test_kill_between_any_steps_leaves_sound_checkpoint(self, tmp_path, step):
        """Killed before each file system call of the writer, a run keeps a sound newest checkpoint."""
        before = save(tmp_path / "first", 100)
        shutil.copytree(before.parent, tmp_path / "whole" / "checkpoints")
        ended, calls = save_until(tmp_path / "whole", step, deadly=0)
        assert ended == 0
        assert calls >= 10
        found_steps = set()
        for deadly in range(1, calls + 1):
            run = tmp_path / str(deadly)
            shutil.copytree(before.parent, run / "checkpoints")
            assert save_until(run, step, deadly) == (signal.SIGKILL, deadly - 1)
            checkpoint, damaged = newest_sound(run)
            assert damaged == []
            assert same(checkpoint.arrays, sorted_by_file(arrays(checkpoint.meta.step)))
            found_steps.add(checkpoint.meta.step)
            save(run, 300)
            assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
            assert newest_sound(run)[0].meta.step == 300
            assert newest_sound(run)[1] == []
            assert read_checkpoint(run / "checkpoints/step-000000100").meta.step == 100
        assert found_steps == {100, step}

    def test_renamed_checkpoint_gets_its_name_back(self, tmp_path):
        path = save(tmp_path, 100)
        path.rename(tmp_path / "checkpoints/.step-000000100.old-abc")
        assert newest_sound(tmp_path)[0].meta.step == 100
        save(tmp_path, 200)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000000100", "step-000000200"]


class TestFullDisk:
    @pytest.mark.quick_cases("arrays-100", "arrays-0")
    @pytest.mark.parametrize(
        ("arrays", "limit"),
        [
            *(("arrays", limit) for limit in (0, 100, 1000, 2600, 2800)),
            *(("large_arrays", limit) for limit in (2**20, 1_500_100, 5_600_000)),
        ],
    )
    def test_error_propagates_and_leaves_nothing(self, tmp_path, arrays, limit):
        """No file may exceed `limit` bytes, which the system refuses as it refuses to fill a disk."""
        save(tmp_path, 100)
        script = (
            f"import resource, signal, sys\nfrom pathlib import Path\nfrom checkpoint_tools import {arrays}, save\n"
            f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
            f"try:\n    save(Path(sys.argv[1]), 200, {arrays}())\nexcept OSError as error:\n    sys.exit(error.errno)\nsys.exit(0)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 27, done.stderr  # EFBIG
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000100"]
        assert newest_sound(tmp_path)[0].meta.step == 100


def test_missing_checkpoint_is_reported_with_existing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine"
    saved = [save(run, step) for step in (100, 200)]
    (run / "job.json").write_text("{}")
    assert find_run_or_checkpoint(Path("mine/checkpoints") / saved[0].name) == Path("runs/mine/checkpoints") / saved[0].name
    for missing in (run / "checkpoints" / "step-7", Path("mine/checkpoints/step-7")):
        with pytest.raises(UsageError, match=rf"there is no '.*step-7'; checkpoints of the run 'mine': {saved[1].name}, {saved[0].name}\."):
            find_run_or_checkpoint(missing)
