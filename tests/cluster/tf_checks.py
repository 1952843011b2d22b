"""Parts of the TensorFlow backend in one process; run by test_tf_images.py.

Pixels, dropout, precision, logits, traces.
"""

import os

import numpy as np
import pytest
from processes import free_ports
from tf_image_tasks import opened
from torch_image_tasks import Pictures, flat

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1", TF_USE_LEGACY_KERAS="1")

import tensorflow as tf
from update_checks import *  # noqa: F403 — tests that both frameworks share

from crosstrain.backends.base import Plan, State, make_sampler, parameter_server_placement
from crosstrain.backends.tf import data as data_module
from crosstrain.backends.tf import data as pixels_module
from crosstrain.backends.tf import runtime
from crosstrain.backends.tf.data import changed, compiled_normalised, normalised, normalised_in_blocks
from crosstrain.backends.tf.model import ForwardContexts, build_model, micro_batches_on
from crosstrain.backends.tf.optimizers import LossScale
from crosstrain.backends.tf.sync.steps import Replica
from crosstrain.core.cluster import Cluster
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, load
from crosstrain.data.preprocessing import Augmentation, apply_changes, normal_line
from crosstrain.launch.driver.cluster_setup import make_tasks
from crosstrain.models.dropout_masks import keep_mask

NORMALISED = "small_networks.normalised"
"""With batch normalisation, and small: TensorFlow traces ResNet-18 for many seconds."""

tf.config.threading.set_intra_op_parallelism_threads(1)  # as a task of one thread sets them, which cannot be changed any more
tf.config.threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(name="opened")
def opener():
    """The function with which shared tests open a session."""
    return opened


@pytest.fixture(scope="module")
def session():
    """A trained session of the model with batch normalisation."""
    opened_session, _, data = opened("worker-0", {"model": NORMALISED, "batch_size": 8, "momentum": 0.9}, 32, free_ports(1))
    list(opened_session.train(Plan(0, 2, 0, 0, np.full(2, 0.05))))
    return opened_session, data


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("line", [False, True])
def test_normalised_to_the_bit(monkeypatch, channels_last, line):
    """As a line or by the table, in ops or compiled."""
    data = Pictures(13, mean=(0.401, 0.501, 0.601) if line else (0.4, 0.6, 0.8))  # a pixel of 102, 153 or 204 has the mean itself
    assert (normal_line(data.info.mean, data.info.std) is not None) == line
    monkeypatch.setattr(pixels_module, "BLOCK_ELEMENTS", 7 * 3 * 13 * 13)
    axes = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    images = np.ascontiguousarray(data.images("train").transpose(axes))
    for way in normalised, normalised_in_blocks, compiled_normalised:
        pixels = way(tf.constant(images), data.info, channels_last=channels_last).numpy()
        assert np.array_equal(pixels, data.inputs("train").transpose(axes))


@pytest.mark.parametrize("small", [0, 2**15])
@pytest.mark.parametrize("augment", ["none", "crop+flip"])
@pytest.mark.parametrize("model", ["cnn", "logreg"])
def test_batches_are_the_definition(monkeypatch, small, augment, model):
    monkeypatch.setattr(data_module, "SMALL_ELEMENTS", small)
    data, job = Pictures(16), Job(backend="tf", batch_size=7, augment=augment)
    layout = data_module.layout_for(job, load(find("model", model), "model")(data.info), data.info)
    split = data_module.resident(data, "train", layout)
    assert (split.tensors["image"].dtype == tf.float32) == (small > 0 and augment == "none")
    batches = make_sampler(job, data).whole(1, 0, 9)
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (data.info.mean, data.info.std))
    for position in range(9):
        indices, changes, pixels = batches.batch(position), None, data.images("train")[batches.batch(position)]
        if augment != "none":
            changes = batches.changes[batches.offsets[position] : batches.offsets[position + 1]]
            pixels = apply_changes(pixels, changes)
        x, y = split.batch(indices, changes)
        assert np.array_equal(x.numpy(), ((pixels / 255.0 - mean) / std).astype(np.float32))
        assert np.array_equal(y.numpy(), data.labels("train")[indices])


