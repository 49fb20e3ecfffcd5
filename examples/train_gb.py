"""The sparse autoencoder of local filters on the embedded MNIST sample: pretrain, fine-tune, look inside.

    python examples/train_gb.py                          # one rank
    torchmn run -n 4 examples/train_gb.py                # images in 2 x 2 tiles, each rank its own filters
    torchmn run -n 4 examples/train_gb.py --copies 2     # two copies of the model, each on two tiles
    python examples/train_gb.py --stacks                 # the same network from random filters
    python examples/train_gb.py --stacks 1 2 --labels 500

Every number of ranks gives the same numbers, up to rounding. Pictures are written into --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import torchmn
from torchmn.models import MNIST, GBDist, LabelledBatches, SparseAutoencoder, spot_check, visualize
from torchmn.training import Logger


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=1, help="copies of the model, each with its share of every batch")
    parser.add_argument("--images", type=int, default=6000, help="how many of the 6,000 training images")
    parser.add_argument("--epochs", type=int, default=MNIST.epochs, help="of fine-tuning")
    parser.add_argument("--labels", type=int, help="fine-tune with the first images only: 20 at a time, gently")
    parser.add_argument(
        "--stacks", type=int, nargs="*", help="which stacks to pretrain, counted from 0; none: --stacks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="to compare runs on different numbers of ranks")
    parser.add_argument("--quick", action="store_true", help="200 images, one epoch of fine-tuning: does it run?")
    parser.add_argument("--out", default="gb", help="directory for log and pictures")
    options = parser.parse_args()
    if options.quick:
        options.images, options.epochs = 200, 1
    return options


def shares(batches: LabelledBatches, grid: torchmn.ProcessGrid) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This copy's share of every batch; the layers take their tiles of the images themselves."""
    copies, mine = grid.sizes["data"], grid.place["data"]
    return [(x.tensor_split(copies)[mine], labels.tensor_split(copies)[mine]) for x, labels in batches]


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: LabelledBatches) -> float:
    """Every copy classifies all images; its ranks have the same answers."""
    model.eval()
    right = sum((model(x).argmax(1) == labels).sum().item() for x, labels in batches)
    model.train()
    return right / len(batches.labels)


def main() -> None:
    options = arguments()
    with torchmn.create_communicator() as comm:
        torch.manual_seed(options.seed)
        tiles = torchmn.ProcessGrid.squarest(comm) if options.copies == 1 else None
        grid = tiles or torchmn.ProcessGrid(comm, data=options.copies, height=comm.size // options.copies)
        dtype = torch.float64 if options.float64 else torch.float32
        model = GBDist(grid, "halodatapar", dtype=dtype)
        digits, unseen = torchmn.datasets.mnist("train"), torchmn.datasets.mnist("test")
        images, labels = digits.images[: options.images].to(dtype), digits.labels[: options.images]
        train = shares(LabelledBatches(images, labels, MNIST.batch_size), grid)
        count = 200 if options.quick else 1000
        test = LabelledBatches(unseen.images[:count].to(dtype), unseen.labels[:count], 100)

        stacks = [0, 1, 2] if options.stacks is None else options.stacks
        labelled, schedule = train, {}
        if options.labels:
            few = LabelledBatches(images[: options.labels], labels[: options.labels], 20)
            labelled, schedule = shares(few, grid), {"learning_rate": 0.05, "momentum": None}
        steps = len(train) * len(stacks) * MNIST.pretrain_epochs + len(labelled) * options.epochs
        with Logger(comm, steps, json=Path(options.out) / "log.jsonl", formats={"accuracy": ".1%"}) as log:
            log.print(f"{len(images)} images, {comm.size} rank(s) as {grid!r}")

            def note(step: Any) -> None:
                log.step(**step.values())

            history = MNIST.pretrain(model, train, stacks=stacks, progress=note)
            for number, epochs in zip(stacks, history, strict=True):
                for epoch, cost in enumerate(epochs):
                    parts = {"reconstruction": cost.reconstruction, "sparsity": cost.sparsity}
                    log.epoch(stack=number, pretraining=epoch, **parts, cost=cost.total)
            costs = MNIST.fine_tune(model, labelled, epochs=options.epochs, progress=note, **schedule)
            log.epoch(epoch=options.epochs, cost=costs[-1], accuracy=accuracy(model, test))

        best = spot_check(model, shares(test, grid))
        state = torchmn.full_state_dict(model)
        if comm.rank == 0:
            for unit in best:
                print(f"digit {unit.label}: unit {unit.unit}, area under the curve {unit.auc:.3f}")
            plain = SparseAutoencoder(dtype=dtype)
            plain.load_state_dict(state)
            units = [unit.unit for unit in best]
            for path in visualize(plain, test.images[:10], options.out, units, steps=5 if options.quick else 100):
                print(path)


if __name__ == "__main__":
    main()
