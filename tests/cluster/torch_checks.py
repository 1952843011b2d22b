"""Parts of the torch backend in one process; run by test_torch_images.py.

Pixels, dropout, precision, logits, traces.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from processes import free_ports
from torch_image_tasks import Pictures, opened
from update_checks import *  # noqa: F403 — tests that both frameworks share

from crosstrain.backends.base import Plan, make_sampler
from crosstrain.backends.torch import data as data_module
from crosstrain.backends.torch import data as pixels_module
from crosstrain.backends.torch import optimizers as precision
from crosstrain.backends.torch.data import Normaliser, change, gather_changed
from crosstrain.backends.torch.gradients import DdpGradients, LocalGradients, data_parallel
from crosstrain.backends.torch.model import DistributedLoss, Dropout, Model, cut_batch, in_separate_memory
from crosstrain.backends.torch.optimizers import make_rule
from crosstrain.backends.torch.sync_session import Updater
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, load
from crosstrain.data.preprocessing import Augmentation, apply_changes, normal_line
from crosstrain.data.sampler import Batches
from crosstrain.models.dropout_masks import keep_mask

CPU = torch.device("cpu")

NORMALISED = "small_networks.normalised"
"""A small network with batch normalisation."""

ADDED = "small_networks.added"
"""A small network whose parameters share their gradients."""


@pytest.fixture(name="opened")
def opener():
    """The function with which shared tests open a session."""
    return opened


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("stored_last", [False, True])
def test_normalised_to_the_bit(monkeypatch, channels_last, line, stored_last):
    """As a line or by the definition, in pieces of seven images, for any memory layout."""
    data = Pictures(13, mean=(0.401, 0.501, 0.601) if line else (0.4, 0.6, 0.8))  # a pixel of 102, 153 or 204 has the mean itself
    assert (normal_line(data.info.mean, data.info.std) is not None) == line
    monkeypatch.setattr(pixels_module, "CHUNK_ELEMENTS", 7 * 3 * 13 * 13)
    pixels = torch.from_numpy(data.images("train"))
    if stored_last:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    normaliser = Normaliser(data.info, CPU, channels_last=channels_last)
    rows = normaliser.empty(60)
    normaliser.convert(pixels, rows)
    images = normaliser.as_images(rows)
    assert np.array_equal(images.numpy(), data.inputs("train"))
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("small", [0, 2**15])
@pytest.mark.parametrize("augment", ["none", "crop+flip"])
def test_batches_are_the_definition(monkeypatch, small, augment):
    monkeypatch.setattr(data_module, "SMALL_ELEMENTS", small)
    data, job = Pictures(16), Job(backend="torch", batch_size=7, augment=augment)
    split = data_module.ResidentSplit(data, "train", CPU, channels_last=True, changing=augment != "none")
    assert split.normalised == (small > 0 and augment == "none")
    batches = make_sampler(job, data).whole(1, 0, 9)
    batches_of_epoch = [(x.numpy().copy(), y.numpy()) for block in split.blocks(batches) for x, y in block]
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (data.info.mean, data.info.std))
    for position, (x, y) in enumerate(batches_of_epoch):
        pixels = data.images("train")[batches.batch(position)]
        if augment != "none":
            pixels = apply_changes(pixels, batches.changes[batches.offsets[position] : batches.offsets[position + 1]])
        assert np.array_equal(x, ((pixels / 255.0 - mean) / std).astype(np.float32))
        assert np.array_equal(y, data.labels("train")[batches.batch(position)])


def test_both_ways_to_change_pixels_are_the_definition():
    images = Pictures(16).images("train")[:, :, :, :11]
    changes = Augmentation(4, 3, flip=True).draws(5, 2, 60)
    expected = apply_changes(images, changes)
    tensor = torch.from_numpy(images.copy())
    assert np.array_equal(change(tensor, changes).numpy(), expected)
    assert np.array_equal(gather_changed(tensor, torch.from_numpy(changes).long()).numpy(), expected)


def test_dropout_depends_only_on_seed_step_rank_and_layer():
    x = torch.ones(20, 400)

    def drawn(seed=0, rank=0, step=3, layer=0, deterministic=False):
        dropout = Dropout(Job(backend="torch", seed=seed, deterministic=deterministic), rank)
        dropout.set_step(step, np.arange(20, dtype=np.int32))
        torch.rand(3)  # torch's own random state is of no importance
        return dropout(x, 0.4, layer)

    assert torch.equal(drawn(), drawn())
    masks = [drawn(seed=1), drawn(rank=1), drawn(step=4), drawn(layer=1)]
    assert all(not torch.equal(drawn(), changed_mask) for changed_mask in masks)
    assert drawn().unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert float((drawn() > 0).float().mean()) == pytest.approx(0.6, abs=0.03)
    mask = keep_mask(9, 3, 1, np.arange(20), 400, 0.4)
    assert np.array_equal(drawn(seed=9, layer=1, deterministic=True).numpy() > 0, mask)
    assert torch.equal(drawn(rank=1, deterministic=True), drawn(deterministic=True))


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {}, {"optimizer": "adam"}])
def test_gradients_may_have_any_memory_layout(options):
    weights = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight, job = torch.zeros(4, 3, 5, 5), Job(backend="torch", **options)
        rule = make_rule(job, [weight])
        for seed in range(2):
            gradient = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
            rule.step([gradient.to(memory_format=layout)], 0.1)
        weights.append(weight)
    assert torch.allclose(*weights, rtol=1e-6)


GROUPS = {
    "sgd": lambda groups, job: torch.optim.SGD(groups, lr=0.1, momentum=job.momentum, nesterov=job.nesterov),
    "adam": lambda groups, job: torch.optim.Adam(groups, lr=0.1),
    "adamw": lambda groups, job: torch.optim.AdamW(groups, lr=0.1),
}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}, {"optimizer": "adam"}, {"optimizer": "adamw"}])
@pytest.mark.parametrize(("patterns", "decayed"), [("*.bias,norm.*", ["a.weight"]), ("a.*", ["norm.weight", "norm.bias"]), ("*", [])])
def test_decay_exceptions_are_parameter_groups(options, patterns, decayed):
    job = Job(backend="torch", weight_decay=0.2, weight_decay_except=patterns, **options)
    draw = torch.Generator().manual_seed(1)
    ours = {name: torch.randn(4, 3, generator=draw) for name in ("a.weight", "a.bias", "norm.weight", "norm.bias")}
    theirs = {name: value.clone().requires_grad_() for name, value in ours.items()}
    groups = [{"params": [theirs[name]], "weight_decay": 0.2 if name in decayed else 0.0} for name in theirs]
    rule, reference = make_rule(job, list(ours.values()), list(ours)), GROUPS[job.optimizer](groups, job)
    for _ in range(5):
        for value in theirs.values():
            value.grad = torch.randn(4, 3, generator=draw)
        rule.step([value.grad.clone() for value in theirs.values()], 0.1)
        reference.step()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-6)


def test_loss_scale():
    scale = precision.LossScale()
    first = scale.scale
    assert first == 2.0**14
    gradients = [torch.full((3,), first), torch.zeros(0)]
    assert scale.unscale(gradients)
    assert gradients[0].tolist() == [1.0] * 3
    for bad in (float("inf"), float("nan")):
        before = scale.scale
        assert not scale.unscale([torch.ones(2), torch.tensor([1.0, bad])])
        assert scale.scale == before / 2
    scale.restore({"loss_scale": 8.0, "clean_steps": 1999.0})
    assert scale.unscale([torch.ones(1)])
    assert scale.scalars == {"loss_scale": 16.0, "clean_steps": 0.0}
    scale.restore({"loss_scale": first, "clean_steps": 1999.0})
    assert scale.unscale([torch.ones(1)])
    assert scale.scalars == {"loss_scale": first, "clean_steps": 0.0}
    scale.restore({"loss_scale": 1.0})
    with pytest.raises(RunFailedError, match="precision fp16: gradients are not finite even at the loss scale 1"):
        scale.unscale([torch.tensor([float("inf")])])


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
        session.close()
    distance = np.linalg.norm(logits["bf16"] - logits["fp32"]) / np.linalg.norm(logits["fp32"])
    assert 1e-5 < distance < 0.03


def test_logits_are_those_that_are_evaluated(monkeypatch):
    monkeypatch.setattr("crosstrain.backends.vectors.EVALUATION_BATCH", 8)
    session, _, data = opened("worker-0", {"model": NORMALISED, "batch_size": 8}, 32, free_ports(1))
    list(session.train(Plan(0, 2, 0, 0, np.full(2, 0.05))))
    logits = np.concatenate([session.predict("test", 0, 11), session.predict("test", 11, 11), session.predict("test", 11, 30)])
    assert logits.shape == (30, 4)
    labels = data.labels("test")
    loss = np.log(np.exp(logits.astype(np.float64)).sum(1)) - logits[np.arange(30), labels]
    evaluation = session.evaluate("test")
    assert evaluation.sums["correct"] == int((logits.argmax(1) == labels).sum())
    assert evaluation.sums["loss_sum"] == pytest.approx(loss.sum(), rel=1e-4)
    session.close()


def test_the_state_stays_in_its_memory():
    session, _, _ = opened("worker-0", {"model": "cnn", "momentum": 0.9, "checkpoint_every": "1epoch"}, 32, free_ports(1))
    first = session.state()
    weight = first.parameters["conv1.weight"]
    before = weight.copy()
    list(session.train(Plan(0, 1, 0, 0, np.array([0.1]))))
    assert np.array_equal(weight, before)
    second = session.state()
    assert np.shares_memory(weight, second.parameters["conv1.weight"])
    assert not np.array_equal(weight, before)
    session.close()


def test_the_rest_of_an_epoch_is_trained():
    """With `skip` a plan's steps are those after the examples that were consumed."""
    losses = []
    for plan in (Plan(0, 1, 0, 2, np.array([0.0])), Plan(0, 1, 0, 0, np.array([0.0]), skip=20)):
        session, _, _ = opened("worker-0", {"model": "cnn", "batch_size": 10}, 32, free_ports(1))
        losses += [loss for result in session.train(plan) for loss in result.losses]
        session.close()
    assert losses[0] == losses[1]


