"""Train an ensemble of classifiers on MNIST, one on each rank, and let them vote.

    mpiexec -n 4 python examples/ensemble.py

Each rank trains its own MLP, with other initial values and on another sample of the training images (drawn with
replacement). Ranks do not communicate during training. To classify an image, F.allgather collects the outputs of all
members, and their probabilities are averaged.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

import torchmn
from torchmn import functions as F
from torchmn.datasets import mnist


def mlp(units: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, units), nn.ReLU(), nn.Linear(units, 10))


class Ensemble(nn.Module):
    """The mean of the probabilities that all ranks' models give; called on every rank with the same x."""

    def __init__(self, member: nn.Module, comm: torchmn.Communicator):
        super().__init__()
        self.member, self.comm = member, comm

    def forward(self, x: Tensor) -> Tensor:
        opinions = F.allgather(self.comm, self.member(x).softmax(dim=1))
        return torch.stack(opinions).mean(dim=0)


@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    correct = images = 0
    for x, t in loader:
        correct += int((model(x.to(device)).argmax(dim=1).cpu() == t).sum())
        images += len(t)
    return correct / images


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    torch.manual_seed(1000 * options.seed + comm.rank)  # another start and other images on every rank
    member = mlp(options.units).to(comm.device)
    ensemble = Ensemble(member, comm)
    optimizer = torch.optim.Adam(member.parameters(), lr=2e-3)
    training, test = mnist("train", options.data), mnist("test", options.data)
    draw = RandomSampler(training, replacement=True, num_samples=options.images)
    loader = DataLoader(training, options.batchsize, sampler=draw)
    test_loader = DataLoader(test, batch_size=500)

    columns: list[str] = ["worst member", "mean of members", "best member", "ensemble"]
    formats = dict.fromkeys(columns, ".2%")
    with torchmn.training.Logger(
        comm, options.epoch * len(loader), json=options.out / "log.jsonl", formats=formats
    ) as log:
        log.print(f"{training}, {comm.size} rank(s), a classifier on each")
        for epoch in range(1, options.epoch + 1):
            for x, t in loader:
                optimizer.zero_grad()
                loss = cross_entropy(member(x.to(comm.device)), t.to(comm.device))
                loss.backward()
                optimizer.step()
                log.step(loss=loss.detach())
            alone = comm.allgather_obj(accuracy_of(member, test_loader, comm.device))
            members = {"worst member": min(alone), "mean of members": sum(alone) / comm.size, "best member": max(alone)}
            log.epoch(epoch=epoch, **members, ensemble=accuracy_of(ensemble, test_loader, comm.device))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier on every rank, and average their answers.")
    parser.add_argument("-b", "--batchsize", type=int, default=50, help="images per step on each rank")
    parser.add_argument("-e", "--epoch", type=int, default=10, help="how many times each rank draws its images")
    parser.add_argument("-n", "--images", type=int, default=3000, help="how many images each rank draws in an epoch")
    parser.add_argument("-u", "--units", type=int, default=100, help="units in the hidden layer")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; the sample in TorchMN without it")
    parser.add_argument("--out", type=Path, default=Path("result"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch = min(options.epoch, 2)

    with torchmn.create_communicator(options.communicator) as comm:
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
