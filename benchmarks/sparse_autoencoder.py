"""Training of the MNIST sparse autoencoder on two ranks and on one; batches of 100 images, float32.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/sparse_autoencoder.py

  TorchMN                `halopar`: the image is cut into two tiles, and each rank has the filters of its positions
  TorchMN datapar        a replica on each rank, half of the images each
  one rank               the whole step on one rank with one thread, while the other rank sleeps
  no messages            TorchMN without exchanges and sums over ranks: the same local work with wrong values
  no messages, one core  the same on rank 0, while the other rank sleeps
  half the images        a plain model on each rank with half of the images, and no communication
`no messages, one core` shows how much work a tile has, `no messages` what two busy cores take from each other, and the
difference to `TorchMN` what messages cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from unittest import mock

import torch
from results import Results, arguments
from timing import alone, take_turns, two_ranks
from torch import Tensor, nn

import torchmn
from torchmn.models import MNIST, SparseAutoencoder
from torchmn.models.sparse_autoencoder.fine_tuning import fine_tuning_step
from torchmn.models.sparse_autoencoder.placement import Placement
from torchmn.models.sparse_autoencoder.pretraining import pretraining_step, stack_inputs

MakeStep = Callable[..., Callable[[], object]]


def fine_tuning(model: SparseAutoencoder, x: Tensor, labels: Tensor, messages: bool = True) -> Callable[[], object]:
    """A step of the whole network: forward, backward, update, renormalisation."""
    placement = Placement(model, model.in_shape)
    updates = placement if messages else Placement(nn.Module(), model.in_shape)
    optimizer = updates.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return lambda: fine_tuning_step(model, optimizer, placement.shard(x), labels)


def pretraining(number: int) -> MakeStep:
    """Steps of one stack, with a forward of the stacks below it."""

    def make(model: SparseAutoencoder, x: Tensor, labels: Tensor, messages: bool = True) -> Callable[[], None]:
        placement = Placement(model, model.in_shape)

        def step() -> None:
            inputs = stack_inputs(model, placement.shard(x), number)
            pretraining_step(model.stacks[number], inputs, model.sparsity, 0.01, placement)

        return step

    return make


STEPS: dict[str, MakeStep] = {
    "fine-tuning": fine_tuning,
    **{f"pretraining, stack {number}": pretraining(number) for number in range(len(MNIST.kernel))},
}


class OwnBytes(NamedTuple):
    """Replaces an exchange with other ranks: each message that this rank would receive is the one that it sends."""

    outgoing: Mapping[int, Tensor]
    incoming: Mapping[int, int]

    def received(self) -> dict[int, Tensor]:
        messages = {}
        for peer, nbytes in self.incoming.items():
            messages[peer] = torch.zeros(nbytes, dtype=torch.uint8)
            common = min(nbytes, self.outgoing[peer].numel())
            messages[peer][:common] = self.outgoing[peer][:common]
        return messages


def without_messages(step: Callable[[], object]) -> Callable[[], None]:
    """The step of a model on tiles without communication: halos are this rank's rows, sums those of this rank."""

    def run() -> None:
        with (
            mock.patch.object(
                torchmn.Communicator, "exchange", lambda comm, name, sent, sizes, *_: OwnBytes(sent, sizes)
            ),
            mock.patch.object(torchmn.Communicator, "allreduce", lambda comm, x, *_, **__: x.clone()),
        ):
            step()

    return run


def main() -> None:
    options = arguments(__doc__, rounds=25).parse_args()
    comm = two_ranks()
    torch.manual_seed(0)
    images, labels = torch.rand(100, 1, 28, 28), torch.randint(10, (100,))
    plain: SparseAutoencoder = MNIST.model()
    grids = torchmn.ProcessGrid(comm, height=comm.size), torchmn.ProcessGrid(comm, data=comm.size)
    tiled: SparseAutoencoder = torchmn.parallelize(plain, grids[0], "halopar")  # type: ignore[assignment]
    replica: SparseAutoencoder = torchmn.parallelize(plain, grids[1], "datapar")  # type: ignore[assignment]
    tile, half, half_labels = (
        tensor.tensor_split(comm.size, dim=dim)[comm.rank].contiguous()
        for tensor, dim in ((images, 2), (images, 0), (labels, 0))
    )
    results = Results("step")
    for name, make in STEPS.items():
        silent = without_messages(make(tiled, tile, labels, messages=False))
        contenders = {
            "TorchMN": make(tiled, tile, labels),
            "TorchMN datapar": make(replica, half, half_labels),
            "one rank": alone(make(plain, images, labels)),
            "no messages": silent,
            "no messages, one core": alone(silent),
            "half the images": make(plain, half, half_labels),
        }
        results.add(name, take_turns(contenders, options))
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