def test_a_few_updates_are_traced(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_PROFILE_DIR", str(tmp_path))
    session, _, _ = opened("worker-0", {"model": "cnn", "batch_size": 10, "profile": 2}, 32, free_ports(1))
    results = list(session.train(Plan(0, 5, 0, 0, np.full(5, 0.1))))
    assert [(result.count, result.profiled) for result in results] == [(2, True), (3, False)]
    session.close()
    (path,) = tmp_path.glob("worker-0.*.pt.trace.json")
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::conv2d") == 4


def test_an_empty_slice_changes_no_buffer():
    session, _, _ = opened("worker-0", {"model": NORMALISED, "batch_size": 8}, 32, free_ports(1))
    model, empty = session._model, Batches(*(np.zeros(size, dtype=np.int32) for size in (0, 2, 1)), np.zeros(1))
    x, y = session._splits["train"].span(0, 0)
    context = model.passes.training(0, empty, 0)
    loss = model.summed_loss(x, y, context)
    gradients = torch.autograd.grad(loss, model.leaves)
    assert float(loss.detach()) == 0.0
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)
    assert not context.updated
    session.close()


def test_ddp_imports_no_compiler_unless_model_does():
    """In another process, since an imported compiler stays loaded."""
    script = (
        "import sys, torch\n"
        "from crosstrain.backends.torch.gradients import compiler_deferred, data_parallel\n"
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2, 4)\n"
        "for _ in range(2):\n"
        "    data_parallel(torch.nn.Linear(4, 4), None)(x).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "class Using(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        import torch._dynamo.config as config\n"
        "        config.suppress_errors = True\n"
        "        assert torch._dynamo.config is config\n"
        "        return torch.compiler.disable(recursive=False)(super().forward)(x)\n"
        "data_parallel(Using(4, 4), None)(x).sum().backward()\n"
        "assert sys.modules['torch._dynamo'] is torch._dynamo and torch._dynamo.__file__\n"
        "with compiler_deferred():\n"
        "    assert torch._dynamo.__file__\n"
        "torch.distributed.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["logreg", ADDED])
def test_scaled_gradients_are_clipped_as_unscaled(name):
    """An update with overflowing gradients changes neither weights nor average, but counts."""
    job, data = Job(backend="torch", model=name, clip_norm=0.01, ema_decay=0.9), Pictures(8)
    spec, weights = load(find("model", name), "model")(data.info), []
    split, whole = data_module.ResidentSplit(data, "train", CPU), Batches.single(12)
    for scaled in (False, True):
        model = Model.initial(job, spec, 0, CPU)
        rule, loss_scale = make_rule(job, model.values), precision.LossScale() if scaled else None
        updater, source = Updater(job, rule, loss_scale), LocalGradients(model, loss_scale, slices=False)
        updater.apply(source.compute_batch(*split.span(0, 12), 1 / 12, model.passes.training(0, whole, 0)), 1.0)
        weights.append([*model.values, *rule.slots["ema"]])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    before, loss_scale.scale = [tensor.clone() for tensor in weights[1]], 2.0**140
    updater.apply(source.compute_batch(*split.span(0, 12), 1.0, model.passes.training(1, whole, 0)), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights[1], strict=True))
    assert (rule.updates, loss_scale.scale, loss_scale.clean_steps) == (2, 2.0**139, 0)


