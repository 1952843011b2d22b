"""Tasks of the TensorFlow backend that train image models, as processes of their own; started by test_tf_images.py.

They do what torch_image_tasks.py does; see there for the arguments and the scenario.
"""

import json
import os
import sys
from pathlib import Path

import torch_image_tasks as tasks
from tf_tasks import make_cluster
from torch_tasks import task_of

from crosstrain.backends.tf import BACKEND
from crosstrain.core.job import Job
from crosstrain.core.plugins import find, load


def opened(name, options, side, first_port):
    """Return (session or server, job, data)."""
    job, data = Job(backend="tf", **options), tasks.Pictures(side)
    spec = load(find("model", job.model), "model")(data.info)
    BACKEND.preload(job)
    return BACKEND.open(task_of(make_cluster(job, first_port), name), job, spec, data), job, data


def main(kind, who, path):
    described, beside = json.loads(Path(path).read_text()), Path(path).parent
    if kind == "rank":
        tasks.sync_main(int(who), described, beside)
    else:
        tasks.async_main(who, described, beside)


if __name__ == "__main__":
    tasks.opened = opened
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001 — reported, and the process left without TensorFlow's exit handlers
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # as a task ends: TensorFlow's own exit handlers may wait for peers that are gone
