"""Whole networks: the sparse autoencoder of local filters, its training and visualization, and small classifiers."""

from typing import TYPE_CHECKING

from torchmn.models.sparse_autoencoder.batches import LabelledBatches
from torchmn.models.sparse_autoencoder.best_units import BestUnit, spot_check
from torchmn.models.sparse_autoencoder.configurations import (
    CIFAR10,
    MNIST,
    Configuration,
    ConvnetDist,
    GBDist,
    MLPDist,
    convnet,
    mlp,
)
from torchmn.models.sparse_autoencoder.fine_tuning import FineTuningProgress, Momentum, fine_tune
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder
from torchmn.models.sparse_autoencoder.pretraining import PretrainingCost, PretrainingProgress, pretrain
from torchmn.models.sparse_autoencoder.visualization import optimal_stimuli, visualize
from torchmn.other_spellings import module_attribute

__all__ = [
    "CIFAR10",
    "MNIST",
    "BestUnit",
    "Configuration",
    "ConvnetDist",
    "FineTuningProgress",
    "GBDist",
    "LabelledBatches",
    "MLPDist",
    "Momentum",
    "PretrainingCost",
    "PretrainingProgress",
    "SparseAutoencoder",
    "convnet",
    "fine_tune",
    "mlp",
    "optimal_stimuli",
    "pretrain",
    "spot_check",
    "visualize",
]


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        return module_attribute("models", name, () if name.startswith("_") else (name,))
