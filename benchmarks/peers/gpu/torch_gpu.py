"""A hand-written torch loop on a GPU: torchvision's model, channels last, bf16, fused SGD.

bf16 is by autocast, and nothing waits for the device. Pixels are on the device as uint8 and are normalised batch by batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torchvision
from torch.nn.functional import cross_entropy
from workload import Timer, read_workload


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    device = torch.device("cuda")
    torch.manual_seed(work.seed)  # dropout
    torch.backends.cudnn.benchmark = True
    images, labels = torch.from_numpy(np.array(work.images)).to(device), torch.from_numpy(work.labels).to(device)
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (work.data.info.mean, work.data.info.std))
    model = torchvision.models.get_model(work.spec.name, num_classes=work.spec.classes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(work.initial[name]))
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate, momentum=work.momentum, fused=True)
    batches = torch.from_numpy(work.order()).to(device, torch.int64).unbind()
    losses = []

    def run(begin: int, end: int) -> None:
        for batch in batches[begin:end]:
            pixels = images.index_select(0, batch).to(torch.float32, memory_format=torch.channels_last)
            inputs = pixels.div_(255).sub_(mean).div_(std)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(inputs)
            loss = cross_entropy(logits.float(), labels.index_select(0, batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.cuda.synchronize()

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, torch.stack(losses).cpu().numpy())


main()
