"""Results of a user's network while decoding are checked by the same rules on every backend."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.decoding_functions import DecodingChecks
from crosstrain.core.errors import UsageError

CHECKS = DecodingChecks(lambda tensor: tensor.shape if isinstance(tensor, np.ndarray) else None, 7)
CACHES = "cache of a list", "cache of a text"
FORM = "tensors in tuples are needed, which may be nested, each [batch, …]"


def tensors(rows):
    return st.lists(st.integers(0, 3), max_size=2).map(lambda sizes: np.zeros((rows, *sizes)))


def structures(leaf):
    return st.recursive(leaf, lambda part: st.lists(part, max_size=3).map(tuple), max_leaves=8)


def replaced(structure, place, part):
    """Return the structure with `part` in place of that tensor, and the number of tensors."""
    count = 0

    def walk(node):
        nonlocal count
        if isinstance(node, tuple):
            return tuple(map(walk, node))
        count += 1
        return part if count - 1 == place else node

    return walk(structure), count


@given(structures(tensors(3)), st.booleans())
def test_nested_tuples_of_tensors_are_accepted(structure, known):
    rows = 3 if known else None
    assert CHECKS.memory(structure, rows) is structure
    assert CHECKS.cache(structure, rows) is structure
    assert CHECKS.step((np.zeros((3, 7)), structure), rows, structure)[1] is structure


@given(structures(tensors(3)), st.data())
def test_other_values_in_structures_are_named(structure, data):
    wrong = data.draw(st.sampled_from([None, 3, 0.5, "text", [], {}, np.float32(1.0), np.zeros(()), np.zeros((4, 3))]))
    _, count = replaced(structure, -1, None)
    if not count:
        return
    broken, _ = replaced(structure, data.draw(st.integers(0, count - 1)), wrong)
    for check, name in ((CHECKS.memory, "encode"), (CHECKS.cache, "empty_cache")):
        with pytest.raises(UsageError, match=f"^model: the function '{name}' returned ") as caught:
            check(broken, 3)
        assert str(caught.value).endswith(FORM)
    with pytest.raises(UsageError, match=r"^model: the function 'decode_step' returned .* in its cache") as caught:
        CHECKS.step((np.zeros((3, 7)), broken), 3, structure)
    assert str(caught.value).endswith(FORM)


@given(st.lists(st.integers(0, 9), max_size=4))
def test_logits_must_have_one_value_per_piece(shape):
    result = np.zeros(shape), ()
    if shape == [3, 7]:
        assert CHECKS.step(result, 3, ()) == result
    else:
        with pytest.raises(UsageError) as caught:
            CHECKS.step(result, 3, ())
        assert str(caught.value) == (
            f"model: the function 'decode_step' returned the logits {shape} for 3 rows; a number for each piece is needed,"
            " [batch, pieces], here [3, 7]"
        )


@given(structures(tensors(3)), structures(tensors(3)))
def test_cache_must_keep_its_structure(before, after):
    def form(structure):
        return tuple(map(form, structure)) if isinstance(structure, tuple) else None

    step = np.zeros((3, 7)), after
    if form(before) == form(after):
        assert CHECKS.step(step, 3, before)[1] is after
    else:
        with pytest.raises(UsageError, match="tuples of one form are needed"):
            CHECKS.step(step, 3, before)


@pytest.fixture(scope="module")
def messages():
    """Return each backend's message for each mistake, from separate processes."""
    script = str(Path(__file__).parent / "decoding_mistakes.py")
    messages_by_backend = {}
    for backend in ("tf", "torch"):
        done = subprocess.run([sys.executable, script, backend], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        messages_by_backend[backend] = json.loads(done.stdout)
    return messages_by_backend


@pytest.mark.thorough
def test_both_backends_report_each_mistake(messages):
    for backend_messages in messages.values():
        assert backend_messages.pop("nothing") is None
        for mistake, message in backend_messages.items():
            assert message is not None, mistake
            function = "encode" if mistake.startswith("memory") else "empty_cache" if mistake in CACHES else "decode_step"
            assert message.startswith(f"model: the function '{function}' "), mistake
            assert "needed" in message
    assert set(messages["tf"]) == set(messages["torch"])
