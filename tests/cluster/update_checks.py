"""--clip-norm, --ema-decay and --accumulate in a session of either framework.

tf_checks.py and torch_checks.py define the fixture `opened`, which opens a session, and import these tests; this file imports neither
framework.
"""

import numpy as np
import pytest
from processes import free_ports
from torch_image_tasks import steps

from crosstrain.backends.base import Plan, State


def test_clipping_is_torchs_formula(opened):
    """The gradient keeps its direction and has the formula's length.

    A high limit changes no bit.
    """
    moved = {}
    for limit in (0.0, 0.01, 1e9):
        session, _, _ = opened("worker-0", {"model": "logreg", "batch_size": 12, "clip_norm": limit}, 8, free_ports(1))
        before = {name: value.copy() for name, value in session.state().parameters.items()}
        list(session.train(Plan(0, 1, 0, 0, np.array([1.0]))))
        moved[limit] = np.concatenate([(value - before[name]).ravel() for name, value in session.state().parameters.items()]).astype(float)
        session.close()
    norm = np.linalg.norm(moved[0.0])
    assert norm > 0.1
    assert np.array_equal(moved[1e9], moved[0.0])
    assert np.allclose(moved[0.01], moved[0.0] * 0.01 / (norm + 1e-6), atol=1e-6 * norm)


def test_the_moving_average_follows_its_formula(opened):
    session, _, _ = opened("worker-0", {"model": "logreg", "batch_size": 12, "ema_decay": 0.5}, 8, free_ports(1))
    expected = {name: value.astype(float) for name, value in session.state().parameters.items()}
    assert all(np.array_equal(value, session.state().slots["ema"][name]) for name, value in session.state().parameters.items())
    for update in range(1, 13):
        list(session.train(Plan(update - 1, 1, (update - 1) // 5, (update - 1) % 5, np.array([0.1]))))
        decay = min(0.5, (1 + update) / (10 + update))
        state = session.state()
        expected = {name: decay * old + (1 - decay) * state.parameters[name] for name, old in expected.items()}
        for name, value in state.slots["ema"].items():
            assert np.linalg.norm(value - expected[name]) <= 1e-6 * np.linalg.norm(expected[name])
    by_average = session.evaluate("test").sums["loss_sum"]
    averages = State({name: value.copy() for name, value in session.state().slots["ema"].items()}, {}, 12)
    by_weights = session.evaluate("test").sums["loss_sum"]
    session.load(averages)  # without a moving average, which then begins as the weights
    assert session.evaluate("test").sums["loss_sum"] == pytest.approx(by_average, rel=1e-6)
    assert by_weights == by_average
    assert all(np.array_equal(value, averages.parameters[name]) for name, value in session.state().slots["ema"].items())
    session.close()


def accumulated(opened, model, accumulate, count):
    """Losses and state after updates of 14 examples, which do not divide evenly by 4."""
    options = {"model": model, "accumulate": accumulate, "global_batch_size": 14, "lr": 0.01}
    session, job, data = opened("worker-0", options, 32, free_ports(1))
    losses, state = steps(session, job, data, 0, count), session.state()
    session.close()
    return losses, state


def test_micro_batches_make_the_update_of_the_whole_batch(opened):
    (losses, whole), (in_parts, parts) = (accumulated(opened, "logreg", count, 6) for count in (1, 4))
    assert np.allclose(in_parts, losses, rtol=1e-6)
    for name, value in whole.parameters.items():
        assert np.linalg.norm(parts.parameters[name] - value) <= 1e-6 * np.linalg.norm(value)


def test_buffers_move_with_each_micro_batch(opened):
    """The first normalisation's mean, linear in the images, moves by a tenth four times.

    1 − 0.9⁴ instead of 0.1.
    """
    (_, whole), (_, parts) = (accumulated(opened, "small_networks.normalised", count, 1) for count in (1, 4))
    length = {count: np.linalg.norm(state.buffers["bn1.running_mean"]) for count, state in ((1, whole), (4, parts))}
    assert length[4] / length[1] == pytest.approx((1 - 0.9**4) / 0.1, rel=0.05)


@pytest.mark.parametrize("rule", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw", "ema_decay": 0.5}])
def test_excepted_parameters_move_as_without_decay(opened, rule):
    """One update from the same weights: as without decay if they match, else as with decay."""
    moved = {}
    for patterns in (None, "*.bias", "*"):
        more = {} if patterns is None else {"weight_decay_except": patterns}
        options = {"model": "logreg", "batch_size": 12, "weight_decay": 0.3, **rule, **more}
        session, _, _ = opened("worker-0", options, 8, free_ports(1))
        ones = {name: np.ones_like(value) for name, value in session.state().parameters.items()}
        session.load(State(ones, {}, 0))
        list(session.train(Plan(0, 1, 0, 0, np.array([0.1]))))
        moved[patterns] = {name: value.copy() for name, value in session.state().parameters.items()}
        session.close()
    assert np.allclose(moved["*.bias"]["dense.weight"], moved[None]["dense.weight"], rtol=1e-6)
    assert np.allclose(moved["*.bias"]["dense.bias"], moved["*"]["dense.bias"], rtol=1e-6)
    for name, value in moved["*"].items():
        assert not np.allclose(moved[None][name], value, rtol=1e-3)