@pytest.mark.parametrize("size", [17, 1])
def test_micro_batches_sum_to_whole_batch(size):
    data, job = Pictures(32), Job(backend="tf")
    spec = load(find("model", "cnn"), "model")(data.info)
    model, context = build_model("cnn", spec), ForwardContexts(job, spec, 0).training({}, None, tf.range(size))
    split = data_module.resident(data, "train", data_module.layout_for(job, spec, data.info))
    canonical = spec.initial(0)
    held = {name: model.layouts[name].to_storage(value) if name in model.layouts else value for name, value in canonical.items()}
    parameters = model.parameters({name: tf.constant(value) for name, value in held.items()})
    images, labels = split.laid_batch(tf.range(size))
    whole, cut = split.micro_batches(images, labels, 1), split.micro_batches(images, labels, 3)
    assert [len(y) for _, y in cut] == [size // 3, (size + 1) // 3, (size + 2) // 3]
    loss_sum, gradients = model.loss_and_gradients(parameters, whole, tf.constant(0.1), context)
    loss_sum_of_micro_batches, gradients_of_micro_batches = model.loss_and_gradients(parameters, cut, tf.constant(0.1), context)
    assert float(loss_sum_of_micro_batches) == pytest.approx(float(loss_sum), rel=1e-5)
    assert len(gradients) == len(gradients_of_micro_batches) == len(canonical)
    for gradient, summed in zip(gradients, gradients_of_micro_batches, strict=True):
        assert np.linalg.norm(gradient - summed) <= 1e-5 * np.linalg.norm(gradient)
    assert np.allclose(model.sums(parameters, cut, context), model.sums(parameters, whole, context), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_deterministic_cross_entropy_equals_standard_one(scale):
    """Value and gradient, also if all but one class have probability 0, and without examples."""
    spec = load(find("model", "logreg"), "model")(Pictures(8).info)
    draw = np.random.default_rng(5)
    for count in (40, 0):
        logits_bk = tf.constant((scale * draw.standard_normal((count, 10))).astype(np.float32))
        y_b = tf.constant(draw.integers(0, 10, count), tf.int32)
        deterministic, standard = (build_model("logreg", spec, deterministic=flag).cross_entropy(logits_bk, y_b) for flag in (True, False))
        for actual, expected in zip(deterministic, standard, strict=True):
            assert actual.dtype == expected.dtype == tf.float32
            assert np.allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("micro_batches", "model", "options", "threads", "device"),
    [
        (2, "cnn", {}, 2, "CPU:0"),
        (4, "cnn", {}, 4, "CPU:0"),
        (1, "cnn", {}, 5, "CPU:0"),  # too few examples for five threads
        (1, "cnn", {}, 2, "GPU:0"),
        (1, "cnn", {"mode": "async"}, 2, "CPU:0"),
        (1, "logreg", {}, 2, "CPU:0"),
        (1, "resnet18", {}, 2, "CPU:0"),
        (1, "alexnet", {}, 2, "CPU:0"),
    ],
)
def test_small_cnn_step_has_a_micro_batch_per_thread(micro_batches, model, options, threads, device):
    spec = load(find("model", model), "model")(Pictures(32).info)
    assert micro_batches_on(device, Job(backend="tf", batch_size=32, **options), spec, threads) == micro_batches


def test_changed_pixels_are_the_definition():
    images = Pictures(16).images("train")[:, :, :, :11]
    changes = Augmentation(4, 3, flip=True).draws(5, 2, 60)
    pixels = changed(tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1))), tf.constant(changes))
    assert np.array_equal(pixels.numpy().transpose(0, 3, 1, 2), apply_changes(images, changes))


def test_dropout_depends_only_on_seed_step_rank_and_layer():
    data = Pictures(20)
    spec = load(find("model", "alexnet"), "model")(data.info)
    x, indices = tf.ones([20, 400]), tf.range(20)

    def drawn(seed=0, rank=0, step=3, layer=0, deterministic=False):
        passes = ForwardContexts(Job(backend="tf", seed=seed, deterministic=deterministic), spec, rank)
        tf.random.uniform([3])  # TensorFlow's own random state is of no importance
        return passes.training({}, tf.constant(step, tf.int64), indices).dropout(x, 0.4, layer).numpy()

    assert np.array_equal(drawn(), drawn())
    for changed_mask in drawn(seed=1), drawn(rank=1), drawn(step=4), drawn(layer=1):
        assert not np.array_equal(drawn(), changed_mask)
    assert np.unique(drawn()).tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (drawn() > 0).mean() == pytest.approx(0.6, abs=0.03)
    mask = keep_mask(9, 3, 1, np.arange(20), 400, 0.4)
    assert np.array_equal(drawn(seed=9, layer=1, deterministic=True) > 0, mask)
    assert np.array_equal(drawn(rank=1, deterministic=True), drawn(deterministic=True))


def test_loss_scale():
    scale = LossScale()
    applied = []
    first = scale.scalars["loss_scale"]
    assert first == 2.0**14
    scale.guarded([tf.fill([3], first), tf.zeros([0])], lambda gradients: applied.append([g.numpy() for g in gradients]))
    assert applied.pop()[0].tolist() == [1.0] * 3
    assert scale.scalars == {"loss_scale": first, "clean_steps": 1.0}
    for bad in (float("inf"), float("nan")):
        before = scale.scalars["loss_scale"]
        scale.guarded([tf.ones([2]), tf.constant([1.0, bad])], applied.append)
        assert scale.scalars == {"loss_scale": before / 2, "clean_steps": 0.0}
    assert not applied
    scale.restore({"loss_scale": 8.0, "clean_steps": 1999.0})
    scale.guarded([tf.ones([1])], applied.append)
    assert scale.scalars == {"loss_scale": 16.0, "clean_steps": 0.0}
    scale.restore({"loss_scale": first, "clean_steps": 1999.0})
    scale.guarded([tf.ones([1])], applied.append)
    assert scale.scalars == {"loss_scale": first, "clean_steps": 0.0}
    scale.restore({"loss_scale": 1.0})
    scale.check()
    scale.guarded([tf.constant([float("inf")])], applied.append)
    with pytest.raises(RunFailedError, match="precision fp16: gradients are not finite even at the loss scale 1"):
        scale.check()


