"""Reshaping, slicing, padding and joining of a cut image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharded.parity import assert_parity

IMAGE = (2, 4, 7, 5)

FLAT: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda x: x.flatten(1),
    "flatten by name": lambda x: torch.flatten(input=x, start_dim=1),
    "view": lambda x: x.view(x.size(0), -1),
    "reshape with a tuple": lambda x: x.reshape((x.shape[0], -1)),
    "image only": lambda x: x.flatten(2),
    "and back": lambda x: x.flatten(1).view(2, 4, 7, 5),
    "unflatten": lambda x: x.flatten(1).unflatten(1, (4, 7, 5)),
    "in activation": lambda x: F.relu(x.flatten(1)) * torch.arange(140.0, dtype=x.dtype, device=x.device),
    "normed": lambda x: F.layer_norm(x.flatten(1), (140,)),
    "summed": lambda x: x.flatten(1).sum(1) + x.view(2, 4, -1).mean(-1).sum(1) + x.flatten(1).amax(1),
    "product": lambda x: F.linear(x.flatten(1), torch.ones(3, 140, dtype=x.dtype, device=x.device) * 0.1),
    "product of maps": lambda x: F.linear(x.flatten(2), torch.ones(3, 35, dtype=x.dtype, device=x.device) * 0.1),
    "one pixel": lambda x: F.avg_pool2d(x, x.shape[2:]).view(x.size(0), -1) + F.max_pool2d(x, (7, 5)).flatten(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).mean(1),
    "rows of all channels": lambda x: x.flatten(1, 2),
    "rows of all channels, scaled": lambda x: x.flatten(1, 2) * torch.arange(5.0, dtype=x.dtype, device=x.device),
    "columns of all channels": lambda x: x.permute(0, 2, 1, 3).flatten(2),
}
DIMS: dict[str, Callable[[Tensor], Any]] = {
    "groups of channels": lambda x: x.view(2, 2, 2, 7, 5).transpose(1, 2).reshape(2, 4, 7, 5),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "ones": lambda x: x.view(2, 1, 4, 7, 1, 5).squeeze(1).squeeze(),
    "unsqueeze, squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(-1).squeeze(1),
    "squeeze of a channel": lambda x: x[:, :1].squeeze(1),
    "squeeze of a pixel": lambda x: F.avg_pool2d(x, (7, 5)).squeeze(-1).squeeze(-1),
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, -1, 1, 2),
    "moved": lambda x: torch.movedim(x, 1, -1) * 2,
    "transposed": lambda x: x.transpose(-1, -2),
    "transposed, pooled": lambda x: F.max_pool2d(x.transpose(2, 3), 2),
    "transposed, convolved": lambda x: F.conv2d(
        x.transpose(2, 3), torch.ones(1, 4, 3, 3, dtype=x.dtype, device=x.device)
    ),
    "transposed, interpolated": lambda x: F.interpolate(x.swapaxes(2, 3), scale_factor=2),
    "transposed, padded": lambda x: F.pad(x.transpose(2, 3), (1, 2), value=2.0),
    "transposed, flattened": lambda x: x.transpose(2, 3).flatten(1),
    "transposed, normalised": lambda x: F.batch_norm(x.transpose(2, 3), None, None, training=True),
    "channels last, cropped": lambda x: x.permute(0, 2, 3, 1)[:, 1:-1, ::2, :3],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1) + x[:, :1].expand(2, 3, 7, 5),
}
SLICES: dict[str, Callable[[Tensor], Any]] = {
    "crop": lambda x: x[:, :, 1:-1, 2:],
    "crop of columns": lambda x: x[..., 1:4],
    "crop of rows": lambda x: x[:, :, 2:],
    "one pixel": lambda x: x[:, :, 3:4, 2:3],
    "every second row": lambda x: x[:, :, ::2, 1::3],
    "space to depth": lambda x: torch.cat([x[:, :, :-1:2, :4:2], x[:, :, 1::2, 1::2][:, :, :, :2]], 1),
    "channels": lambda x: [x[:, 0], x[:, -1:], x[:, ::2], x.select(1, 2)],
    "samples": lambda x: [x[0], x[:1], x[-1]],
    "new dims": lambda x: x[:, None, 1, :, None],
    "narrow": lambda x: torch.narrow(x, -1, 1, 3) + x.narrow(3, -4, 3),
    "chunks": lambda x: [*x.chunk(3, 1), *x.chunk(2, 2), *x.unbind(1)],
    "splits": lambda x: [*x.split(2, -1), *torch.split(x, [1, 3], dim=1), *torch.split(x, 3, dim=2)],
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2], device=x.device)),
    "total variation": lambda x: (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + x[..., 1:].sub(x[..., :-1]).square().sum(),
    "rolled": lambda x: x.roll(2, 2) + torch.roll(x, (-1, 3, 1), (3, 2, 1)) + x.flip(1),
}
BORDERS: dict[str, Callable[[Tensor], Any]] = {
    "zeros": lambda x: F.pad(x, (1, 2, 3, 0)),
    "a value, by name": lambda x: F.pad(input=x, pad=(1, 2), value=3.0),
    "reflect": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "replicate": lambda x: F.pad(x, (3, 2, 3, 4), "replicate"),
    "circular": lambda x: F.pad(x, (1, 2, 3, 0), mode="circular"),
    "negative": lambda x: F.pad(x, (-1, -2, 1, -1)),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)) + F.pad(x, (1, -1, 0, 0, 2, 0)),
    "layers": lambda x: nn.ReflectionPad2d(2)(nn.ZeroPad2d((1, 0, 0, 2))(nn.ReplicationPad2d(1)(x))),
}
JOINTS: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat, counted from the end": lambda x: torch.cat(tensors=(x, x * 2, x), dim=-3),
    "cat along an axis": lambda x: torch.cat([x, x], axis=1),
    "cat of batches": lambda x: torch.concat([x, x * 3]),
    "cat with a whole tensor": lambda x: torch.cat([x, torch.ones(2, 1, 7, 5, dtype=x.dtype, device=x.device)], 1),
    "stack": lambda x: torch.stack([x, x * 2], 1) * torch.stack([x, x], dim=-4),
    "stack behind": lambda x: torch.stack([x, x * 2], -1).amax(-1),
}


@pytest.mark.parametrize(
    "function",
    [f for family in (FLAT, DIMS, SLICES, BORDERS, JOINTS) for f in family.values()],
    ids=[name for family in (FLAT, DIMS, SLICES, BORDERS, JOINTS) for name in family],
)
def test_the_result_equals_one_rank(function):
    assert_parity(function, IMAGE, (2, 3))


@pytest.mark.parametrize("function", [SLICES["crop"], BORDERS["reflect"], FLAT["image only"], SLICES["rolled"]])
def test_in_one_row_of_many_ranks(function):
    assert_parity(function, IMAGE, (1, 4))
    assert_parity(function, IMAGE, (4, 1))


def test_a_skip_is_cropped_to_what_is_left_and_joined():
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(4, 5, 3, stride=2), nn.ConvTranspose2d(5, 4, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(F.relu(self.down(x)))
            lost = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
            cropped = x[:, :, lost[0] // 2 : lost[0] // 2 + y.shape[2], lost[1] // 2 : lost[1] // 2 + y.shape[3]]
            return torch.cat([y, cropped], 1)

    assert_parity(UNet(), (2, 4, 12, 9), (2, 2))


class Focus(nn.Module):
    """Every second pixel becomes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        quarters = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
        return self.conv(torch.cat(quarters, 1))


class Pyramid(nn.Module):
    """Dilated convolutions beside a global pool that is spread over the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, 3, 3, padding=d, dilation=d) for d in (1, 2, 6))
        self.pooled, self.out = nn.Conv2d(4, 3, 1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        everywhere = F.interpolate(self.pooled(F.adaptive_avg_pool2d(x, 1)), size=x.shape[2:], mode="bilinear")
        return self.out(torch.cat([*(branch(x) for branch in self.branches), everywhere], 1))


class Attention(nn.Module):
    """Gates of pixels from the mean and the maximum over channels, of channels from those over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 1, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pixels = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        channels = self.linear(x.mean((2, 3))) + self.linear(x.amax((2, 3)))
        return x * torch.sigmoid(self.conv(pixels)) * torch.sigmoid(channels)[:, :, None, None]


@pytest.mark.parametrize("grid", [(2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("block", [Focus, Pyramid, Attention])
def test_blocks_of_known_networks(block, grid):
    assert_parity(block(), (2, 4, 12, 8), grid)
