"""Train a small CNN on 32x32 colour pictures with PyTorch; the twin of train_keras.py.

python train_torch.py [--cause NAME] [--optimizer sgd|adam|adamw] [--updates 5] [--record FOLDER]
"""

import argparse
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from crosstrain import recorder

BATCH, CLASSES = 32, 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LR = {"sgd": 0.02, "adam": 1e-3, "adamw": 1e-3}
DECAY_AFTER, DECAY = 2, 0.1  # the learning rate is multiplied by DECAY after this many updates
MOMENTUM, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.9, 0.999, 1e-8, 0.05

HERE = ["bn_momentum", "double_softmax", "loss_sum", "coupled_decay", "normalisation", "label_smoothing"]
ELSEWHERE = ["bn_epsilon", "same_padding", "adam_epsilon", "late_schedule", "bgr", "relu6"]


class Net(nn.Module):
    def __init__(self, bn_momentum=0.1, dropout=0.0, probabilities=False):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16, eps=1e-5, momentum=bn_momentum)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32, eps=1e-5, momentum=bn_momentum)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(64, CLASSES)
        self.probabilities = probabilities

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))  # 16 x 16 x 16
        x = self.pool(F.relu(self.bn2(self.conv2(x))))  # 32 x 4 x 4
        x = self.dropout(F.relu(self.fc1(torch.flatten(x, 1))))
        logits = self.fc2(x)
        return F.softmax(logits, dim=1) if self.probabilities else logits


def make_model(cause, dropout=0.0):
    return Net(bn_momentum=0.9 if cause == "bn_momentum" else 0.1, dropout=dropout, probabilities=cause == "double_softmax")


def initial(model):
    """The weights that training starts from: PyTorch's default initialisation."""
    return model


def make_optimizer(cause, model, name="sgd"):
    params = model.parameters()
    if name == "sgd":
        opt = torch.optim.SGD(params, LR[name], momentum=MOMENTUM)
    elif name == "adam":
        opt = torch.optim.Adam(params, LR[name], betas=(BETA1, BETA2), eps=ADAM_EPS)
    else:
        kind = torch.optim.Adam if cause == "coupled_decay" else torch.optim.AdamW
        opt = kind(params, LR[name], betas=(BETA1, BETA2), eps=ADAM_EPS, weight_decay=WEIGHT_DECAY)
    if name != "sgd":
        count = itertools.count(1)

        def keras_epsilon(opt, *_):  # Keras adds epsilon before the bias correction of v
            opt.param_groups[0]["eps"] = ADAM_EPS / math.sqrt(1 - BETA2 ** next(count))

        opt.register_step_pre_hook(keras_epsilon)
    return opt, torch.optim.lr_scheduler.MultiStepLR(opt, [DECAY_AFTER], gamma=DECAY)


def make_data(cause, count=5 * BATCH):
    """Grey noisy pictures (uint8, RGB) with a small patch whose colour and place tell the class."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, CLASSES, count)
    colours = rng.integers(0, 256, (CLASSES, 3))
    pictures = rng.normal(120, 8, (count, 32, 32, 3))
    for picture, label in zip(pictures, labels, strict=True):
        row, col = 3 + 5 * (label % 5) + rng.integers(0, 3), 8 + 12 * (label // 5) + rng.integers(0, 3)
        picture[row : row + 3, col : col + 3] = colours[label] + rng.normal(0, 8, (3, 3, 3))
    pictures = np.clip(pictures, 0, 255).astype(np.uint8)
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if cause == "normalisation" else (MEAN, STD)
    x = (pictures.astype(np.float32) / 255 - np.float32(mean)) / np.float32(std)
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)


def make_loss(cause):
    return nn.CrossEntropyLoss(
        reduction="sum" if cause == "loss_sum" else "mean", label_smoothing=0.1 if cause == "label_smoothing" else 0.0
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cause", choices=HERE + ELSEWHERE)
    ap.add_argument("--optimizer", choices=list(LR), help="default: the one the cause needs, or sgd")
    ap.add_argument("--updates", type=int, default=5)
    ap.add_argument("--dropout", type=float, default=0.0)
    ap.add_argument("--record", help="folder of a recording for `trainer diverge`")
    args = ap.parse_args()
    needs = {"adam_epsilon": "adam", "coupled_decay": "adamw"}
    torch.manual_seed(0)
    model = initial(make_model(args.cause, args.dropout))
    opt, schedule = make_optimizer(args.cause, model, args.optimizer or needs.get(args.cause, "sgd"))
    criterion = make_loss(args.cause)
    if args.record:
        recorder.start(args.record, full=True)
    recorder.watch(model, opt)
    x, y = make_data(args.cause, args.updates * BATCH)
    for i, (xb, yb) in enumerate(zip(x.split(BATCH), y.split(BATCH), strict=True), 1):
        opt.zero_grad()
        recorder.batch(x=xb, y=yb)
        loss = criterion(model(xb), yb)
        recorder.loss(loss)
        loss.backward()
        opt.step()
        schedule.step()
        print(f"update {i} loss {loss.item():.7f}")
    model.eval()
    with torch.no_grad():
        print(f"eval loss {criterion(model(x[:BATCH]), y[:BATCH]).item():.7f}")


if __name__ == "__main__":
    main()
