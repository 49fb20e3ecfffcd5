"""Segment images that are cut over ranks: a U-Net on a grid of tiles, halos exchanged in every layer.

    mpiexec -n 2 python examples/unet_large_image.py                    # 1024x1024 images, 2x1 tiles
    mpiexec -n 4 python examples/unet_large_image.py --grid 2x2
    python examples/unet_large_image.py --quick                         # one process, small images

The model is an ordinary torch.nn.Module; one line cuts it over the grid. Losses do not depend on the grid, but for
what rounding does to their last digits. The picture shows input, truth, prediction and the borders of the tiles.
"""

from __future__ import annotations

import argparse
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import torchmn
from torchmn.geometry import owned


def block(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)),
        *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """Two levels down, two up, with skip connections, written for one process."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = block(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.bottom(self.pool(second))
        x = self.up2(torch.cat([self.rise2(x), second], dim=1))
        x = self.up1(torch.cat([self.rise1(x), first], dim=1))
        return self.out(x)


class Blobs:
    """Images of soft blobs under noise, made from their number: rows (of a slice) can be made without the rest."""

    def __init__(self, size: int):
        self.size = size

    def tile(self, number: int, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """(1, height, width) of the noisy image and of the truth."""
        random = np.random.default_rng(number)
        y, x = np.mgrid[rows, columns].astype(np.float32) / self.size
        truth = np.zeros(y.shape, dtype=bool)
        for cy, cx, radius in zip(random.random(12), random.random(12), random.uniform(0.03, 0.12, 12), strict=True):
            truth |= (y - cy) ** 2 + (x - cx) ** 2 < radius**2
        # The noise of a row depends on the row alone, so that every grid sees the same image.
        noise = np.stack([_row_of_noise(number, row, self.size)[columns] for row in range(rows.start, rows.stop)])
        image = truth + 0.8 * noise
        return torch.from_numpy(image.astype(np.float32))[None], torch.from_numpy(truth.astype(np.float32))[None]


def _row_of_noise(number: int, row: int, size: int) -> np.ndarray:
    return np.random.default_rng((number, row)).standard_normal(size)


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    height, width = (int(parts) for parts in options.grid.split("x"))
    grid = torchmn.ProcessGrid(comm, height=height, width=width)
    torch.manual_seed(options.seed)
    model = torchmn.parallelize(UNet(options.width), grid, "halopar", output="tile")
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), grid, model=model)

    rows = owned(options.size, height, grid.place["height"]).as_slice()
    columns = owned(options.size, width, grid.place["width"]).as_slice()
    images = Blobs(options.size)
    with torchmn.training.Logger(comm, options.steps, json=options.out / "log.jsonl") as log:
        log.print(f"images of {options.size}x{options.size}, {height}x{width} tiles on {comm.size} rank(s)")
        total = 0.0
        for step in range(options.steps):
            x, truth = images.tile(step, rows, columns)
            optimizer.zero_grad()
            per_pixel = binary_cross_entropy_with_logits(model(x[None]), truth[None], reduction="none")
            loss = torchmn.functions.global_mean(per_pixel, grid)
            loss.backward()
            optimizer.step()
            log.step(loss=loss)
            total += loss.item()
        log.epoch(epoch=1, loss=total / options.steps)
        report(model, images, rows, columns, grid, options, log)


@torch.no_grad()
def report(
    model: nn.Module,
    images: Blobs,
    rows: slice,
    columns: slice,
    grid: torchmn.ProcessGrid,
    options: argparse.Namespace,
    log: torchmn.training.Logger,
) -> None:
    """Pixels that are right in an image that was not trained on, and a picture of it."""
    model.eval()
    x, truth = images.tile(10**6, rows, columns)
    logits = model(x[None])[0]
    right = torchmn.functions.global_mean(((logits > 0) == (truth > 0)).float(), grid)
    log.print(f"pixels right: {right.item():.2%}")
    layers = grid.comm.gather(torch.cat([x, truth, logits]))
    if layers is not None:
        picture(layers, grid, options.out / "unet.png")
        log.print(f"picture: {options.out / 'unet.png'}")


def picture(tiles: tuple[Tensor, ...], grid: torchmn.ProcessGrid, path: Path) -> None:
    """Input, truth and prediction side by side, with the borders of the tiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = grid.sizes["width"]
    lines = [torch.cat(tiles[first : first + across], dim=2) for first in range(0, len(tiles), across)]
    whole = torch.cat(lines, dim=1)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
    shown = {"input": whole[0], "truth": whole[1], "prediction": whole[2].sigmoid()}
    for axis, (name, values) in zip(axes, shown.items(), strict=True):
        axis.imshow(values.numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name)
        axis.set_axis_off()
        for row in accumulate(line.shape[1] for line in lines[:-1]):
            axis.axhline(row - 0.5, color="tab:orange", linewidth=1)
        for column in accumulate(tile.shape[2] for tile in tiles[: across - 1]):
            axis.axvline(column - 0.5, color="tab:orange", linewidth=1)
    figure.suptitle(f"{grid.sizes['height']}x{across} tiles")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net on images that are cut over ranks.")
    parser.add_argument("--grid", help="tiles, rows x columns: 2x1; all ranks in one column without it")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of an image")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=8, help="channels of the first level")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("--out", type=Path, default=Path("result"), help="folder for the log and the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="images of 96x96, 12 steps")
    options = parser.parse_args()
    if options.quick:
        options.size, options.steps, options.width = min(options.size, 96), min(options.steps, 12), 4

    with torchmn.create_communicator(options.communicator) as comm:
        options.grid = options.grid or f"{comm.size}x1"
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
