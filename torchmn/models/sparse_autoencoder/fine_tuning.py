"""fine_tune: trains a pretrained sparse autoencoder with labels, first the classifier alone, then the whole network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.models.sparse_autoencoder.batches import Batches, iterator_problem
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder
from torchmn.models.sparse_autoencoder.placement import Placement


@dataclass(frozen=True)
class Momentum:
    """A momentum that changes in equal steps from `first`, in epoch 0, to `last`, from epoch `epochs` on."""

    first: float = 0.99
    last: float = 0.90
    epochs: int = 5

    def __call__(self, epoch: int) -> float:
        return self.first + (self.last - self.first) * min(epoch / self.epochs, 1.0)


@dataclass(frozen=True)
class FineTuningProgress:
    """One step of fine-tuning.

    Attributes:
        epoch, batch: counted from 0.
        classifier_only: whether only the classifier is trained.
        cost: per image, of the batches of all ranks.
    """

    epoch: int
    batch: int
    classifier_only: bool
    cost: float

    def values(self) -> dict[str, Any]:
        """Returns values for a log: `progress=lambda step: log.step(**step.values())`."""
        return {"epoch": self.epoch, "learns": "classifier" if self.classifier_only else "all", "cost": self.cost}


def fine_tune(
    model: SparseAutoencoder,
    batches: Batches,
    *,
    epochs: int = 4,
    initial_epochs: int = 1,
    learning_rate: float = 0.1,
    momentum: Callable[[int], float] | None = None,
    progress: Callable[[FineTuningProgress], object] | None = None,
) -> list[float]:
    """Trains with labels: the classifier alone for `initial_epochs` of the `epochs`, then the whole network.

    Filters are normalised after every update. For parallel models see `pretrain`.

    Args:
        model: the pretrained network.
        batches: of (images, labels), iterated once per epoch.
        epochs: number of all epochs.
        initial_epochs: epochs in which only the classifier is trained.
        learning_rate: of SGD.
        momentum: of the classifier, by epoch, such as `Momentum()`; filters have none.
        progress: called after every step.

    Returns:
        The mean cost per image of each epoch: the binary cross entropy of the logistic outputs, summed over classes.

    Raises:
        ArgumentError: on every rank, if arguments are wrong or differ between ranks.
    """
    placement = Placement(model, model.in_shape)
    momenta = tuple(momentum(epoch) if momentum else 0.0 for epoch in range(epochs))
    problem = iterator_problem(batches)
    if initial_epochs > epochs:
        problem = f"expected at most as many initial_epochs as epochs, {epochs}, got {initial_epochs}"
    settings = {"epochs": epochs, "initial_epochs": initial_epochs, "learning_rate": learning_rate, "momentum": momenta}
    placement.agree("fine_tune", problem, **settings)
    optimizer = placement.optimizer(model, _optimizer(model, learning_rate))
    history = []
    for epoch in range(epochs):
        optimizer.param_groups[0]["momentum"] = momenta[epoch]
        total, images, at, classifier_only = 0.0, 0.0, -1, epoch < initial_epochs
        for at, (x, labels) in enumerate(batches):
            cost = fine_tuning_step(model, optimizer, placement.shard(x, labels), labels, classifier_only)
            cost_sum, count = _sums(placement, cost, len(labels))
            total, images = total + cost_sum, images + count
            if progress is not None:
                progress(FineTuningProgress(epoch, at, classifier_only, cost_sum / max(count, 1.0)))
        placement.agree("an epoch of fine_tune", batches=at + 1)
        history.append(total / max(images, 1.0))
    return history


def _sums(placement: Placement, cost: float, images: int) -> tuple[float, float]:
    """Returns the cost summed over the images of all ranks along `data`, and their number."""
    cost_sum, count = placement.sum_over_replicas(torch.tensor([cost * images, images], dtype=torch.float64)).tolist()
    return cost_sum, count


def classification_cost(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the binary cross entropy of logistic outputs with one-hot labels, summed over classes, mean of images."""
    targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / max(len(labels), 1)


def _optimizer(model: SparseAutoencoder, learning_rate: float) -> torch.optim.SGD:
    filters = [stack.filter.weight for stack in model.stacks]
    return torch.optim.SGD([{"params": [model.classifier.weight]}, {"params": filters}], lr=learning_rate)


def fine_tuning_step(
    model: SparseAutoencoder, optimizer: Any, x: Tensor, labels: Tensor, classifier_only: bool = False
) -> float:
    """Makes one update, and returns the cost per image of this rank's batch before it.

    Args:
        model: the network.
        optimizer: from `placement.optimizer`.
        x: images from `placement.shard`.
        labels: (batch,).
        classifier_only: whether only the classifier is trained.

    Returns:
        The cost.
    """
    optimizer.zero_grad()
    with torch.set_grad_enabled(not classifier_only):
        features = model.features(x)
    cost = classification_cost(model.classifier(features.flatten(1)), labels)
    cost.backward()
    optimizer.step(weight=len(labels))
    if not classifier_only:
        model.unit_norm_()
    return cost.item()
