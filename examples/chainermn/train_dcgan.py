"""Train a DCGAN, data parallel: two models, two optimizers, and nothing else that a GAN on one process lacks.

    mpiexec -n 4 python examples/chainermn/train_dcgan.py                              # the MNIST sample in TorchMN
    mpiexec -n 4 python examples/chainermn/train_dcgan.py --data cifar-10-batches-py   # CIFAR-10
    torchrun --nproc-per-node 4 examples/chainermn/train_dcgan.py
    python examples/chainermn/train_dcgan.py --quick

After each epoch rank 0 writes what the generator makes of the same 100 inputs to a PNG in --out. -b is the batch of
*each* rank, as in ChainerMN.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- the updater is a function; the generator's loss is computed after the discriminator's step, with its new parameters
- two multi-node optimizers, as there, each created with the parameters of its model: no `setup`
- batch normalisation is that of all ranks together: `create_mnbn_model`
- a checkpoint has everything, the order of the data too, in place of a snapshot of the models
"""

from __future__ import annotations

import argparse
import os
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.utils.data import DataLoader

import torchmn
from torchmn.datasets import ImageSet, cifar10, mnist
from torchmn.iterators import create_synchronized_iterator


def generator(hidden: int, width: int, colours: int) -> nn.Module:
    """Noise (batch, hidden) in, images (batch, colours, 32, 32) between -1 and 1 out."""
    layers: list[nn.Module] = [nn.Linear(hidden, 4 * width * 4 * 4, bias=False), nn.Unflatten(1, (4 * width, 4, 4))]
    layers += [nn.BatchNorm2d(4 * width), nn.ReLU()]
    for wide, narrow in ((4, 2), (2, 1)):
        layers += [nn.ConvTranspose2d(wide * width, narrow * width, kernel_size=4, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(narrow * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, colours, kernel_size=4, stride=2, padding=1), nn.Tanh())


def discriminator(width: int, colours: int) -> nn.Module:
    """Images in, (batch, 1) out: above 0 for an image that looks real."""
    layers: list[nn.Module] = [nn.Conv2d(colours, width, kernel_size=4, stride=2, padding=1), nn.LeakyReLU(0.2)]
    for narrow, wide in ((1, 2), (2, 4)):
        layers += [nn.Conv2d(narrow * width, wide * width, kernel_size=4, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(wide * width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 4 * 4, 1))


def load(options: argparse.Namespace) -> ImageSet:
    """Images of 32 x 32 between -1 and 1."""
    if options.data is not None:
        images = cifar10("train", options.data)
    else:
        images = mnist("train")
        images.images = pad(images.images, (2, 2, 2, 2))
    count = 400 if options.quick else len(images)
    return ImageSet(images.name, images.images[:count] * 2 - 1, images.labels[:count])


def write_png(path: Path, images: Tensor, columns: int = 10) -> None:
    """Write images between -1 and 1 as one picture. images: (count, 1 or 3, height, width)"""
    count, colours, height, width = images.shape
    rows = count // columns
    grid = images[: rows * columns].view(rows, columns, colours, height, width).permute(0, 3, 1, 4, 2)
    pixels = ((grid.reshape(rows * height, columns * width * colours) + 1) * 127.5).round().clamp(0, 255).byte()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", columns * width, rows * height, 8, {1: 0, 3: 2}[colours], 0, 0, 0)
    # Each line begins with the number of its filter; 0 is none.
    lines = b"".join(b"\0" + line.numpy().tobytes() for line in pixels.cpu())
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@torch.no_grad()
def preview(model: nn.Module, hidden: int, path: Path) -> None:
    """In eval mode no rank needs another one, so that rank 0 may do this alone."""
    noise = torch.randn(100, hidden, generator=torch.Generator().manual_seed(0))
    model.eval()
    write_png(path, model(noise.to(next(model.parameters()).device)))
    model.train()


def update(gen: nn.Module, dis: nn.Module, opt_gen, opt_dis, real: Tensor, noise: Tensor) -> Tensor:
    """One step of both models, as on one process: (loss of gen, loss of dis, how often dis was right), this rank's."""
    fake = gen(noise)
    on_real, on_fake = dis(real), dis(fake.detach())
    loss_dis = softplus(-on_real).mean() + softplus(on_fake).mean()
    opt_dis.zero_grad()
    loss_dis.backward()
    opt_dis.step()

    loss_gen = softplus(-dis(fake)).mean()
    opt_gen.zero_grad()
    loss_gen.backward()  # leaves gradients in dis too, which its next zero_grad takes away
    opt_gen.step()
    right = ((on_real > 0).double().mean() + (on_fake < 0).double().mean()) / 2
    return torch.stack([loss_gen.detach().double(), loss_dis.detach().double(), right]).cpu()


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    share = torchmn.scatter_dataset(load(options) if comm.rank == 0 else None, comm, shuffle=True, seed=options.seed)
    colours = share[0][0].shape[0]
    torch.manual_seed(options.seed + comm.rank)  # each rank's noise is its own; the optimizers bring rank 0's weights

    def multi_node_adam(model: nn.Module):
        adam = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return torchmn.create_multi_node_optimizer(adam, comm, model=model)

    gen = torchmn.create_mnbn_model(generator(options.hidden, options.width, colours), comm).to(comm.device)
    dis = torchmn.create_mnbn_model(discriminator(options.width, colours), comm).to(comm.device)
    opt_gen, opt_dis = multi_node_adam(gen), multi_node_adam(dis)
    loader = DataLoader(share, batch_size=options.batchsize, shuffle=True, drop_last=len(share) >= options.batchsize)
    batches = create_synchronized_iterator(loader, comm)

    state = {"gen": gen, "dis": dis, "opt_gen": opt_gen, "opt_dis": opt_dis, "iterator": batches}
    checkpointer = torchmn.create_multi_node_checkpointer("train_dcgan", comm, options.out / "checkpoints", keep=2)
    done = (checkpointer.maybe_load(**state) or 0) if options.resume else 0

    formats = {"gen loss": ".6f", "dis loss": ".6f", "dis accuracy": ".1%"}
    with torchmn.training.Logger(
        comm,
        (options.epoch - done) * len(batches),
        json=options.out / "log.jsonl",
        append=options.resume,
        formats=formats,
    ) as log:
        log.print(f"{share.global_length} images, {comm.size} rank(s), {options.batchsize} images per step on each")
        if done:
            log.print(f"resumed after epoch {done}")
        for epoch in range(done + 1, options.epoch + 1):
            total = torch.zeros(3, dtype=torch.float64)
            for x, _ in batches:
                noise = torch.randn(len(x), options.hidden).to(comm.device)
                observed = update(gen, dis, opt_gen, opt_dis, x.to(comm.device), noise)
                total += observed
                log.step(**{"gen loss": observed[0], "dis loss": observed[1]})
            mean = comm.allreduce(total / len(batches), "mean")
            log.epoch(epoch=epoch, **dict(zip(formats, mean.tolist(), strict=True)))
            checkpointer.save(epoch, **state)
            if comm.rank == 0:
                preview(gen, options.hidden, options.out / f"epoch-{epoch:04}.png")
        log.print(f"previews: {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a DCGAN on all ranks.")
    parser.add_argument("-b", "--batchsize", type=int, default=50, help="images per step on each rank")
    parser.add_argument("-e", "--epoch", type=int, default=100, help="how many times to go through the training set")
    parser.add_argument("-n", "--hidden", type=int, default=100, help="numbers that an image is generated from")
    parser.add_argument("--width", type=int, default=64, help="channels of the widest image's layers")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's files; the MNIST sample without it")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("result"), help="folder for previews, log and checkpoints"
    )
    parser.add_argument("-r", "--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a narrow net, 400 images, two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch, options.width = min(options.epoch, 2), min(options.width, 8)

    with torchmn.create_communicator(options.communicator) as comm:
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
