"""Whole networks: the sparse autoencoder of local filters, its training, and looks inside it."""

from torchmn.models.batches import LabelledBatches
from torchmn.models.best_units import BestUnit, spot_check
from torchmn.models.configurations import CIFAR10, MNIST, Configuration
from torchmn.models.distributed import ConvnetDist, GBDist, MLPDist, convnet, mlp
from torchmn.models.fine_tuning import FineTuningProgress, Momentum, fine_tune
from torchmn.models.pretraining import PretrainingCost, PretrainingProgress, pretrain
from torchmn.models.sparse_autoencoder import SparseAutoencoder
from torchmn.models.visualization import optimal_stimuli, visualize

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
