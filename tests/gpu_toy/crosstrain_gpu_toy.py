"""The toy backend with simulated GPUs: it logs which ones each task sees.

It computes on the CPU. With GPU_TOY_SEES it reports that value as its devices, like a framework built without CUDA. Every task logs in
which precision it would compute: on a GPU in TF32.
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
        seen = os.environ.get("GPU_TOY_SEES") or ("cpu" if visible in (None, "", "-1") else "gpu")
        if job.device == "gpu" and seen == "cpu":
            raise UsageError("device: got 'gpu', but gpu-toy finds no GPU here")
        model = super().model(task, job, spec)
        model.device_used = seen
        return model

    def open(self, task, job, spec, data):
        opened = super().open(task, job, spec, data)
        opened.precision_used = "fp32 (TF32)" if os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, "", "-1") else "fp32"
        return opened


BACKEND = GpuToyBackend()
