"""Whole networks: the sparse autoencoder of local filters, its training and visualization, and small classifiers."""

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