def test_gradients_have_separate_memory():
    """Gradients of a sum, of a view of it, of a concatenation and of a sum of all numbers."""
    a, b, c, d, e, f = leaves = [torch.ones(shape, requires_grad=True) for shape in ((3, 4), (3, 4), (12,), (2,), (2,), (3, 2))]
    weights = torch.arange(12.0).view(3, 4)
    loss = ((a + b + c.view(3, 4)) * weights).sum() + (torch.cat([d, e]) * weights[1]).sum() + f.sum()
    gradients = torch.autograd.grad(loss, leaves)
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) < len(gradients)
    expected, separate = [2.0 * gradient for gradient in gradients], in_separate_memory(gradients)
    torch._foreach_mul_(separate, 2.0)
    assert all(torch.equal(gradient, value) for gradient, value in zip(separate, expected, strict=True))
    assert all(same is original for same, original in zip(in_separate_memory(separate), separate, strict=True))  # nothing is copied in vain


@pytest.mark.parametrize("accumulate", [1, 3])
def test_shared_gradients_are_clipped_and_decay_separately(accumulate):
    def updated(lr, **options):
        options = {"model": ADDED, "batch_size": 12 // accumulate, "accumulate": accumulate, **options}
        session, _, _ = opened("worker-0", options, 8, free_ports(1))
        before = {name: value.astype(float) for name, value in session.state().parameters.items()}
        list(session.train(Plan(0, 1, 0, 0, np.array([lr]))))
        state = session.state()
        session.close()
        return before, state

    before, state = updated(1.0)
    gradient = {name: before[name] - state.parameters[name] for name in before}
    assert np.allclose(gradient["first.weight"], gradient["second.weight"], atol=1e-6)
    assert np.allclose(gradient["first.weight"].ravel(), gradient["flat"], atol=1e-6)
    norm = np.linalg.norm(np.concatenate([value.ravel() for value in gradient.values()]))
    assert norm > 0.1
    before, state = updated(1.0, clip_norm=0.01)
    for name, value in gradient.items():
        assert np.allclose(before[name] - state.parameters[name], value * 0.01 / (norm + 1e-6), atol=1e-6 * norm), name
    before, state = updated(0.0, optimizer="adam", weight_decay=0.5)
    for name, value in gradient.items():
        assert np.allclose(state.slots["first_moment"][name], 0.1 * (value + 0.5 * before[name]), atol=1e-6 * norm), name
    before, state = updated(0.1, momentum=0.9, weight_decay=0.5)
    for name, value in gradient.items():
        assert np.allclose(state.parameters[name], before[name] - 0.1 * (value + 0.5 * before[name]), atol=1e-6 * norm), name


def test_ranks_sum_micro_batches_with_shared_gradients():
    job, data = Job(backend="torch", model=ADDED, batch_size=4, accumulate=3), Pictures(8)
    spec, split, weights = load(find("model", ADDED), "model")(data.info), data_module.ResidentSplit(data, "train", CPU), []
    x, y = split.span(0, 12)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for ranks, parts in ((False, 1), (False, 3), (True, 3)):
            model = Model.initial(job, spec, 0, CPU)
            wrapped = data_parallel(DistributedLoss(model), None) if ranks else None
            source = DdpGradients(model, None, wrapped, 1) if ranks else LocalGradients(model, None, slices=False)
            micro_batches = cut_batch(model, x, y, Batches.single(12), parts)
            Updater(job, make_rule(job, model.values), None).apply(source.compute_micro_batches(micro_batches, parts, 1 / 12), 1.0)
            weights.append(torch.cat([value.flatten() for value in model.values]))
    finally:
        torch.distributed.destroy_process_group()
    whole, alone, by_ranks = weights
    assert torch.allclose(alone, whole, atol=1e-6)
    assert torch.allclose(by_ranks, whole, atol=1e-6)
