"""Translation rows of the benchmark: text, batches, and results cached between calls."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks import generated_text, ours
from benchmarks.contestants import PEERS, Peer
from benchmarks.figures import Measured
from benchmarks.generated_text import MAX_WORDS, PAIRS, write_text
from benchmarks.kept_results import KeptResults
from benchmarks.ours import target_tokens
from benchmarks.rows import CONTESTANTS, ROWS
from benchmarks.rows.translation import BASE, BASE_PARAMETERS, RING, TINY
from benchmarks.session import Session
from benchmarks.table import compute
from crosstrain.core.errors import UsageError
from crosstrain.data.store.stored_dataset import open_dataset, prepare
from crosstrain.models.build import build_model

FACTS = {"cpu_model": "a processor", "versions": {"torch": "2.14"}, "load_before": 0.1}
MEASURED = Measured(10.0, None, 1.0, None, 1, 2, 3, (3.0, 2.0, 1.0), 1.5, 3, target_tokens_per_second=1000.0, padding_share=0.2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a short version of the corpus, and return the name under which it is data."""
    with pytest.MonkeyPatch.context() as patch:
        prefix = tmp_path_factory.mktemp("text") / "generated"
        patch.setenv("TRAINER_DATA_CACHE", str(prefix.parent / "cache"))
        patch.setattr(generated_text, "PREFIX", prefix)
        patch.setattr(generated_text, "PAIRS", {"": 600, ".test": PAIRS[".test"]})
        write_text()
        data = f"parallel-text:{prefix}:en-de?vocabulary=2000"
        prepare(data)
        yield data


def test_generated_text_is_realistic_and_deterministic(text, tmp_path, monkeypatch):
    prefix = generated_text.PREFIX
    lines = prefix.with_suffix(".en").read_text().splitlines()
    words = np.array([len(line.split()) for line in lines])
    assert len(lines) == len(prefix.with_suffix(".de").read_text().splitlines()) == 600
    assert 18 < words.mean() < 23
    assert 1 <= words.min() < 7
    assert 50 < words.max() <= MAX_WORDS
    monkeypatch.setattr(generated_text, "PREFIX", tmp_path / "again")
    write_text()
    assert (tmp_path / "again.en").read_text().splitlines() == lines


def test_peers_use_product_batches(text):
    """Both count target tokens per update; the peers count padded matrices, over two epochs."""
    work = replace(TINY, data=text, batch_tokens=512)
    script = f"""
import json, types, sys
sys.path[:0] = [{str(PEERS)!r}]
from text_batches import text_batches
from crosstrain.data.store.stored_dataset import open_dataset
data = open_dataset({text!r})
work = types.SimpleNamespace(data=data, seed=0, batch_tokens=512, updates=60)
batches = text_batches(work)
assert all(int((batch.target != 0).sum()) == batch.tokens for batch in batches)
assert all((batch.shifted[:, 1:] == batch.target[:, :-1]).all() and (batch.shifted[:, 0] == 1).all() for batch in batches)
assert all(batch.target.size <= 512 and batch.source.size <= 512 for batch in batches)
print(json.dumps([batch.tokens for batch in batches]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == target_tokens(work, 1, 60).tolist()


def test_tokens_per_second_count_timed_updates(tmp_path):
    records = [
        {"step": first, "count": 2, "time_seconds": seconds, "losses": [3.0, 2.0]} for first, seconds in ((0, 1.0), (2, 2.0), (4, 4.0))
    ]
    summary = {"steps": 6, "state": "succeeded", "init_seconds": 3.0, "examples": 60, "per_node": [{"monitor_cpu_cores_used": None}]}
    summary |= {"time_shares": None, "time_to_target_seconds": None, "padding_share": 0.2}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "job.json").write_text(json.dumps({"threads_per_task": [2]}))
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "events.jsonl").write_text("")
    measured = ours.read_run(tmp_path, 2, np.array([1.0, 2.0, 10.0, 20.0, 30.0, 40.0]))
    assert (measured.target_tokens_per_second, measured.padding_share) == (100.0 / 3.0, 0.2)


def test_peers_without_dropout_compare_every_loss():
    peers = {name: peer for name, peer in CONTESTANTS.items() if isinstance(peer, Peer) and CONTESTANTS[peer.like].work.data == TINY.data}
    assert {peer.losses for name, peer in peers.items() if "no dropout" in name} == {"each"}
    assert {
        peer.losses for name, peer in peers.items() if "no dropout" not in name and "decoding" not in name and "products" not in name
    } == {"level"}
    assert BASE.most_repeats == 3


def test_exchange_bound_counts_all_parameters(text):
    """The rows' vocabulary has 6,000 more pieces, with an embedding row each, than the one here."""
    spec = build_model("transformer:base", open_dataset(text).info)
    assert spec.size + 6000 * spec.width == BASE_PARAMETERS
    assert pytest.approx(4 / 3 * 4 * BASE_PARAMETERS / 125e6) == RING.value


