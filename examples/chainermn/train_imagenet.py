"""Train a convnet on ImageNet, data parallel: only rank 0 reads the lists, each rank reads its own images.

    mpiexec -n 4 python examples/chainermn/train_imagenet.py train.txt val.txt -a resnet50 -R images -j 4

The lists have lines `path label`, with paths relative to --root. -B is the batch of *each* rank, as in ChainerMN.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- `create_multi_node_optimizer` comes after the model is on its device, and takes its parameters: no `setup`
- `MultiprocessIterator` is a DataLoader with workers; forkserver is asked for there, and needs no dummy process
- the trainer is a loop: `optimizer.step()`, and calls of the evaluator, the checkpointer and the log
- CPUs work, too; `nin`, `alex` and `resnet50` are here, the other networks are not
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import torchmn as chainermn

# -- networks; `scale` makes them narrower, and `insize` is the size of the images they take ----------------------


def convolution(out: int, size: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.LazyConv2d(out, size, stride, padding), nn.ReLU()]


def nin(classes: int, scale: float) -> nn.Module:
    """Network in network."""
    layers: list[nn.Module] = []
    for out, size, stride, padding in ((96, 11, 4, 0), (256, 5, 1, 2), (384, 3, 1, 1), (1024, 3, 1, 1)):
        channels = max(1, int(out * scale))
        layers += convolution(channels, size, stride, padding) + 2 * convolution(channels, 1)
        layers += [nn.MaxPool2d(3, 2, ceil_mode=True)] if out < 1024 else []
    return nn.Sequential(*layers, nn.Dropout(), *convolution(classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def alex(classes: int, scale: float) -> nn.Module:
    """AlexNet, on one device."""
    wide = [max(1, int(out * scale)) for out in (96, 256, 384, 384, 256, 4096, 4096)]
    return nn.Sequential(
        *convolution(wide[0], 11, 4), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        *convolution(wide[1], 5, 1, 2), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        *convolution(wide[2], 3, 1, 1), *convolution(wide[3], 3, 1, 1), *convolution(wide[4], 3, 1, 1),
        nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.LazyLinear(wide[5]), nn.ReLU(), nn.Dropout(), nn.LazyLinear(wide[6]), nn.ReLU(), nn.Dropout(),
        nn.LazyLinear(classes),
    )  # fmt: skip


class Bottleneck(nn.Module):
    """A block of ResNet: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inner: int, stride: int, projects: bool):
        super().__init__()
        layers: list[nn.Module] = []
        for out, size, step in ((inner, 1, stride), (inner, 3, 1), (4 * inner, 1, 1)):
            layers += [nn.LazyConv2d(out, size, step, size // 2, bias=False), nn.LazyBatchNorm2d(), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Identity()
        if projects:
            self.shortcut = nn.Sequential(nn.LazyConv2d(4 * inner, 1, stride, bias=False), nn.LazyBatchNorm2d())

    def forward(self, x: Tensor) -> Tensor:
        return (self.residual(x) + self.shortcut(x)).relu()


def resnet50(classes: int, scale: float) -> nn.Module:
    width = max(1, int(64 * scale))
    layers: list[nn.Module] = [nn.LazyConv2d(width, 7, 2, 3, bias=False), nn.LazyBatchNorm2d(), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers += [Bottleneck(width << stage, 2 if stage and block == 0 else 1, projects=block == 0)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(classes))


ARCHS = {"alex": alex, "nin": nin, "resnet50": resnet50}
INSIZE = {"alex": 227, "nin": 227, "resnet50": 224}


# -- data ----------------------------------------------------------------------------------------------------------


class PreprocessedDataset(Dataset):
    """Images of a list, cropped (at random, and mirrored at random, or at the centre), minus the mean, in [-1, 1]."""

    def __init__(self, lines: Any, root: str, mean: np.ndarray | float, crop_size: int, at_random: bool = True):
        words = [lines[number].rsplit(maxsplit=1) for number in range(len(lines))]
        self.pairs = [(path, int(label)) for path, label in words]
        self.root, self.mean, self.crop_size, self.at_random = root, mean, crop_size, at_random

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.pairs[index]
        with Image.open(Path(self.root, path)) as picture:
            image = np.asarray(picture.convert("RGB"), np.float32).transpose(2, 0, 1)
        spare_rows, spare_columns = image.shape[1] - self.crop_size, image.shape[2] - self.crop_size
        top, left = spare_rows // 2, spare_columns // 2
        mirrored = False
        if self.at_random:
            top, left = random.randint(0, spare_rows), random.randint(0, spare_columns)
            mirrored = random.random() < 0.5
        image = (image - self.mean)[:, top : top + self.crop_size, left : left + self.crop_size] / 255
        return torch.from_numpy(image[:, :, ::-1].copy() if mirrored else image), label


def lines_of(path: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if line.strip()]


# -- evaluation ------------------------------------------------------------------------------------------------------


class TestModeEvaluator:
    """An evaluator of one process; `create_multi_node_evaluator` takes any object with a method `evaluate`."""

    __test__ = False  # it is no test of pytest

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device

    @torch.no_grad()
    def evaluate(self, loader: DataLoader) -> dict[str, float]:
        self.model.eval()
        loss, correct, images = 0.0, 0, 0
        for x, t in loader:
            y, t = self.model(x.to(self.device)), t.to(self.device)
            loss += cross_entropy(y, t, reduction="sum").item()
            correct += int((y.argmax(dim=1) == t).sum())
            images += len(t)
        self.model.train()
        return {"loss": loss / images, "accuracy": correct / images}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a convnet from ImageNet on all ranks.")
    parser.add_argument("train", help="list of training images: lines `path label`")
    parser.add_argument("val", help="list of validation images")
    parser.add_argument("--arch", "-a", choices=ARCHS, default="nin")
    parser.add_argument("--batchsize", "-B", type=int, default=32, help="images per step on each rank")
    parser.add_argument("--epoch", "-E", type=int, default=10)
    parser.add_argument("--initmodel", help="a state_dict with which to begin")
    parser.add_argument("--loaderjob", "-j", type=int, default=0, help="processes that load images, on each rank")
    parser.add_argument("--mean", "-m", help="a file of NumPy with the mean image; 128 without it")
    parser.add_argument("--resume", "-r", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--out", "-o", default="result")
    parser.add_argument("--root", "-R", default=".", help="folder of the images")
    parser.add_argument("--val_batchsize", "-b", type=int, default=250)
    parser.add_argument("--test", action="store_true", help="a narrow network, and a log of every step")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    log = chainermn.training.Logger(comm, json=Path(args.out, "log.jsonl"), json_steps=int(args.test))
    log.print(f"{comm.size} rank(s), {args.arch}, {args.batchsize} images per step on each, {args.epoch} epochs")

    insize = INSIZE[args.arch]
    mean = np.load(args.mean)[:, :insize, :insize].mean((1, 2), keepdims=True) if args.mean else 128.0
    paths = {"train": args.train, "val": args.val}
    lines = {part: lines_of(path) if comm.rank == 0 else None for part, path in paths.items()}
    # Only rank 0 reads the lists. Scattering the lines, and not the data sets, scatters paths and no images.
    train_lines = chainermn.scatter_dataset(lines["train"], comm, shuffle=True, seed=0)
    val_lines = chainermn.scatter_dataset(lines["val"], comm, force_equal_length=False)
    train = PreprocessedDataset(train_lines, args.root, mean, insize)
    val = PreprocessedDataset(val_lines, args.root, mean, insize, at_random=False)
    classes = comm.allreduce_obj(1 + max(label for _, label in train.pairs + val.pairs), max)
    workers = {"num_workers": args.loaderjob, "multiprocessing_context": "forkserver" if args.loaderjob else None}
    train_loader = DataLoader(train, args.batchsize, shuffle=True, drop_last=len(train) >= args.batchsize, **workers)
    val_loader = DataLoader(val, args.val_batchsize, **workers)

    model = ARCHS[args.arch](classes, 1 / 16 if args.test else 1.0).to(comm.device)
    if args.initmodel:
        model.load_state_dict(torch.load(args.initmodel))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = chainermn.create_multi_node_optimizer(sgd, comm, model=model)
    with torch.no_grad():  # lazy layers get their shapes, which a checkpoint needs
        model.eval()(torch.zeros(1, 3, insize, insize).to(comm.device))
    model.train()

    evaluator = chainermn.create_multi_node_evaluator(TestModeEvaluator(model, comm.device), comm)
    checkpointer = chainermn.create_multi_node_checkpointer("imagenet-example", comm, Path(args.out, "checkpoints"))
    done = (checkpointer.maybe_load(model=model, optimizer=optimizer) or 0) if args.resume else 0
    with log:
        for epoch in range(done + 1, args.epoch + 1):
            for x, t in train_loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(x.to(comm.device)), t.to(comm.device))
                loss.backward()
                optimizer.step()
                log.step(loss=loss.detach())
            result = evaluator.evaluate(val_loader)
            log.epoch(epoch=epoch, loss=result["loss"], accuracy=result["accuracy"], lr=sgd.param_groups[0]["lr"])
            checkpointer.save(epoch, model=model, optimizer=optimizer)
    comm.finalize()


if __name__ == "__main__":
    main()
