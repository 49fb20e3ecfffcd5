"""Train an MLP on MNIST, data parallel: what a training script looks like with TorchMN.

    mpiexec -n 4 python examples/chainermn/train_mnist.py                        # on this machine
    mpiexec -n 8 -hosts host00,host01 python examples/chainermn/train_mnist.py   # on two
    torchrun --nproc-per-node 4 examples/chainermn/train_mnist.py
    python examples/chainermn/train_mnist.py                                     # one process

-b is the batch of *each* rank, as in ChainerMN: a step takes b x ranks images. Which ones depends on nothing but their
number, so `-b 100` on one rank, `-b 50` on two and `-b 25` on four print the same losses, but for what rounding does
to the last digits (nothing that shows, with --float64), where the number of ranks divides that of the images.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- `create_communicator()` chooses CPU or GPU: no `naive`, and `comm.device` in place of `intra_rank`
- the optimizer is created with the model's parameters: no `setup`; `step()` in place of the updater
- `scatter_dataset` deals out indices in every epoch, so that any number of ranks sees the same batches
- the trainer is a loop; `Logger` is called on all ranks and writes on rank 0; `--resume` takes the newest checkpoint
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

import torchmn
from torchmn.datasets import mnist


def mlp(units: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 10)
    )


def dealt(order: Tensor, ranks: int) -> list[int]:
    """`order`, dealt out to `ranks` like cards: scatter_dataset then gives each rank its hand.

    The first images of all hands together are the first of `order`, and so on: every step takes the images that one
    process would have taken.
    """
    return torch.cat([order[rank::ranks] for rank in range(ranks)]).tolist()


def share_of_epoch(training: Dataset, comm: torchmn.Communicator, epoch: int, seed: int) -> Dataset:
    """This rank's images, in an order that is new in every epoch; only indices are dealt out."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(training), generator=generator)  # type: ignore[arg-type]
    return torchmn.scatter_dataset(Subset(training, dealt(order, comm.size)), comm)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Written for one process; create_multi_node_evaluator makes it that of all ranks."""
    loss, correct, images = 0.0, 0, 0
    like = next(model.parameters())
    for x, t in loader:
        y, t = model(x.to(like)), t.to(like.device)
        loss += cross_entropy(y, t, reduction="sum").item()
        correct += int((y.argmax(dim=1) == t).sum())
        images += len(t)
    return {"loss": loss / images, "accuracy": correct / images}


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    device, dtype = comm.device, torch.float64 if options.float64 else torch.float32
    torch.manual_seed(options.seed)
    model = mlp(options.units).to(device, dtype)
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.Adam(model.parameters()), comm, model=model)
    training, test = mnist("train", options.data), mnist("test", options.data)
    test_loader = DataLoader(torchmn.scatter_dataset(test, comm), batch_size=500)
    evaluate_all = torchmn.create_multi_node_evaluator(evaluate, comm)
    checkpointer = torchmn.create_multi_node_checkpointer("train_mnist", comm, options.out / "checkpoints", keep=2)
    done = (checkpointer.maybe_load(model=model, optimizer=optimizer) or 0) if options.resume else 0

    steps = (options.epoch - done) * -(-len(training) // (options.batchsize * comm.size))
    formats = {"loss": ".8f", "test loss": ".8f", "test accuracy": ".2%"}
    with torchmn.training.Logger(
        comm, steps, json=options.out / "log.jsonl", append=options.resume, formats=formats
    ) as log:
        log.print(f"{training}, {comm.size} rank(s), {options.batchsize} images per step on each")
        if done:
            log.print(f"resumed after epoch {done}")
        for epoch in range(done + 1, options.epoch + 1):
            share = share_of_epoch(training, comm, epoch, options.seed)
            total = torch.zeros((), dtype=torch.float64)
            for x, t in DataLoader(share, batch_size=options.batchsize):
                optimizer.zero_grad()
                loss = cross_entropy(model(x.to(device, dtype)), t.to(device))
                loss.backward()
                optimizer.step()
                total += loss.detach().cpu() * len(t)
                log.step(loss=loss)
            mean_loss = comm.allreduce(total / len(share), "mean").item()  # type: ignore[arg-type]
            result = evaluate_all(model, test_loader)
            row = {"test loss": result["loss"], "test accuracy": result["accuracy"]}
            log.epoch(epoch=epoch, loss=mean_loss, **row)
            checkpointer.save(epoch, model=model, optimizer=optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an MLP on MNIST on all ranks.")
    parser.add_argument("-b", "--batchsize", type=int, default=100, help="images per step on each rank")
    parser.add_argument("-e", "--epoch", type=int, default=20, help="how many times to go through the training set")
    parser.add_argument("-u", "--units", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; the sample in TorchMN without it")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log and the checkpoints")
    parser.add_argument("-r", "--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--quick", action="store_true", help="a small model and two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch, options.units = min(options.epoch, 2), min(options.units, 100)

    with torchmn.create_communicator(options.communicator) as comm:
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
