"""ResNet-50 of any width, as in torchvision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, and the residual."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or channels != 4 * width:
            shortcut = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class ResNet50(nn.Module):
    """53 convolutions with their norms.

    Args:
        width: channels of the first convolution; 64 in the paper.
    """

    def __init__(self, width: int = 64):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and number == 0 else 1))
                channels = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.blocks(x)), 1))
