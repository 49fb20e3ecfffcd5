"""Small models without any code for parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """Functional pools, a view, dropout between Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 40), nn.Linear(40, 20), nn.Linear(20, 10)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        x = self.dropout(F.relu(self.fc1(x)))
        return self.fc3(F.relu(self.fc2(x)))


def vgg() -> nn.Module:
    """Pairs of 3x3 convolutions with batch norm, an adaptive 3x3 pool, two Linears with dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (6, 8):
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(8 * 9, 16), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(16, 10)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), *head)


class Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    """The 7x7/2 stem, the 3x3/2 max pool, four stages of two blocks, a global pool; narrow."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, width + 2, width + 4, width + 6]
        stages = zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        self.layers = nn.Sequential(
            *(nn.Sequential(Residual(a, b, stride), Residual(b, b, 1)) for a, b, stride in stages)
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class UNet(nn.Module):
    """Two levels down and up again: skips, transposed convolutions, one class per pixel."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.down1, self.down2, self.bottom = self._block(2, 4), self._block(4, 6), self._block(6, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1)
        self.join2, self.join1 = self._block(12, 6), self._block(8, 4)
        self.head = nn.Conv2d(4, classes, 1)

    @staticmethod
    def _block(channels: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.LeakyReLU(0.1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = self.bottom(F.avg_pool2d(second, 2))
        y = self.join2(torch.cat([self.up2(y), second], dim=1))
        y = self.join1(torch.cat([self.up1(y), first], dim=1))
        return self.head(y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 2000), nn.ReLU(), nn.Linear(2000, 10))
