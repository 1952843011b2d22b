"""The toy backend, which says that it can use GPUs and writes into each task's log which ones it sees; it computes on the CPU all the same.

With GPU_TOY_SEES it says that it computes on what that names, as a framework that was built without CUDA does. Every task says in which
precision it would compute: on a GPU in TF32.
"""

import os
from dataclasses import replace

from crosstrain_toy import ToyBackend

from crosstrain.core.errors import UsageError


class GpuToyBackend(ToyBackend):
    name = "gpu-toy"
    capabilities = replace(ToyBackend.capabilities, devices=frozenset({"cpu", "gpu"}), gpu_install="build it for GPUs")

    def model(self, task, job, spec):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        print(f"{task.name} sees {visible} in order {os.environ.get('CUDA_DEVICE_ORDER')}", flush=True)
        found = os.environ.get("GPU_TOY_SEES") or ("cpu" if visible in (None, "", "-1") else "gpu")
        if job.device == "gpu" and found == "cpu":
            raise UsageError("device: got 'gpu', but gpu-toy finds no GPU here")
        model = super().model(task, job, spec)
        model.device_used = found
        return model

    def open(self, task, job, spec, data):
        opened = super().open(task, job, spec, data)
        opened.precision_used = "fp32 (TF32)" if os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, "", "-1") else "fp32"
        return opened


BACKEND = GpuToyBackend()
