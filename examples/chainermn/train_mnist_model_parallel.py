"""Train an MLP on MNIST whose layers lie on two ranks: the first on rank 0, the other two on rank 1.

    mpiexec -n 2 python examples/chainermn/train_mnist_model_parallel.py              # as a MultiNodeChainList
    mpiexec -n 2 python examples/chainermn/train_mnist_model_parallel.py --explicit   # with send and recv written out
    python examples/chainermn/train_mnist_model_parallel.py --single                  # the same MLP in one process

The three print the same loss at every step (with the same number of threads: OMP_NUM_THREADS=1). Rank 0 has the data
and the loss. Rank 1 has neither, and runs the same loop: its data set is as long, but empty, and what its model returns
is the delegate of what it sent.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- `add_link`, `send` and `recv` are the same; a chain's component is an `nn.Module`
- a batch of the empty data set is an empty list, for which the loop calls `model()`
- a rank without output calls `backward()` on what the model returned, as the updater did
- the trainer is a loop; both ranks draw the same parameters, so that the losses are those of one process
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, Dataset

import torchmn
from torchmn import functions as F
from torchmn.datasets import mnist
from torchmn.graph import MultiNodeChainList


def linears(units: int, seed: int) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """The layers of the MLP, drawn on every rank with the same seed, so that each can take those it needs."""
    torch.manual_seed(seed)
    return nn.Linear(784, units), nn.Linear(units, units), nn.Linear(units, 10)


# -- as a graph: edges are declared once; messages and delegates follow from them -----------------------------


class MLP0SubA(nn.Module):
    def __init__(self, l1: nn.Linear):
        super().__init__()
        self.l1 = l1

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.l1(x.flatten(1)))


class MLP0SubB(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y


class MLP1Sub(nn.Module):
    def __init__(self, l2: nn.Linear, l3: nn.Linear):
        super().__init__()
        self.l2, self.l3 = l2, l3

    def forward(self, h: Tensor) -> Tensor:
        return self.l3(relu(self.l2(h)))


class MLP(MultiNodeChainList):
    def __init__(self, comm: torchmn.Communicator, l1: nn.Linear, l2: nn.Linear, l3: nn.Linear):
        super().__init__(comm)
        if comm.rank == 0:
            self.add_link(MLP0SubA(l1), rank_in=None, rank_out=1)
            self.add_link(MLP0SubB(), rank_in=1, rank_out=None)
        else:
            self.add_link(MLP1Sub(l2, l3), rank_in=0, rank_out=0)


# -- with explicit messages ------------------------------------------------------------------------------------


class MLP0(nn.Module):
    def __init__(self, comm: torchmn.Communicator, l1: nn.Linear):
        super().__init__()
        self.comm, self.l1 = comm, l1

    def forward(self, x: Tensor) -> Tensor:
        phi = F.send(relu(self.l1(x.flatten(1))), self.comm, rank=1)
        # Without the delegate, backward from y would end here and never reach l1.
        return F.recv(self.comm, rank=1, delegate_variable=phi)


class MLP1(nn.Module):
    def __init__(self, comm: torchmn.Communicator, l2: nn.Linear, l3: nn.Linear):
        super().__init__()
        self.comm, self.l2, self.l3 = comm, l2, l3

    def forward(self) -> Tensor:
        h = F.recv(self.comm, rank=0)
        return F.send(self.l3(relu(self.l2(h))), self.comm, rank=0)


# -- training: the same loop in all cases ----------------------------------------------------------------------


def create_model(comm: torchmn.Communicator, options: argparse.Namespace) -> nn.Module:
    l1, l2, l3 = linears(options.units, options.seed)
    if options.single:
        return nn.Sequential(nn.Flatten(), l1, nn.ReLU(), l2, nn.ReLU(), l3)
    if options.explicit:
        return MLP0(comm, l1) if comm.rank == 0 else MLP1(comm, l2, l3)
    return MLP(comm, l1, l2, l3)


def loss_of(model: nn.Module, batch: list[Tensor], device: torch.device) -> Tensor:
    if not batch:
        return model()
    x, t = batch
    return cross_entropy(model(x.to(device)), t.to(device))


@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader, images: int, device: torch.device) -> float:
    """The share of right answers, on rank 0; 0 on rank 1, which only helps."""
    correct = 0
    for batch in loader:
        if batch:
            correct += int((model(batch[0].to(device)).argmax(dim=1).cpu() == batch[1]).sum())
        else:
            model()
    return correct / images


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    model = create_model(comm, options).to(comm.device)
    optimizer = torch.optim.Adam(model.parameters())
    training: Dataset = mnist("train", options.data)
    test: Dataset = mnist("test", options.data)
    images, test_images = len(training), len(test)  # type: ignore[arg-type]
    if comm.rank == 1:
        training, test = torchmn.create_empty_dataset(training), torchmn.create_empty_dataset(test)  # type: ignore[arg-type]
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(training, options.batchsize, shuffle=True, generator=order)
    test_loader = DataLoader(test, batch_size=500)

    formats = {"loss": ".8f", "test accuracy": ".2%"}
    steps = options.epoch * len(loader)
    with torchmn.training.Logger(comm, steps, json=options.out / "log.jsonl", json_steps=1, formats=formats) as log:
        form = "one process" if options.single else "send and recv" if options.explicit else "MultiNodeChainList"
        log.print(f"{images} images, {comm.size} rank(s), {form}")
        for epoch in range(1, options.epoch + 1):
            total = 0.0
            for step, batch in enumerate(loader, 1):
                optimizer.zero_grad()
                loss = loss_of(model, batch, comm.device)
                loss.backward()
                optimizer.step()
                log.step(loss=loss.detach())
                total += loss.item() * len(batch[0] if batch else ())
                if options.print_steps:
                    log.print(f"epoch {epoch}, step {step}: loss {loss.item():.8f}")
            accuracy = accuracy_of(model, test_loader, test_images, comm.device)
            log.epoch(epoch=epoch, loss=total / images, **{"test accuracy": accuracy})


def demand_processes(comm: torchmn.Communicator, expected: int) -> None:
    if comm.size != expected:
        raise SystemExit(
            f"rank {comm.rank} of {comm.size}: this model needs {expected} process(es), got {comm.size}: "
            f"mpiexec -n {expected} python {' '.join(sys.argv)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an MLP on MNIST whose layers lie on two ranks.")
    parser.add_argument("-b", "--batchsize", type=int, default=100, help="images per step")
    parser.add_argument("-e", "--epoch", type=int, default=20, help="how many times to go through the training set")
    parser.add_argument("-u", "--units", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--explicit", action="store_true", help="send and recv instead of MultiNodeChainList")
    parser.add_argument("--single", action="store_true", help="the whole model in one process, to compare with")
    parser.add_argument("--print-steps", action="store_true", help="print the loss of every step")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; the sample in TorchMN without it")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small model and two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch, options.units = min(options.epoch, 2), min(options.units, 100)

    with torchmn.create_communicator(options.communicator) as comm:
        demand_processes(comm, 1 if options.single else 2)
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
