"""Train a small convnet on real MNIST digits; each rank computes its share of every batch.

    torchmn run --raw -n 2 examples/demo_mnist.py     # or: mpiexec -n 2 python examples/demo_mnist.py
    python examples/demo_mnist.py                     # one process, the same numbers

Ends with status 1 if the test accuracy is lower than expected.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchmn
from torchmn.datasets import ImageSet, mnist


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train_on(comm: torchmn.Communicator, model: nn.Module, optimizer, data: ImageSet, batch: Tensor) -> Tensor:
    """One step on the images that `batch` numbers; returns this rank's part of the batch's mean loss."""
    share = batch[comm.rank :: comm.size]
    loss = cross_entropy(model(data.images[share]), data.labels[share], reduction="sum") / len(batch)
    optimizer.zero_grad()
    # The ranks' losses sum to the batch's loss, also where shares are uneven. multi_node_mean_grad divides by
    # the number of ranks, hence the factor.
    (loss * comm.size).backward()
    comm.multi_node_mean_grad(model)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def accuracy_on(comm: torchmn.Communicator, model: nn.Module, data: ImageSet) -> float:
    """The exact accuracy over all of `data`: each rank judges its share, and the counts are summed."""
    images, labels = data.images[comm.rank :: comm.size], data.labels[comm.rank :: comm.size]
    correct = (model(images).argmax(dim=1) == labels).sum()
    return int(comm.allreduce(correct)) / len(data)


def write_report(folder: Path, ranks: int, epochs: list[dict], losses: list[float]) -> list[Path]:
    """The paths of what was written: the numbers and, where matplotlib is installed, the loss curve."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"ranks": ranks, "torch": torch.__version__, "torchmn": torchmn.__version__, "epochs": epochs}
    (folder / "report.json").write_text(json.dumps(numbers | {"loss_of_each_step": losses}, indent=1))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [folder / "report.json"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss of the batch", title=f"MNIST sample, {ranks} rank(s)")
    axes.semilogy(losses, linewidth=0.8)
    figure.savefig(folder / "loss.png", dpi=120)
    return [folder / "report.json", folder / "loss.png"]


def train(comm: torchmn.Communicator, options: argparse.Namespace, console: Console) -> int:
    """The exit status: 0 if the trained model is as good as expected on the test set."""
    training, test = mnist("train"), mnist("test")
    for data in (training, test):
        data.images = data.images.to(torch.get_default_dtype())

    torch.manual_seed(comm.rank)  # every rank starts from other weights ...
    model = convnet()
    comm.bcast_data(model)  # ... and takes those of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.epochs)
    order = torch.Generator().manual_seed(0)  # the same on every rank, so that all agree on the batches

    console.print(f"{training} on {comm.size} rank(s)\n\nepoch   mean loss   test accuracy   seconds")
    epochs, losses = [], []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=comm.rank != 0) as progress:
        bar = progress.add_task("steps", total=options.epochs * math.ceil(len(training) / options.batch))
        for epoch in range(1, options.epochs + 1):
            start, parts = time.perf_counter(), []
            for batch in torch.randperm(len(training), generator=order).split(options.batch):
                parts.append(train_on(comm, model, optimizer, training, batch))
                progress.advance(bar)
            schedule.step()
            loss_of_each_step = comm.allreduce(torch.stack(parts))
            losses += loss_of_each_step.tolist()
            loss, accuracy = loss_of_each_step.mean().item(), accuracy_on(comm, model, test)
            seconds = time.perf_counter() - start
            epochs.append({"epoch": epoch, "loss": loss, "accuracy": accuracy, "seconds": seconds})
            console.print(f"{epoch:5} {loss:11.8f} {accuracy:15.1%} {seconds:9.2f}")

    if comm.rank == 0:
        for path in write_report(options.report, comm.size, epochs, losses):
            console.print(f"report: {path}", soft_wrap=True)
    accuracy = epochs[-1]["accuracy"]
    console.print(f"test accuracy: {accuracy:.1%} (expected: at least {options.expect:.1%})")
    return 0 if accuracy >= options.expect else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small convnet on MNIST on all ranks.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks together")
    parser.add_argument("--expect", type=float, default=0.95, help="test accuracy below which the demo fails")
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder for the report")
    parser.add_argument("--quick", action="store_true", help="one epoch, of which 80%% is expected")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.expect = 1, 0.8

    # In float64, what rounding does to a sum in another order stays below the digits printed: any number of
    # ranks shows the same losses.
    torch.set_default_dtype(torch.float64)
    with torchmn.create_communicator() as comm:
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        return train(comm, options, Console(quiet=comm.rank != 0, highlight=False))


if __name__ == "__main__":
    sys.exit(main())
