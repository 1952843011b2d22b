"""Text with the longest allowed lines is prepared in bounded memory, counted in bytes."""

import gzip
import itertools
import random
import string
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.data.sources.translation import pairs
from crosstrain.data.sources.translation.pairs import MAX_SAMPLED_LINES, SAMPLE_SEED, _Sample, _sampled_places, chosen
from crosstrain.data.sources.translation.text_files import MAX_LINE_BYTES, count_lines, entry_bytes, parts, text_bytes
from crosstrain.data.store.stored_dataset import open_dataset

LIMITED = """
import resource, sys
from pathlib import Path
import sentencepiece
from crosstrain.data.sources.translation import pairs
from crosstrain.data.store import build
from crosstrain.data.store.stored_dataset import prepare

size = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
pairs.MAX_SAMPLED_BYTES = 4 << 20
resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv[2]) << 20), resource.RLIM_INFINITY))
print(prepare(sys.argv[1], None, False))
"""

HEADROOM_MIB = 500
"""Address space for 16 MiB of text held together, four times as much in Python, and the threads' reservations.
All 400 pairs and their pieces together would take a gigabyte."""


@pytest.mark.thorough
@pytest.mark.parametrize("held_out", [0, pytest.param(300, marks=pytest.mark.slow)])
def test_longest_lines_are_prepared_in_bounded_memory(tmp_path, monkeypatch, held_out):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    draw = random.Random(1)
    for language in ("en", "de"):
        with (tmp_path / f"text.{language}").open("w") as file:
            for number in range(400):
                line = "😀" + "".join(draw.choices(string.printable[:94], k=MAX_LINE_BYTES - 4))
                file.write(f"{line}\na sentence {number} of {number * 7 % 13} {language}\n")
        if not held_out:
            (tmp_path / f"text.test.{language}").write_text("a sentence\n")
    name = f"parallel-text:{tmp_path / 'text'}:en-de?vocabulary=400,held-out={held_out}"
    command = [sys.executable, "-c", LIMITED, name, str(HEADROOM_MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left_out = open_dataset(name).left_out
    assert sum(int(line.split()[1]) for line in left_out if "with more than 200 pieces" in line) == 400


@given(st.lists(st.integers(0, 9)), st.integers(1, 6), st.integers(1, 20))
def test_parts_hold_all_entries_within_their_limits(sizes, most, most_bytes):
    blocks = list(parts(sizes, most, most_bytes, int))
    assert list(itertools.chain.from_iterable(blocks)) == sizes
    assert all(0 < len(part) <= most and (len(part) == 1 or sum(part) <= most_bytes) for part in blocks)
    for part, following in itertools.pairwise(blocks):  # none is smaller than necessary
        assert len(part) == most or sum(part) + following[0] > most_bytes


@given(st.text(max_size=50))
def test_text_size_is_that_in_utf8(text):
    assert text_bytes(text) == len(text.encode())
    assert entry_bytes((text, "é")) == len(text.encode()) + 2
    assert entry_bytes("with an empty line") == 0


def text_of(count):
    """Return pairs, some of them skipped, and the size of the text without those."""
    entries = ["" if number % 7 == 3 else (f"number {number}", "Nummer " + "ü" * (number % 50)) for number in range(count)]
    return entries, sum(map(entry_bytes, entries))


def test_small_text_is_sampled_completely(monkeypatch):
    entries, size = text_of(3000)
    monkeypatch.setattr(pairs, "MAX_SAMPLED_BYTES", size)
    assert np.array_equal(_sampled_places(lambda: iter(entries), 3000), np.arange(3000))
    monkeypatch.setattr(pairs, "MAX_SAMPLED_LINES", 800)
    assert np.array_equal(_sampled_places(lambda: iter(entries), 3000), chosen(3000, 400, SAMPLE_SEED))
    assert MAX_SAMPLED_LINES == 1_000_000


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_sample_of_a_larger_text_is_even_and_reproducible(monkeypatch, share):
    entries, size = text_of(3000)
    monkeypatch.setattr(pairs, "MAX_SAMPLED_BYTES", int(share * size))
    places = _sampled_places(lambda: iter(entries), 3000)
    assert np.array_equal(places, _sampled_places(lambda: iter(entries), 3000))
    assert len(places) == pytest.approx(3000 * share, abs=1)
    assert (np.diff(places) > 0).all()
    halves = [int((places < 1500).sum()), int((places >= 1500).sum())]
    assert min(halves) > 0.35 * len(places)  # not only the beginning of the text
    sample = _Sample(lambda: iter(entries), 3000, places)
    sampled = sum(map(text_bytes, sample.lines()))
    assert sampled == pytest.approx(share * size, rel=0.1)


@given(count=st.integers(0, 400), most=st.integers(0, 400), seed=st.integers(0, 9))
def test_places_have_the_smallest_keys_for_any_block(count, most, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "_KEYS", 37)
        places = chosen(count, most, seed)
    keys = np.random.Philox(np.random.SeedSequence([seed, count])).random_raw(count)
    assert places.tolist() == sorted(np.argsort(keys)[:most].tolist())


def test_lines_cost_no_memory_when_places_are_drawn():
    tracemalloc.start()
    try:
        assert len(chosen(20_000_000, 1000, 1)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_compressed_line_feeds_are_refused_early(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"\n" * 20_000_000))
    with pytest.raises(UsageError, match="unpacks to more than 200 times its size"):
        count_lines(path)
