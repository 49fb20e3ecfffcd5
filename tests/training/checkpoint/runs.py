"""A small training run with all kinds of state that a checkpoint must restore."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests._worlds.data import filled, numbers, plain_bytes, tensor

BATCH = 12
"""Divisible by 1, 2, 3 and 4 ranks."""


class Batches:
    """An endless, resumable iterator over shuffled batches of indices."""

    def __init__(self, count: int, seed: int = 0):
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> Tensor:
        if len(self.order) < BATCH:
            self.order = torch.randperm(self.count, generator=self.generator)
        batch, self.order = self.order[:BATCH], self.order[BATCH:]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]
        self.generator.set_state(state["generator"])


class Training:
    """Data-parallel training of a small model; `noise` adds numbers from the global random generators."""

    def __init__(self, comm, noise: bool = False):
        self.comm = comm
        self.noise = noise
        layers = [nn.Linear(4, 6), nn.Tanh(), *([nn.Dropout(0.5)] if noise else []), nn.Linear(6, 2)]
        self.model = filled(nn.Sequential(*layers).double(), 0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7], gamma=0.5)
        self.batches = Batches(5 * BATCH)
        self.data = tensor(numbers((5 * BATCH, 4), 1))

    @property
    def parts(self) -> dict[str, Any]:
        """The objects to save and load."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "iterator": self.batches,
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = self.data[next(self.batches)[self.comm.rank :: self.comm.size]]
            if self.noise:
                x = x + torch.randn(4, dtype=torch.float64) + np.random.standard_normal() + random.random()
            self.optimizer.zero_grad()
            self.model(x).pow(2).mean().backward()
            self.comm.multi_node_mean_grad(self.model)
            self.optimizer.step()
            self.scheduler.step()

    def result(self) -> dict[str, Any]:
        """Returns every bit of the state, and with `noise` the next number of every generator."""
        result: dict[str, Any] = {name: plain_bytes(x) for name, x in self.model.state_dict().items()}
        result |= {f"exp_avg {i}": plain_bytes(s["exp_avg"]) for i, s in self.optimizer.state_dict()["state"].items()}
        result["rate"] = self.optimizer.param_groups[0]["lr"]
        result["batch"] = next(self.batches).tolist()
        if self.noise:
            result["random"] = (torch.rand(1).item(), np.random.standard_normal(), random.gauss(0, 1))
        return result


def parameters(training: Training) -> np.ndarray:
    """Returns all parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()]).numpy()


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
