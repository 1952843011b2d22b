"""Images and target tokens per second on a GPU, in bf16, where torch finds one. Pure data."""

from __future__ import annotations

from dataclasses import replace

from ..contestants import Contestant, Ours, Peer, Row
from ..workload import Work
from .translation import BASE

DATA = "synthetic-images:size=224,classes=1000,train=4096,test=256"

ALEXNET = Work("alexnet", DATA, 512, 0.01, warmup=40, momentum=0.9, precision="bf16", fewest_steps=40)

RESNET18 = Work("resnet18", DATA, 256, 0.01, warmup=40, momentum=0.9, precision="bf16", fewest_steps=40)

OPTIONS = ("--device", "gpu", "--no-save-final")

BIG = replace(BASE, model="transformer:big", batch_tokens=16_384, precision="bf16", warmup=40, fewest_steps=40, most_repeats=None)

CONTESTANTS: dict[str, Contestant] = {
    "Transformer big on the GPU": Ours("GPU, Transformer", "torch", "sync", 1, 200, (*OPTIONS, "--steps-per-call", "20"), BIG, gpu=True),
    "the Transformer's products alone": Peer(
        "GPU, Transformer", "gpu/torch_gpu_ceiling.py", "Transformer big on the GPU", 100, losses="none", gpu=True
    ),
    "AlexNet on the GPU": Ours("GPU, AlexNet", "torch", "sync", 1, 1600, OPTIONS, ALEXNET, gpu=True),
    "AlexNet on the GPU, loop": Peer("GPU, AlexNet", "gpu/torch_gpu.py", "AlexNet on the GPU", 1600, losses="level", gpu=True),
    "AlexNet's products alone": Peer("GPU, AlexNet", "gpu/torch_gpu_ceiling.py", "AlexNet on the GPU", 800, losses="none", gpu=True),
    "ResNet-18 on the GPU": Ours("GPU, ResNet-18", "torch", "sync", 1, 1600, OPTIONS, RESNET18, gpu=True),
    "ResNet-18 on the GPU, loop": Peer("GPU, ResNet-18", "gpu/torch_gpu.py", "ResNet-18 on the GPU", 1600, losses="level", gpu=True),
    "ResNet-18's products alone": Peer("GPU, ResNet-18", "gpu/torch_gpu_ceiling.py", "ResNet-18 on the GPU", 800, losses="none", gpu=True),
}

ROWS: dict[str, Row] = {
    "gpu-transformer": Row("Transformer big on the GPU", None, "target_tokens_per_second"),
    "gpu-transformer-ceiling": Row("Transformer big on the GPU", "the Transformer's products alone", "target_tokens_per_second"),
    "gpu-alexnet": Row("AlexNet on the GPU", "AlexNet on the GPU, loop", "examples_per_second", 0.97),
    "gpu-alexnet-ceiling": Row("AlexNet on the GPU", "AlexNet's products alone", "examples_per_second"),
    "gpu-resnet18": Row("ResNet-18 on the GPU", "ResNet-18 on the GPU, loop", "examples_per_second", 0.97),
    "gpu-resnet18-ceiling": Row("ResNet-18 on the GPU", "ResNet-18's products alone", "examples_per_second"),
}
