"""Train a convolutional network on MNIST whose layers are split by output channels over all ranks.

    mpiexec -n 2 python examples/chainermn/parallel_convolution.py    # any number up to 10, that of the classes
    python examples/chainermn/parallel_convolution.py                 # one process, the same losses

Every rank computes some of the output channels of each layer, from all of its input channels; F.allgather then gives
all channels to every rank. That is the unsplit layer, exactly: outputs, gradients and so the loss of every step are
those of one process, but for rounding (none that shows, with --float64). No parameter is held twice, so no gradient is
averaged and plain optimizers do.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- every rank computes its output channels from *all* input channels, so that the result is that of the whole layer;
  ChainerMN's example used only every n-th input channel on each of n ranks
- parameters of layers are cut from the same whole layer on all ranks; in ChainerMN's example, ranks drew their own
- `create_multi_node_iterator` and `allgather` are the same; the network is a small one for MNIST, and not VGG
- gradients are of the sum of all ranks' losses, which are equal: each rank divides its loss by the number of ranks
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchmn
from torchmn import functions as F
from torchmn.datasets import mnist


class SplitByOutputs(nn.Module):
    """This rank's output channels of a Conv2d or Linear; called on every rank with the same x, it gives all of them."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, comm: torchmn.Communicator):
        super().__init__()
        self.comm, self.layer = comm, layer
        assert layer.bias is not None
        # Ranks cut the same layer, drawn with the same seed; the last ranks may get one channel less.
        layer.weight = nn.Parameter(layer.weight.detach().tensor_split(comm.size)[comm.rank].clone())
        layer.bias = nn.Parameter(layer.bias.detach().tensor_split(comm.size)[comm.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(F.allgather(self.comm, self.layer(x)), dim=1)


def convnet(comm: torchmn.Communicator, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        SplitByOutputs(nn.Conv2d(1, 16, kernel_size=5), comm), nn.ReLU(), nn.MaxPool2d(2),
        SplitByOutputs(nn.Conv2d(16, 32, kernel_size=5), comm), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), SplitByOutputs(nn.Linear(32 * 4 * 4, 10), comm),
    )  # fmt: skip


@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader, place: dict) -> float:
    correct = images = 0
    for x, t in loader:
        correct += int((model(x.to(**place)).argmax(dim=1).cpu() == t).sum())
        images += len(t)
    return correct / images


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    place = {"device": comm.device, "dtype": torch.float64 if options.float64 else torch.float32}
    model = convnet(comm, options.seed).to(**place)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    training, test = mnist("train", options.data), mnist("test", options.data)
    # The same batches on all ranks: those that rank 0 draws.
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(training, options.batchsize, shuffle=True, generator=order)
    batches = torchmn.iterators.create_multi_node_iterator(loader if comm.rank == 0 else None, comm)
    test_loader = DataLoader(test, batch_size=500)

    formats = {"loss": ".8f", "test accuracy": ".2%"}
    steps = options.epoch * len(batches)
    with torchmn.training.Logger(comm, steps, json=options.out / "log.jsonl", json_steps=1, formats=formats) as log:
        log.print(f"{training}, {comm.size} rank(s), each with a part of the channels")
        for epoch in range(1, options.epoch + 1):
            total = 0.0
            for x, t in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(x.to(**place)), t.to(comm.device))
                # All ranks have the same loss, and gradients are those of the sum of all ranks' losses.
                (loss / comm.size).backward()
                optimizer.step()
                total += loss.item() * len(t)
                log.step(loss=loss.detach())
            accuracy = accuracy_of(model, test_loader, place)
            log.epoch(epoch=epoch, loss=total / len(training), **{"test accuracy": accuracy})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network whose layers are split by output channels.")
    parser.add_argument("-b", "--batchsize", type=int, default=64, help="images per step, the same on all ranks")
    parser.add_argument("-e", "--epoch", type=int, default=10, help="how many times to go through the training set")
    parser.add_argument("-l", "--learning-rate", type=float, default=0.02)
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; the sample in TorchMN without it")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--quick", action="store_true", help="one epoch")
    options = parser.parse_args()
    if options.quick:
        options.epoch = 1

    with torchmn.create_communicator(options.communicator) as comm:
        if comm.size > 10:
            raise SystemExit(f"rank {comm.rank} of {comm.size}: 10 classes can be split over at most 10 processes")
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
