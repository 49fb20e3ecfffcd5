"""Fine-tuning of a pretrained sparse autoencoder with labels: the classifier first, then everything."""

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
    """A momentum that goes in equal steps from `first`, in epoch 0, to `last`, in epoch `epochs` and after."""

    first: float = 0.99
    last: float = 0.90
    epochs: int = 5

    def __call__(self, epoch: int) -> float:
        return self.first + (self.last - self.first) * min(epoch / self.epochs, 1.0)


@dataclass(frozen=True)
class FineTuningProgress:
    """One step: in which epoch, at which batch, whether only the classifier learns, and the cost per image."""

    epoch: int
    batch: int
    classifier_only: bool
    cost: float

    def values(self) -> dict[str, Any]:
        """For a log: `progress=lambda step: log.step(**step.values())`."""
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
    """Train with labels: the classifier alone for `initial_epochs` of the `epochs`, then the whole network.

    batches: of (images, labels), gone through `epochs` times
    momentum: of the classifier, by epoch, such as `Momentum()`; the filters have none
    progress: called after every step

    Gives each epoch's mean cost per image: the binary cross entropy of all classes' logistic outputs, summed. Filters
    are renormalised after every update. For parallel models, what `pretrain` says holds here too.
    """
    placement = Placement(model, model.in_shape)
    momenta = tuple(momentum(epoch) if momentum else 0.0 for epoch in range(epochs))
    problem = iterator_problem(batches)
    if initial_epochs > epochs:
        problem = f"{initial_epochs} initial_epochs are more than all {epochs} epochs"
    settings = {"epochs": epochs, "initial_epochs": initial_epochs, "learning_rate": learning_rate, "momentum": momenta}
    placement.agree("fine_tune", problem, **settings)
    optimizer = placement.optimizer(model, _optimizer(model, learning_rate))
    history = []
    for epoch in range(epochs):
        optimizer.param_groups[0]["momentum"] = momenta[epoch]
        classifier_only = epoch < initial_epochs
        total, images, at = 0.0, 0.0, -1
        for at, (x, labels) in enumerate(batches):
            mine = fine_tuning_step(model, optimizer, placement.part(x, labels), labels, classifier_only)
            here = torch.tensor([mine * len(labels), len(labels)], dtype=torch.float64)
            cost_sum, count = placement.sum_over_copies(here).tolist()
            total, images = total + cost_sum, images + count
            if progress is not None:
                progress(FineTuningProgress(epoch, at, classifier_only, cost_sum / max(count, 1.0)))
        placement.agree("an epoch of fine_tune", batches=at + 1)
        history.append(total / max(images, 1.0))
    return history


def classification_cost(logits: Tensor, labels: Tensor) -> Tensor:
    """The binary cross entropy of logistic outputs with one-hot labels: summed over classes, mean over images."""
    targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / max(len(labels), 1)


def _optimizer(model: SparseAutoencoder, learning_rate: float) -> torch.optim.SGD:
    filters = [stack.filter.weight for stack in model.stacks]
    return torch.optim.SGD([{"params": [model.classifier.weight]}, {"params": filters}], lr=learning_rate)


def fine_tuning_step(
    model: SparseAutoencoder, optimizer: Any, x: Tensor, labels: Tensor, classifier_only: bool = False
) -> float:
    """One update from `placement.part(images)`; gives the cost per image of this rank's batch before it.

    optimizer: one of `placement.optimizer`
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
