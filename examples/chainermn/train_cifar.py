"""Train a VGG-style net with batch normalisation on CIFAR-10, data parallel.

    mpiexec -n 4 python examples/chainermn/train_cifar.py --data cifar-10-batches-py     # or cifar-10-batches-bin
    torchrun --nproc-per-node 4 examples/chainermn/train_cifar.py --data ...
    python examples/chainermn/train_cifar.py --quick                                     # one process, generated images

Rank 0 reads the files and sends every rank its share. The batch normalisation is that of the whole batch:
create_mnbn_model replaces the layers. -b is the batch of *each* rank, as in ChainerMN: a step takes b x ranks images.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- batch normalisation is that of all ranks together: `create_mnbn_model`
- `weight_decay=` of torch's SGD in place of the hook; a scheduler in place of `ExponentialShift`
- the optimizer is created with the model's parameters: no `setup`; the trainer is a loop
- a checkpoint of all ranks in place of a snapshot on rank 0; CIFAR-10 only
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
from torchmn.datasets import ImageSet, cifar10
from torchmn.iterators import create_synchronized_iterator

CLASSES = 10


def vgg(width: int) -> nn.Module:
    """Five blocks of 3 x 3 convolutions, each of which halves the image: 32 x 32 becomes 1 x 1."""
    layers: list[nn.Module] = []
    channels = 3
    for wider, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width * wider, kernel_size=3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(width * wider), nn.ReLU()]
            channels = width * wider
        layers += [nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(channels, channels, bias=False), nn.BatchNorm1d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(channels, CLASSES))


def generated(split: str, images: int) -> ImageSet:
    """A stand-in for CIFAR-10: every class has a coarse pattern, every image different noise."""
    patterns = torch.rand(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed({"train": 1, "test": 2}[split])
    labels = torch.arange(images) % CLASSES
    noise = torch.rand(images, 3, 32, 32, generator=draw)
    whole = torch.nn.functional.interpolate(patterns, size=32)[labels]
    return ImageSet(f"generated {split}", (whole + noise) / 2, labels)


def flipped_and_shifted(x: Tensor) -> Tensor:
    """The images of a batch, some of them mirrored, all of them moved by up to 4 pixels: others on every rank."""
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    down, right = torch.randint(0, 9, (2,)).tolist()
    return nn.functional.pad(x, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Written for one process; create_multi_node_evaluator makes it that of all ranks."""
    model.eval()
    loss, correct, images = 0.0, 0, 0
    device = next(model.parameters()).device
    for x, t in loader:
        y, t = model(x.to(device)), t.to(device)
        loss += cross_entropy(y, t, reduction="sum").item()
        correct += int((y.argmax(dim=1) == t).sum())
        images += len(t)
    model.train()
    return {"loss": loss / images, "accuracy": correct / images}


def load(split: str, options: argparse.Namespace) -> ImageSet:
    if options.data is not None:
        return cifar10(split, options.data)
    return generated(split, {"train": 1000, "test": 203}[split])


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed + comm.rank)  # dropout and shifts differ; the optimizer brings rank 0's weights
    model = torchmn.create_mnbn_model(vgg(options.width), comm).to(comm.device)
    sgd = torch.optim.SGD(model.parameters(), lr=options.learnrate, momentum=0.9, weight_decay=5e-4)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model=model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.5)

    read = {split: load(split, options) if comm.rank == 0 else None for split in ("train", "test")}
    share = torchmn.scatter_dataset(read["train"], comm, shuffle=True, seed=options.seed)
    test_share = torchmn.scatter_dataset(read["test"], comm)
    del read
    # drop_last: a last batch of one image on each rank would be normalised by very little.
    loader = DataLoader(share, batch_size=options.batchsize, shuffle=True, drop_last=len(share) >= options.batchsize)
    batches = create_synchronized_iterator(loader, comm)
    test_loader = DataLoader(test_share, batch_size=250)
    evaluate_all = torchmn.create_multi_node_evaluator(evaluate, comm)

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "iterator": batches}
    checkpointer = torchmn.create_multi_node_checkpointer("train_cifar", comm, options.out / "checkpoints", keep=2)
    done = (checkpointer.maybe_load(**state) or 0) if options.resume else 0

    steps = (options.epoch - done) * len(batches)
    formats = {"loss": ".6f", "test loss": ".6f", "test accuracy": ".2%"}
    with torchmn.training.Logger(
        comm, steps, json=options.out / "log.jsonl", append=options.resume, formats=formats
    ) as log:
        log.print(f"{share.global_length} images, {comm.size} rank(s), {options.batchsize} images per step on each")
        if done:
            log.print(f"resumed after epoch {done}")
        for epoch in range(done + 1, options.epoch + 1):
            total = torch.zeros((), dtype=torch.float64)
            for x, t in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(flipped_and_shifted(x).to(comm.device)), t.to(comm.device))
                loss.backward()
                optimizer.step()
                total += loss.detach().cpu()
                log.step(loss=loss)
            rate = schedule.get_last_lr()[0]
            schedule.step()
            mean_loss = comm.allreduce(total / len(batches), "mean").item()
            result = evaluate_all(model, test_loader)
            row = {"test loss": result["loss"], "test accuracy": result["accuracy"]}
            log.epoch(epoch=epoch, rate=rate, loss=mean_loss, **row)
            checkpointer.save(epoch, **state)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a VGG-style net on CIFAR-10 on all ranks.")
    parser.add_argument("-b", "--batchsize", type=int, default=64, help="images per step on each rank")
    parser.add_argument("-e", "--epoch", type=int, default=300, help="how many times to go through the training set")
    parser.add_argument("-l", "--learnrate", type=float, default=0.05, help="halved every 25 epochs")
    parser.add_argument("--width", type=int, default=64, help="channels of the first block; 64 is VGG's")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's files, binary or Python version")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log and the checkpoints")
    parser.add_argument("-r", "--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a narrow net, three epochs; generated images without --data"
    )
    options = parser.parse_args()
    if options.data is None and not options.quick:
        parser.error("--data: the folder with CIFAR-10's files is needed, or --quick for generated images")
    if options.quick:
        options.epoch, options.width = min(options.epoch, 3), min(options.width, 8)
        # So few steps must be small ones, or the running statistics lag far behind the weights.
        options.batchsize, options.learnrate = min(options.batchsize, 20), min(options.learnrate, 0.005)

    with torchmn.create_communicator(options.communicator) as comm:
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
