"""Data-parallel training, a parallel model, and communication, as a user with strict type checks writes them."""
# pyright: strict, reportUnknownMemberType=false
# That of torch is off: `Tensor.backward` has no types.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn import functions
from torchmn.testing import ranks
from torchmn.training import Logger, Sum


class Ring(nn.Module):
    """Adds the mean of what all ranks have."""

    def __init__(self, comm: torchmn.Communicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return x + functions.allreduce(self.comm, x) / self.comm.size


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> dict[str, object]:
    correct = sum(int((model(x).argmax(1) == t).sum()) for x, t in loader)
    return {"correct": Sum(correct)}


def train(comm: torchmn.Communicator, weights: Path | None = None) -> float:
    images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    part = torchmn.scatter_dataset(TensorDataset(images, labels), comm, shuffle=True, seed=0)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(part, batch_size=5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), Ring(comm))
    if weights is not None:
        left_out = torchmn.load_weights(model, weights, comm, strict=False)
        assert not left_out.missing_keys
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    checkpointer = torchmn.create_multi_node_checkpointer("program", comm, Path("checkpoints"))
    step = checkpointer.maybe_load(model=model, optimizer=optimizer) or 0
    with Logger(comm, steps=len(loader)) as log:
        for x, t in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), t)
            loss.backward()
            optimizer.step()
            log.step(loss=loss)
            step += 1
    checkpointer.save(step, model=model, optimizer=optimizer)
    result = torchmn.create_multi_node_evaluator(evaluate, comm)(model, loader)
    return float(result["correct"])


def tiles(comm: torchmn.Communicator) -> dict[str, Tensor]:
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    model = torchmn.parallelize(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)), grid, mode="halopar")
    torchmn.clip_grad_norm_(model, 1.0)
    first: nn.Module = model[0]
    print(first, torchmn.parallel_summary(model), grid.sizes["height"])
    return torchmn.full_state_dict(model)


def exchange(comm: torchmn.Communicator) -> list[Tensor]:
    total: Tensor = comm.allreduce(torch.ones(3), op="max")
    gathered: Sequence[Tensor] = comm.allgather(total)
    names: list[str] = comm.allgather_obj(f"rank {comm.rank}")
    half = comm.split(comm.rank % 2)
    if half is not None:
        half.barrier()
    try:
        comm.send(total, (comm.rank + 1) % comm.size)
        received = comm.recv((comm.rank - 1) % comm.size)
    except torchmn.TorchMNError as error:
        raise RuntimeError(names) from error
    return [*gathered, received] if isinstance(received, Tensor) else list(gathered)


def pipeline(comm: torchmn.Communicator) -> torchmn.MultiNodeChainList:
    chain = torchmn.MultiNodeChainList(comm, microbatches=2)
    chain.add_link(nn.Linear(4, 4), rank_in=None, rank_out=1)
    return chain


@ranks(1, 2)
def test_training(comm: torchmn.Communicator) -> None:
    assert train(comm) >= 0


def main() -> None:
    with torchmn.create_communicator() as comm:
        torchmn.init_process_group(comm)
        print(train(comm), tiles(comm), exchange(comm), pipeline(comm))
    print(torchmn.run_threads(lambda comm: comm.rank, 3))


if __name__ == "__main__":
    main()
