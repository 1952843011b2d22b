"""Networks for small images and for rows of a table, as people write them: torch alone."""

from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Net(nn.Module):
    def __init__(self, channels=3, classes=10, width=16, dropout=0.2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        features = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return self.head(self.dropout(features))


class Table(nn.Module):
    """One number from each row of table.csv: four numbers, and four kinds of homes as 0 and 1."""

    def __init__(self, features=8, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)