def test_only_workers_insist_on_a_gpu():
    """Parameter servers and chiefs are shown none, also where there are some."""
    job = Job(backend="tf", mode="async", device="gpu", ps=1)
    tasks = make_tasks(Cluster(tuple(parameter_server_placement(job, chief_is_first_ps=False)), ("127.0.0.1",), {}, ""), [1])
    devices = {}
    for task in tasks:
        try:
            devices[task.name] = runtime._choose_device(task, job)
        except UsageError as error:
            devices[task.name] = str(error)[:18]
    assert devices == {"chief-0": "CPU:0", "ps-0": "CPU:0", "worker-0": "device: got 'gpu',"}


def test_half_precision_needs_a_gpu():
    with pytest.raises(UsageError, match="bf16"):
        opened("worker-0", {"model": "cnn", "precision": "fp16", "device": "cpu"}, 32, free_ports(1))


def test_lower_precision_is_near_and_named():
    logits = {}
    for name in ("fp32", "bf16"):
        session, _, _ = opened("worker-0", {"model": "cnn", "precision": name, "device": "cpu"}, 32, free_ports(1))
        assert (session.precision_used, session.device_used) == (name, "cpu")
        logits[name] = session.predict("test", 3, 30)
        assert all(value.dtype == np.float32 for value in session.state().parameters.values())
    distance = np.linalg.norm(logits["bf16"] - logits["fp32"]) / np.linalg.norm(logits["fp32"])
    assert 1e-5 < distance < 0.03


def test_logits_are_those_that_are_evaluated(monkeypatch, session):
    opened_session, data = session
    monkeypatch.setattr("crosstrain.backends.vectors.EVALUATION_BATCH", 8)
    logits = np.concatenate(
        [opened_session.predict("test", 0, 11), opened_session.predict("test", 11, 11), opened_session.predict("test", 11, 30)]
    )
    assert logits.shape == (30, 4)
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(30), data.labels("test")]
    evaluated = opened_session.evaluate("test")
    assert evaluated.sums["loss_sum"] == pytest.approx(losses.sum(), rel=1e-4)
    assert evaluated.sums["correct"] == (logits.argmax(1) == data.labels("test")).sum()


def test_states_are_loaded_completely_or_refused(session):
    opened_session, _ = session
    kept = {key: value.copy() for key, value in flat(opened_session.state()).items()}
    state = opened_session.state()
    new_state = State(*({name: value.copy() for name, value in part.items()} for part in (state.parameters,)), {}, 5, dict(state.buffers))
    opened_session.load(new_state)
    back = flat(opened_session.state())
    for key, value in back.items():
        expected = 5 if key == "updates" else np.zeros_like(value) if key.startswith("slots/") else kept[key]
        assert np.array_equal(value, expected), key
    first = next(iter(new_state.parameters))
    for wrong in (
        State({**new_state.parameters, first: np.zeros(3, np.float32)}, {}, 5, new_state.buffers),
        State(new_state.parameters, {"first_moment": new_state.parameters}, 5, new_state.buffers),
        State(new_state.parameters, {}, 5, {}),
    ):
        with pytest.raises(ValueError, match=r"shape|slots|buffer"):
            opened_session.load(wrong)


def test_a_trace_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINER_PROFILE_DIR", str(tmp_path))
    session, _, _ = opened("worker-0", {"model": "cnn", "batch_size": 8, "profile": 2}, 32, free_ports(1))
    results = session.train(Plan(0, 7, 0, 0, np.full(7, 0.01)))
    assert [(result.count, result.profiled) for result in results] == [(2, True), (5, False)]
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert b"Conv2D" in trace.read_bytes()


def test_scaled_gradients_are_clipped_as_unscaled():
    """An update with overflowing gradients changes neither weights nor moving average."""
    job, data = Job(backend="tf", clip_norm=0.01, ema_decay=0.9), Pictures(8)
    spec, weights = load(find("model", "logreg"), "model")(data.info), []
    for scaled in (False, True):
        replica = Replica(job, build_model("logreg", spec))
        replica.loss_scale = LossScale() if scaled else None
        scalars = [tf.constant(value) for value in replica.optimizer.host_scalars(np.ones(1), 1)[0]]
        gradients = [tf.ones(shape) * (2.0**14 if scaled else 1.0) for shape in ((4, 192), (4,))]
        replica.apply(gradients, scalars)
        weights.append([tensor.numpy() for averaged in (False, True) for tensor in replica.read(to_evaluate=averaged)[0].held.values()])
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    replica.apply([gradients[0] * float("inf"), gradients[1]], scalars)
    after = [tensor.numpy() for averaged in (False, True) for tensor in replica.read(to_evaluate=averaged)[0].held.values()]
    assert all(np.array_equal(a, b) for a, b in zip(after, weights[1], strict=True))
    assert replica.scalars == {"loss_scale": 2.0**13, "clean_steps": 0.0}
