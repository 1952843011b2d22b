"""A hand-written torch loop for AlexNet: torchvision's model, channels last, fused SGD.

With momentum; bf16 is by autocast. Pixels stay uint8 in memory and are normalised batch by batch, as for images that do not fit as float32.
"""

from __future__ import annotations

import warnings

import torch
import torchvision
from torch.nn.functional import cross_entropy
from workload import Timer, read_workload


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)  # dropout
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    images, labels = torch.from_numpy(work.images_channels_last), torch.from_numpy(work.labels)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (work.data.info.mean, work.data.info.std))
    model = torchvision.models.alexnet(num_classes=work.spec.classes)
    model.load_state_dict({name: torch.from_numpy(values) for name, values in work.initial.items()})
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate, momentum=work.momentum, fused=True)
    batches = torch.from_numpy(work.order()).to(torch.int64).unbind()
    low, losses = work.precision == "bf16", []

    def run(begin: int, end: int) -> None:
        for batch in batches[begin:end]:
            pixels = images.index_select(0, batch).permute(0, 3, 1, 2).to(torch.float32)
            inputs = pixels.div_(255).sub_(mean).div_(std)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                logits = model(inputs)
            loss = cross_entropy(logits.float(), labels.index_select(0, batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, torch.stack(losses).numpy())


main()
