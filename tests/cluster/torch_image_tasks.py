"""Processes of torch tasks that train image models; started by test_torch_images.py.

``python torch_image_tasks.py rank RANK SCENARIO.json``: a sync rank; the scenario has the first and last step of each job.
``python torch_image_tasks.py task NAME SCENARIO.json``: a task of an async job.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np
from torch_tasks import make_cluster, task_of

from crosstrain.backends.base import Plan, State, make_sampler
from crosstrain.backends.torch import BACKEND
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, load
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.columns import Column


class Pictures:
    """60 training and 30 test images of 3 × `side` × `side` pixels in four classes.

    Noise about a level that depends on the class.
    """

    def __init__(self, side, mean=(0.4, 0.5, 0.6)):
        self.info = DataInfo.of_images("pictures", {"train": 60, "test": 30}, ImageFeatures((3, side, side), 4, mean, (0.2, 0.25, 0.3)))
        draw = np.random.default_rng(11)
        self._labels = {split: draw.integers(0, 4, size) for split, size in self.info.sizes.items()}
        self._images = {
            split: (draw.integers(0, 128, (len(labels), 3, side, side)) + 40 * labels[:, None, None, None]).astype(np.uint8)
            for split, labels in self._labels.items()
        }

    def images(self, split):
        return self._images[split]

    def labels(self, split):
        return self._labels[split]

    def column(self, split, name):
        return Column({"image": self._images, "label": self._labels}[name][split])

    def inputs(self, split):
        mean, std = (np.array(values).reshape(3, 1, 1) for values in (self.info.mean, self.info.std))
        return ((self._images[split] / 255.0 - mean) / std).astype(np.float32)


def opened(name, options, side, first_port):
    """Return (session or server, job, data)."""
    job, data = Job(backend="torch", **options), Pictures(side)
    spec = load(find("model", job.model), "model")(data.info)
    return BACKEND.open(task_of(make_cluster(job, first_port), name), job, spec, data), job, data


def flat(state):
    """A state as arrays for np.savez."""
    kinds = {"parameters": state.parameters, "buffers": state.buffers, **{f"slots/{slot}": values for slot, values in state.slots.items()}}
    arrays = {f"{kind}/{name}": value for kind, values in kinds.items() for name, value in values.items()}
    return {**arrays, "updates": np.array(state.updates)}


def read(path):
    """A state from what `flat` made, in read-only arrays."""
    with np.load(path) as arrays:
        parts = {"parameters": {}, "buffers": {}}
        for key in arrays.files:
            kind, _, name = key.rpartition("/")
            if kind:
                parts.setdefault(kind, {})[name] = arrays[key]
                found_array = parts[kind][name]
                found_array.flags.writeable = False
        slots = {kind.removeprefix("slots/"): values for kind, values in parts.items() if kind.startswith("slots/")}
        return State(parts["parameters"], slots, int(arrays["updates"]), parts["buffers"])


def steps(session, job, data, first, stop):
    """Train the steps first … stop − 1 of the run; every step is a plan of its own."""
    sampler, losses = make_sampler(job, data), []
    for step in range(first, stop):
        epoch, within = divmod(step, sampler.steps_per_epoch)
        results = [*session.train(Plan(step, 1, epoch, within, np.array([job.lr]))), *session.drain()]
        losses += [loss for result in results for loss in result.losses]
    return np.array(losses, dtype=np.float32)


def run_rank(rank, folder, name, job_options, first_port, phase):
    """Phase whole: train to step 3, store the state, train to step 7.

    Phase resumed: load that state, train the rest.
    """
    side = job_options.pop("side")
    session, job, data = opened(f"worker-{rank}", job_options, side, first_port)
    middle = folder / f"{name}-middle.npz"
    if phase == "whole":
        before = steps(session, job, data, 0, 3)
        kept = session.state()
        if rank == 0:
            np.savez(middle, **flat(kept))
            np.savez(folder / f"{name}-before.npz", losses=before)
    else:
        session.load(read(middle) if rank == 0 else None)
    losses = steps(session, job, data, 3, 7)
    evaluation = session.evaluate("test")
    end = session.state()
    if rank == 0:
        np.savez(
            folder / f"{name}-{phase}.npz",
            losses=losses,
            evaluated=[evaluation.examples, evaluation.sums["loss_sum"], evaluation.sums["correct"]],
            **flat(end),
        )
    session.close()


def sync_main(rank, scenario, folder):
    for position, (name, options) in enumerate(scenario["jobs"].items()):
        if rank < options["nodes"]:
            run_rank(rank, folder, name, dict(options), scenario["port"] + 5 * position, scenario["phase"])


def async_main(name, scenario, folder):
    session, job, data = opened(name, {**scenario["options"], "mode": "async"}, scenario["side"], scenario["port"])
    if name != "chief-0":
        return session.serve(threading.Event())
    np.savez(folder / "initial.npz", **flat(session.state()))
    sampler, count = make_sampler(job, data), scenario["updates"]
    results, step = [], 0
    while step < count:
        epoch, within = divmod(step, sampler.steps_per_epoch)
        length = min(count - step, sampler.steps_per_epoch - within)
        results += session.train(Plan(step, length, epoch, within, np.full(length, job.lr)))
        step += length
    results += session.drain()
    covered = sorted(result.first_step + place for result in results for place in range(result.count))
    losses = np.concatenate([result.losses for result in sorted(results, key=lambda result: result.first_step)])
    evaluation, state = session.evaluate("test"), session.state()
    np.savez(folder / "trained.npz", **flat(state))
    trained = read(folder / "trained.npz")
    session.load(read(folder / "initial.npz"))
    np.savez(folder / "back.npz", **flat(session.state()))
    session.load(State(trained.parameters, {}, trained.updates, trained.buffers))
    np.savez(folder / "without-slots.npz", **flat(session.state()))
    again = session.evaluate("test")
    figures = {
        "losses": losses.tolist(),
        "covered": covered,
        "evaluated": [evaluation.examples, evaluation.sums["loss_sum"], evaluation.sums["correct"]],
    }
    (folder / "figures.json").write_text(json.dumps({**figures, "again": [again.examples, again.sums["loss_sum"], again.sums["correct"]]}))
    return session.close()


if __name__ == "__main__":
    kind, who, path = sys.argv[1:]
    described, folder = json.loads(Path(path).read_text()), Path(path).parent
    sync_main(int(who), described, folder) if kind == "rank" else async_main(who, described, folder)
