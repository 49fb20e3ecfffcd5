"""Greedy pretraining of a sparse autoencoder: stack after stack, without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.models.batches import Batches, images_of, iterator_problem
from torchmn.models.placement import Placement
from torchmn.models.sparse_autoencoder import SparseAutoencoder, Stack
from torchmn.nn.local_filter import unit_norm_


@dataclass(frozen=True)
class PretrainingCost:
    """½‖x̂ - x‖² and λ·Σ pooled, per image, of the whole images and the batches of all ranks."""

    reconstruction: float
    sparsity: float

    @property
    def total(self) -> float:
        return self.reconstruction + self.sparsity


@dataclass(frozen=True)
class PretrainingProgress:
    """One step: of which stack, in which epoch, at which batch (all counted from 0), and what it cost."""

    stack: int
    epoch: int
    batch: int
    cost: PretrainingCost

    def values(self) -> dict[str, Any]:
        """For a log: `progress=lambda step: log.step(**step.values())`."""
        parts = {"reconstruction": self.cost.reconstruction, "sparsity": self.cost.sparsity}
        return {"stack": self.stack, "pretraining": self.epoch, **parts, "cost": self.cost.total}


def pretrain(
    model: SparseAutoencoder,
    batches: Batches,
    *,
    epochs: int = 2,
    learning_rate: float = 0.01,
    stacks: Sequence[int] | None = None,
    progress: Callable[[PretrainingProgress], object] | None = None,
) -> list[list[PretrainingCost]]:
    """Train the filters of each stack in turn to reconstruct their input sparsely; gives each epoch's mean cost.

    batches: of images or of (images, labels), gone through `epochs` times for each stack
    stacks: which of them, counted from 0, in this order; all, from the first to the last, if not given
    progress: called after every step

    The result is indexed by stack, in the order of `stacks`, and epoch. Stacks below the one that learns are frozen.

    A parallel model takes its batches as in training: whole images or this rank's tiles, and each copy of the model
    its own images. All ranks must call it, with equally many batches; every rank gets the costs of all together.
    """
    placement = Placement(model, model.in_shape)
    numbers = tuple(range(len(model.stacks)) if stacks is None else stacks)
    problem = iterator_problem(batches)
    for number in numbers:
        if number not in range(len(model.stacks)):
            problem = f"no stack {number!r}: the model has {len(model.stacks)}, counted from 0"
    settings = {"epochs": epochs, "learning_rate": learning_rate, "stacks": numbers, "sparsity": model.sparsity}
    placement.agree("pretrain", problem, **settings)
    return [_pretrain_stack(model, placement, n, batches, epochs, learning_rate, progress) for n in numbers]


def _pretrain_stack(model, placement, number, batches, epochs, learning_rate, progress) -> list[PretrainingCost]:
    stack, history = model.stacks[number], []
    for epoch in range(epochs):
        sums, images, at = torch.zeros(2, dtype=torch.float64), 0, -1
        for at, batch in enumerate(batches):
            with torch.no_grad():
                x = model.features(placement.part(images_of(batch)), number)
            cost, count = pretraining_step(stack, x, model.sparsity, learning_rate, placement.sum_over_copies)
            sums += count * torch.tensor([cost.reconstruction, cost.sparsity], dtype=torch.float64)
            images += count
            if progress is not None:
                progress(PretrainingProgress(number, epoch, at, cost))
        # A rank with fewer batches would go on with the next epoch while others are still in this one.
        placement.agree("an epoch of pretrain", batches=at + 1)
        history.append(PretrainingCost(*(sums / max(images, 1)).tolist()))
    return history


def pretraining_step(
    stack: Stack,
    x: Tensor,
    sparsity: float,
    learning_rate: float,
    sum_over_copies: Callable[[Tensor], Tensor] = lambda values: values,
) -> tuple[PretrainingCost, int]:
    """One update of the stack's filters from its inputs `x`; gives the cost before it and the number of images.

    Both gradients are taken at the old filters. The decoder moves first and is renormalised, then the encoder: with
    tied filters, these are two updates of the same tensor, one after the other. With copies of the model on other
    ranks, cost and number are those of all copies' images.
    """
    filters = stack.filter
    encoder = filters.weight
    own = encoder if filters.decoder_weight is None else filters.decoder_weight
    # A second handle on it, so that with tied filters the gradient of decoding is told apart from that of encoding.
    decoder = own.detach().requires_grad_()
    y = filters(x)
    error = filters.transpose(y, decoder) - x
    reconstruction = 0.5 * (error * error).sum()
    sparse = sparsity * stack.pool(y).sum()
    gradients = torch.autograd.grad(reconstruction + sparse, [decoder, encoder])
    here = torch.stack([reconstruction.detach(), sparse.detach(), reconstruction.new_tensor(x.shape[0])])
    sums = sum_over_copies(here.double()).tolist()
    images = max(sums[2], 1.0)
    with torch.no_grad():
        for weight, gradient in zip([own, encoder], gradients, strict=True):
            weight.sub_(sum_over_copies(gradient), alpha=learning_rate / images)
            unit_norm_(weight)
    return PretrainingCost(sums[0] / images, sums[1] / images), int(sums[2])
