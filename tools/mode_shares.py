"""Measures what each rank keeps of weights and activations in each mode: the table of docs/which-mode.md.

    .venv/bin/python tools/mode_shares.py

Activations are the tensors that autograd keeps for backward, without weights. Memory that several of them share counts
once. Shares are of what one rank keeps for the same global batch; of the ranks, the one that keeps most is shown.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import torchmn

RANKS = 4
BATCH = 16
GRIDS: dict[str, Callable[[torchmn.Communicator], torchmn.ProcessGrid]] = {
    "datapar": lambda comm: torchmn.ProcessGrid(comm, data=4),
    "modelpar": torchmn.ProcessGrid.squarest,
    "halopar": torchmn.ProcessGrid.squarest,
    "halodatapar": lambda comm: torchmn.ProcessGrid(comm, data=2, height=2),
}
MODES = (*GRIDS, "MultiNodeChainList")


def mlp() -> nn.Sequential:
    """Four equal layers, and a small last one."""
    hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


def convolutions() -> nn.Sequential:
    """Four convolutions on images of 64 x 64, and the mean of each channel."""
    hidden = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), *hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "MLP": (mlp, (1, 16, 16)),
    "convolutions": (convolutions, (1, 64, 64)),
}


class KeptForBackward:
    """A context that adds up the bytes that autograd keeps of other tensors than `weights`."""

    def __init__(self, weights: set[int]):
        self._weights = weights
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    @property
    def nbytes(self) -> int:
        return sum(self._kept.values())

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return x

    def __enter__(self) -> KeptForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)


def kept(model: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """Returns the bytes of the model's weights, and of what its forward keeps for backward."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with KeptForBackward(weights) as activations:
        output = model(*inputs)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    output.sum().backward()  # all ranks: other ranks may wait for its messages
    return nbytes, activations.nbytes


def kept_in(mode: str, make: Callable[[], nn.Sequential], images: Tensor) -> Callable[[torchmn.Communicator], tuple]:
    """Returns a function that returns `kept` of a rank."""
    whole = make()

    def on_rank(comm: torchmn.Communicator) -> tuple[int, int]:
        if mode == "MultiNodeChainList":
            chain = torchmn.MultiNodeChainList.from_sequential(whole, comm, balance="parameters")
            return kept(chain, images)
        grid = GRIDS[mode](comm)
        model = torchmn.parallelize(whole, grid, mode, input_shape=tuple(images.shape[1:]))
        if mode == "modelpar":
            return kept(model, images)
        part = torchmn.data.scatter_regions((images, torch.zeros(len(images))), grid)
        return kept(model, torch.stack([image for image, _ in part]))

    return on_rank


def shares(mode: str, name: str) -> tuple[float, float]:
    """Returns the largest share of weights and of activations that a rank keeps."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    images = torch.randn(BATCH, *shape)
    weights, activations = kept(make(), images)
    ranks = torchmn.run_threads(kept_in(mode, make, images), RANKS)
    return max(rank[0] for rank in ranks) / weights, max(rank[1] for rank in ranks) / activations


def row(mode: str) -> str:
    """Returns a row of the table."""
    numbers = [f"{share:.0%}".replace("%", " %") for name in MODELS for share in shares(mode, name)]
    return f"| `{mode}` | {' | '.join(numbers)} |"


if __name__ == "__main__":
    for each in MODES:
        print(row(each))
