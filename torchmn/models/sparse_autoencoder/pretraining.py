"""pretrain: greedy layer-wise pretraining of a sparse autoencoder, stack by stack, without labels."""

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
    """The cost of pretraining per image, over whole images and the batches of all ranks.

    Attributes:
        reconstruction: ½‖x̂ - x‖².
        sparsity: λ·Σ pooled.
    """

    reconstruction: float
    sparsity: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.reconstruction + self.sparsity


@dataclass(frozen=True)
class PretrainingProgress:
    """One step of pretraining: stack, epoch and batch, all counted from 0, and the cost of the batch."""

    stack: int
    epoch: int
    batch: int
    cost: PretrainingCost

    def values(self) -> dict[str, Any]:
        """Returns values for a log: `progress=lambda step: log.step(**step.values())`."""
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
    """Trains the filters of each stack in turn to reconstruct their input sparsely. Stacks below are frozen.

    A parallel model takes the same batches as in training: whole images or this rank's tiles, and different images on
    each replica. All ranks must call it, with equally many batches.

    Args:
        model: the network.
        batches: of images or of (images, labels), iterated `epochs` times for each stack.
        epochs: number of epochs for each stack.
        learning_rate: of gradient descent.
        stacks: which stacks to train, counted from 0, in this order; by default all, from the first to the last.
        progress: called after every step.

    Returns:
        The mean cost over all ranks, by stack, in the order of `stacks`, and by epoch.

    Raises:
        ArgumentError: on every rank, if arguments are wrong or differ between ranks.
    """
    placement = Placement(model, model.in_shape)
    numbers = tuple(range(len(model.stacks)) if stacks is None else stacks)
    problem = iterator_problem(batches)
    for number in numbers:
        if number not in range(len(model.stacks)):
            problem = f"expected stacks from 0 to {len(model.stacks) - 1}, got {number!r}"
    settings = {"epochs": epochs, "learning_rate": learning_rate, "stacks": numbers, "sparsity": model.sparsity}
    placement.agree("pretrain", problem, **settings)
    return [_pretrain_stack(model, placement, n, batches, epochs, learning_rate, progress) for n in numbers]


def _pretrain_stack(model, placement, number, batches, epochs, learning_rate, progress) -> list[PretrainingCost]:
    history = []
    sums_each_step = placement.any_rank(progress is not None)
    for epoch in range(epochs):
        sums, at = torch.zeros(3, dtype=torch.float64), -1
        for at, batch in enumerate(batches):
            x = stack_inputs(model, placement.shard(images_of(batch), labels_of(batch)), number)
            step_sums = pretraining_step(model.stacks[number], x, model.sparsity, learning_rate, placement)
            if sums_each_step:
                step_sums = placement.sum_over_all(step_sums)
            sums += step_sums
            if progress is not None:
                progress(PretrainingProgress(number, epoch, at, _cost(step_sums)))
        # A rank with fewer batches would start the next epoch while other ranks are still in this one.
        placement.agree("an epoch of pretrain", batches=at + 1)
        history.append(_cost(sums if sums_each_step else placement.sum_over_all(sums)))
    return history


def _cost(sums: Tensor) -> PretrainingCost:
    reconstruction, sparsity, images = sums.tolist()
    return PretrainingCost(reconstruction / max(images, 1.0), sparsity / max(images, 1.0))


@torch.no_grad()
def stack_inputs(model: SparseAutoencoder, x: Tensor, number: int) -> Tensor:
    """Returns the inputs of stack `number` for images `x`; on tiles with the halo that this rank's filters need."""
    closed = has_closed_form(model.stacks[number])
    if closed and isinstance(x, ShardedTensor) and tiles.runs_on_tiles(model, x):
        return tiles.inputs_with_halo(model, x, number)
    return model.features(x, number)


def pretraining_step(
    stack: Stack, x: Tensor, sparsity: float, learning_rate: float, placement: Placement | None = None
) -> Tensor:
    """Makes one update of a stack's filters.

    Both gradients are computed with the old filters. The decoder is updated and normalised first, then the encoder:
    with tied filters, these are two consecutive updates of the same tensor.

    Args:
        stack: the stack.
        x: its inputs, from `stack_inputs`.
        sparsity: λ.
        learning_rate: of the update.
        placement: of the model; by default that of one rank.

    Returns:
        This rank's contribution to the cost before the update, (reconstruction, sparsity, images): its sum over ranks,
        `placement.sum_over_all`, is that of all images.
    """
    placement = placement or Placement(stack, (stack.filter.in_maps, *stack.filter.in_size))
    closed = not isinstance(x, ShardedTensor) and has_closed_form(stack)
    found = gradients(stack, as_batch_last(x), sparsity) if closed else _gradients_by_autograd(stack, x, sparsity)
    count = placement.sum_over_replicas(torch.tensor([float(x.shape[0])], dtype=torch.float64)).item()
    filters = stack.filter
    with torch.no_grad():
        for weight, gradient in ((filters.decoding_weight(None), found.decoder), (filters.weight, found.encoder)):
            weight.sub_(placement.sum_over_replicas(gradient), alpha=learning_rate / max(count, 1.0))
            unit_norm_(weight)
    here = torch.stack([found.reconstruction, sparsity * found.pooled, found.pooled.new_tensor(x.shape[0])]).double()
    if placement.is_first_tile:
        return here
    # Every tile counts the same images; with ShardedTensors, every rank has the cost of whole images too.
    here[0 if isinstance(x, ShardedTensor) else 2 :] = 0
    return here


def _gradients_by_autograd(stack: Stack, x: Tensor, sparsity: float) -> Gradients:
    """Returns cost and gradients for any layers, and if some tiles are empty. The cost is that of whole images."""
    filters = stack.filter
    encoder = filters.weight
    # A separate leaf, so that with tied filters the gradients of decoder and encoder are separate.
    decoder = filters.decoding_weight(None).detach().requires_grad_()
    y = filters(x)
    error = filters.transpose(y, decoder) - x
    reconstruction = 0.5 * (error * error).sum()
    pooled = stack.pool(y).sum()
    by_decoder, by_encoder = torch.autograd.grad(reconstruction + sparsity * pooled, [decoder, encoder])
    return Gradients(reconstruction.detach(), pooled.detach(), by_decoder, by_encoder)
