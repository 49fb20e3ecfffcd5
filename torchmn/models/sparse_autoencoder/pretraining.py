"""Greedy pretraining of a sparse autoencoder: stack after stack, without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.models.sparse_autoencoder import tiles
from torchmn.models.sparse_autoencoder.batches import Batches, images_of, iterator_problem, labels_of
from torchmn.models.sparse_autoencoder.gradients import Gradients, gradients, has_closed_form
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder, Stack
from torchmn.models.sparse_autoencoder.placement import Placement
from torchmn.nn.local_filters.batch_last import as_batch_last
from torchmn.nn.local_filters.local_filter import unit_norm_
from torchmn.sharded.tensor import ShardedTensor


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
    history = []
    told = placement.any_rank(progress is not None)  # costs of single steps are summed only if somebody wants them
    for epoch in range(epochs):
        sums, at = torch.zeros(3, dtype=torch.float64), -1
        for at, batch in enumerate(batches):
            x = stack_inputs(model, placement.part(images_of(batch), labels_of(batch)), number)
            here = pretraining_step(model.stacks[number], x, model.sparsity, learning_rate, placement)
            if told:
                here = placement.sum_over_all(here)
            sums += here
            if progress is not None:
                progress(PretrainingProgress(number, epoch, at, _cost(here)))
        # A rank with fewer batches would go on with the next epoch while others are still in this one.
        placement.agree("an epoch of pretrain", batches=at + 1)
        history.append(_cost(sums if told else placement.sum_over_all(sums)))
    return history


def _cost(sums: Tensor) -> PretrainingCost:
    reconstruction, sparsity, images = sums.tolist()
    return PretrainingCost(reconstruction / max(images, 1.0), sparsity / max(images, 1.0))


@torch.no_grad()
def stack_inputs(model: SparseAutoencoder, x: Tensor, number: int) -> Tensor:
    """The inputs of stack `number` from images: on tiles all that this rank's filters see, with the halo."""
    if tiles.runs_on_tiles(model, x) and has_closed_form(model.stacks[number]):
        return tiles.inputs_with_halo(model, x, number)  # type: ignore[arg-type]  (a ShardedTensor)
    return model.features(x, number)


def pretraining_step(
    stack: Stack, x: Tensor, sparsity: float, learning_rate: float, placement: Placement | None = None
) -> Tensor:
    """One update of the stack's filters from `stack_inputs`.

    Gives this rank's share of the cost before it: (reconstruction, sparsity, images), whose sum over all ranks,
    `placement.sum_over_all`, is that of all images.

    Both gradients are taken at the old filters. The decoder moves first and is renormalised, then the encoder: with
    tied filters, these are two updates of the same tensor, one after the other.
    """
    placement = placement or Placement(stack, (stack.filter.in_maps, *stack.filter.in_size))
    closed = not isinstance(x, ShardedTensor) and has_closed_form(stack)
    found = gradients(stack, as_batch_last(x), sparsity) if closed else _gradients_by_autograd(stack, x, sparsity)
    count = placement.sum_over_copies(torch.tensor([float(x.shape[0])], dtype=torch.float64)).item()
    filters = stack.filter
    with torch.no_grad():
        for weight, gradient in ((filters.decoding_weight(None), found.decoder), (filters.weight, found.encoder)):
            weight.sub_(placement.sum_over_copies(gradient), alpha=learning_rate / max(count, 1.0))
            unit_norm_(weight)
    here = torch.stack([found.reconstruction, sparsity * found.pooled, found.pooled.new_tensor(x.shape[0])]).double()
    if placement.is_first_tile:
        return here
    # Every tile has the number of images; of ShardedTensors, it has the whole cost, too.
    here[0 if isinstance(x, ShardedTensor) else 2 :] = 0
    return here


def _gradients_by_autograd(stack: Stack, x: Tensor, sparsity: float) -> Gradients:
    """For any layers, and for tiles of which some are empty. The cost is that of whole images on every rank."""
    filters = stack.filter
    encoder = filters.weight
    # A second handle on it, so that with tied filters the gradient of decoding is told apart from that of encoding.
    decoder = filters.decoding_weight(None).detach().requires_grad_()
    y = filters(x)
    error = filters.transpose(y, decoder) - x
    reconstruction = 0.5 * (error * error).sum()
    pooled = stack.pool(y).sum()
    by_decoder, by_encoder = torch.autograd.grad(reconstruction + sparsity * pooled, [decoder, encoder])
    return Gradients(reconstruction.detach(), pooled.detach(), by_decoder, by_encoder)