def test_cached_results_require_same_machine_and_versions(tmp_path):
    name = "torch tiny fp32"
    scene = {name: CONTESTANTS[name]}
    cache = KeptResults(tmp_path, FACTS, 1)
    assert cache.find(scene, 0) is None
    cache.keep(scene, 0, {name: MEASURED})
    assert KeptResults(tmp_path, {**FACTS, "load_before": 3.0}, 1).find(scene, 0) == {name: MEASURED}
    assert cache.find(scene, 1) is None
    assert KeptResults(tmp_path, {**FACTS, "versions": {"torch": "2.15"}}, 1).find(scene, 0) is None
    assert KeptResults(tmp_path, FACTS, 10).find(scene, 0) is None
    assert cache.find({name: replace(CONTESTANTS[name], steps=7)}, 0) is None
    assert KeptResults(None, FACTS, 1).find(scene, 0) is None


def test_cache_skips_failed_repeats_and_names_damaged_file(tmp_path):
    name = "torch tiny fp32"
    cache, scene = KeptResults(tmp_path, FACTS, 1), {name: CONTESTANTS[name]}
    cache.keep(scene, 0, {name: None})
    assert list(tmp_path.iterdir()) == []
    cache.keep(scene, 0, {name: MEASURED})
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    with pytest.raises(UsageError, match=path.name):
        cache.find(scene, 0)


def test_session_reuses_cached_results_without_starting(tmp_path):
    names = ["torch tiny fp32", "torch tiny fp32 by hand"]
    scene, cache, messages = {name: CONTESTANTS[name] for name in names}, KeptResults(tmp_path, FACTS, 1), []
    for repeat in range(2):
        cache.keep(scene, repeat, {name: replace(MEASURED, steps=repeat) for name in names})
    session = Session(2, 1, "host", None, 1.0, messages.append, cache)
    session.run(names)
    assert {name: [run.steps for run in runs] for name, runs in session.runs.items()} == {name: [0, 1] for name in names}
    assert messages == ["1/2 torch tiny fp32: kept from an earlier call", "2/2 torch tiny fp32: kept from an earlier call"]
    assert asdict(session.runs[names[0]][1]) == asdict(replace(MEASURED, steps=1))


def test_peer_at_its_repeat_limit_is_skipped(tmp_path):
    ours, trainer = "torch tiny fp32", "Lightning tiny fp32"
    limit = CONTESTANTS[trainer].most_repeats
    cache = KeptResults(tmp_path, FACTS, 1)
    for repeat in range(limit + 2):
        taking_turns = [ours, trainer] if repeat < limit else [ours]
        cache.keep({name: CONTESTANTS[name] for name in taking_turns}, repeat, dict.fromkeys(taking_turns, MEASURED))
    session = Session(limit + 2, 1, "host", None, 1.0, lambda message: None, cache)
    session.run([ours, trainer])
    assert session.runs == {ours: [MEASURED] * (limit + 2), trainer: [MEASURED] * limit + [None] * 2}
    assert compute("row", ROWS["translation-tiny-torch-fp32-lightning"], session.runs).repeats == limit
    assert session.problems == []
