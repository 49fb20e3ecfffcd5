"""The published sizes and schedules of the sparse autoencoder, for MNIST and CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchmn.models.fine_tuning import Momentum, fine_tune
from torchmn.models.pretraining import pretrain
from torchmn.models.sparse_autoencoder import SparseAutoencoder


@dataclass(frozen=True)
class Configuration:
    """A network and the schedule that trains it.

        model = MNIST.model()
        batches = LabelledBatches(train.images, train.labels, MNIST.batch_size)
        MNIST.pretrain(model, batches)
        MNIST.fine_tune(model, batches)

    Each method takes the arguments of the function it calls, in place of the configured ones.
    """

    in_maps: int = 1
    in_size: tuple[int, int] = (28, 28)
    maps: int = 8
    kernel: tuple[int, ...] = (4, 3, 3)
    pool: int = 3
    norm: int = 3
    classes: int = 10
    sparsity: float = 0.1
    batch_size: int = 100
    pretrain_epochs: int = 2
    pretrain_learning_rate: float = 0.01
    initial_epochs: int = 1
    epochs: int = 4
    learning_rate: float = 0.1
    momentum: Momentum = field(default_factory=Momentum)

    def model(self, **changes: Any) -> SparseAutoencoder:
        """A new network with random filters."""
        names = "in_maps", "in_size", "maps", "kernel", "pool", "norm", "classes", "sparsity"
        return SparseAutoencoder(len(self.kernel), **{name: getattr(self, name) for name in names} | changes)

    def pretrain(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> Any:
        """`pretrain` with this schedule."""
        schedule = {"epochs": self.pretrain_epochs, "learning_rate": self.pretrain_learning_rate}
        return pretrain(model, batches, **schedule | changes)

    def fine_tune(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> list[float]:
        """`fine_tune` with this schedule."""
        names = "epochs", "initial_epochs", "learning_rate", "momentum"
        return fine_tune(model, batches, **{name: getattr(self, name) for name in names} | changes)


MNIST = Configuration()
CIFAR10 = Configuration(in_maps=3, in_size=(32, 32), pretrain_epochs=1, pretrain_learning_rate=0.001)
