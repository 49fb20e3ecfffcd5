"""A training that is stopped within an epoch and resumed has the losses and bits of the uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests._worlds import ranks
from torchmn import create_multi_node_checkpointer
from torchmn.iterators import create_synchronized_iterator


class DropoutOfItsOwn(nn.Module):
    """Dropout with a private generator: ranks that are threads share the global one."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator) * 2

    def get_extra_state(self) -> Tensor:
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.generator.set_state(state)


class Training:
    """As in docs/data-parallel.md: scattered and shuffled data, a multi-node Adam, a schedule, dropout."""

    def __init__(self, comm, seed: int, options: dict[str, Any], in_threads: bool):
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(59, 6, generator=generator), torch.randint(3, (59,), generator=generator))
        share = torchmn.scatter_dataset(data, comm, shuffle=True, seed=3)
        loader = DataLoader(share, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        self.batches = create_synchronized_iterator(loader, comm)
        middle = DropoutOfItsOwn(seed + comm.rank) if in_threads else nn.Dropout(0.5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle, nn.Linear(8, 3))
        actual = torch.optim.Adam(self.model.parameters(), lr=0.05, amsgrad=True)
        self.optimizer = torchmn.create_multi_node_optimizer(actual, comm, model=self.model, **options)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=11)
        self._endless = self._forever()

    def _forever(self) -> Iterator[list[Tensor]]:
        while True:
            yield from self.batches

    @property
    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "schedule")
        return {name: getattr(self, name) for name in names} | {"iterator": self.batches}

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Returns loss and learning rate of each step."""
        log = []
        for _ in range(steps):
            x, t = next(self._endless)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), t)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            log.append((loss.item(), self.schedule.get_last_lr()[0]))
        self.optimizer.flush()
        return log

    def bits(self) -> dict[str, Tensor]:
        """Returns all state that the next step depends on."""
        found = {f"model {name}": x for name, x in self.model.state_dict().items()}
        for place, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer {place} {name}": x for name, x in state.items()}
        position = self.batches.state_dict()
        found |= {f"iterator {name}": torch.as_tensor(value) for name, value in position.items()}
        return {name: x.clone() for name, x in found.items()}


def check(comm, directory, options: dict[str, Any], in_threads: bool) -> None:
    if not in_threads:
        torch.manual_seed(comm.rank)
    whole = Training(comm, 0, options, in_threads)
    checkpointer = create_multi_node_checkpointer("run", comm, directory)
    whole.train(7)
    assert 0 < whole.batches.position < len(whole.batches), "the run should stop within an epoch"
    checkpointer.save(7, **whole.parts)
    rest = whole.train(9)
    expected = whole.bits()

    if not in_threads:
        torch.manual_seed(100 + comm.rank)
    resumed = Training(comm, 50, options, in_threads)
    assert checkpointer.maybe_load(**resumed.parts) == 7
    assert resumed.train(9) == rest
    found = resumed.bits()
    assert list(found) == list(expected)
    assert [name for name, x in expected.items() if not torch.equal(found[name], x)] == []
    assert len(set(rest)) == 9, "nothing was trained"


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"double_buffering": True}])
@ranks(1, 2, 3, 4, on="threads")
def test_with_dropout_from_a_private_generator(comm, tmp_path, options):
    check(comm, tmp_path, options, in_threads=True)


@ranks(1, on="solo")
@ranks(2, on="mpi")
def test_with_the_dropout_of_torch(comm, tmp_path):
    check(comm, tmp_path, {}, in_threads=False)
