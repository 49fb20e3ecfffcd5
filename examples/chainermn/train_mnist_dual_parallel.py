"""Train an MLP on MNIST, data parallel and model parallel at once: pairs of ranks that hold one model between them.

    mpiexec -n 4 python examples/chainermn/train_mnist_dual_parallel.py    # any even number

Ranks 2k and 2k+1 are a pair: the first has the first layer and its share of the data, the second the other two layers.
All first ranks of pairs average their gradients, and so do all second ones. -b is the batch of each *pair*: `-b 100` on
two ranks and `-b 50` on four print the same losses, but for what rounding does to the last digits.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- the two calls of `split`, `add_link` and the optimizer over the data axis are the same
- the data set of the second rank of a pair is empty, as there; its batches are empty lists
- an odd number of processes is an error on every rank; ChainerMN's example raised on some
- the trainer is a loop; metrics are sums over all ranks, in place of an evaluator over the data axis
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

import torchmn
from torchmn.datasets import mnist
from torchmn.graph import MultiNodeChainList


class Axes:
    """The two ways in which a rank belongs to others: to the one with the rest of its model, and to its equals."""

    def __init__(self, comm: torchmn.Communicator):
        model, data = comm.split(comm.rank // 2, comm.rank), comm.split(comm.rank % 2, comm.rank)
        assert model is not None and data is not None
        self.world, self.model, self.data = comm, model, data

    @property
    def has_data(self) -> bool:
        return self.model.rank == 0


class MLP(MultiNodeChainList):
    """The model of one pair; the ranks named here are those of the pair's communicator, 0 and 1."""

    def __init__(self, pair: torchmn.Communicator, units: int):
        super().__init__(pair)
        l1, l2, l3 = nn.Linear(784, units), nn.Linear(units, units), nn.Linear(units, 10)
        if pair.rank == 0:
            self.add_link(nn.Sequential(nn.Flatten(), l1, nn.ReLU()), rank_in=None, rank_out=1)
            self.add_link(nn.Identity(), rank_in=1, rank_out=None)
        else:
            self.add_link(nn.Sequential(l2, nn.ReLU(), l3), rank_in=0, rank_out=0)


def dealt(order: Tensor, hands: int) -> list[int]:
    """`order` dealt out like cards: with scatter_dataset, each step takes the images that one pair would have taken."""
    return torch.cat([order[hand::hands] for hand in range(hands)]).tolist()


def share_of_epoch(training: Dataset, axes: Axes, epoch: int, seed: int) -> Dataset:
    """The images of this pair, in an order that is new in every epoch; as many empty items on its second rank."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(training), generator=generator)  # type: ignore[arg-type]
    share = torchmn.scatter_dataset(Subset(training, dealt(order, axes.data.size)), axes.data)
    return share if axes.has_data else torchmn.create_empty_dataset(share)


@torch.no_grad()
def count_correct(model: nn.Module, loader: DataLoader, place: dict) -> Tensor:
    """How many images the model is right about; 0 on the second rank of a pair, which only helps."""
    correct = torch.zeros((), dtype=torch.int64)
    for batch in loader:
        if batch:
            correct += (model(batch[0].to(**place)).argmax(dim=1).cpu() == batch[1]).sum()
        else:
            model()
    return correct


def train(axes: Axes, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    place = {"device": axes.world.device, "dtype": torch.float64 if options.float64 else torch.float32}
    model = MLP(axes.model, options.units).to(**place)
    # Over the data axis only: the two ranks of a pair hold different parameters, which no mean may mix.
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.Adam(model.parameters()), axes.data, model=model)
    training, test = mnist("train", options.data), mnist("test", options.data)
    test_share: Dataset = torchmn.scatter_dataset(test, axes.data, force_equal_length=False)
    if not axes.has_data:
        test_share = torchmn.create_empty_dataset(test_share)  # type: ignore[arg-type]

    formats = {"loss": ".8f", "test accuracy": ".2%"}
    steps = options.epoch * -(-len(training) // (options.batchsize * axes.data.size))
    with torchmn.training.Logger(axes.world, steps, json=options.out / "log.jsonl", formats=formats) as log:
        log.print(
            f"{training}, {axes.world.size} rank(s), {axes.data.size} pair(s), {options.batchsize} images on each"
        )
        for epoch in range(1, options.epoch + 1):
            share = share_of_epoch(training, axes, epoch, options.seed)
            total = torch.zeros((), dtype=torch.float64)
            for batch in DataLoader(share, batch_size=options.batchsize):
                optimizer.zero_grad()
                if batch:
                    x, t = batch
                    loss = cross_entropy(model(x.to(**place)), t.to(place["device"]))
                    total += loss.detach().cpu() * len(t)
                else:
                    loss = model()
                loss.backward()
                optimizer.step()
                log.step(loss=loss.detach())
            mean_loss = axes.world.allreduce(total).item() / (axes.data.size * len(share))  # type: ignore[arg-type]
            correct = count_correct(model, DataLoader(test_share, batch_size=500), place)
            accuracy = int(axes.world.allreduce(correct)) / len(test)
            log.epoch(epoch=epoch, loss=mean_loss, **{"test accuracy": accuracy})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an MLP on MNIST on pairs of ranks.")
    parser.add_argument("-b", "--batchsize", type=int, default=100, help="images per step on each pair")
    parser.add_argument("-e", "--epoch", type=int, default=20, help="how many times to go through the training set")
    parser.add_argument("-u", "--units", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; the sample in TorchMN without it")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--quick", action="store_true", help="a small model and two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch, options.units = min(options.epoch, 2), min(options.units, 100)

    with torchmn.create_communicator(options.communicator) as comm:
        demand_pairs(comm)
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(Axes(comm), options)


def demand_pairs(comm: torchmn.Communicator) -> None:
    if comm.size % 2:
        raise SystemExit(
            f"rank {comm.rank} of {comm.size}: ranks work in pairs: an even number of processes is needed, got "
            f"{comm.size}: mpiexec -n {comm.size + 1} python {' '.join(sys.argv)}"
        )


if __name__ == "__main__":
    main()
