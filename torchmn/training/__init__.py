"""Parts of a distributed training loop: evaluation, early stopping, statistics, logging, checkpoints."""

from torchmn.training.allreduce_persistent import AllreducePersistent
from torchmn.training.combined_metrics import Sum
from torchmn.training.early_stopping import MultiNodeEarlyStopping
from torchmn.training.evaluator import create_multi_node_evaluator
from torchmn.training.exact_data import without_repeats
from torchmn.training.generic_evaluator import GenericMultiNodeEvaluator
from torchmn.training.logger import Logger
from torchmn.training.observation import ObservationAggregator
from torchmn.training.torchmetrics_sync import synchronize_torchmetrics, torchmetrics_sync
from torchmn.training.weights import LoadedWeights, load_weights

__all__ = [
    "AllreducePersistent",
    "GenericMultiNodeEvaluator",
    "LoadedWeights",
    "Logger",
    "MultiNodeEarlyStopping",
    "ObservationAggregator",
    "Sum",
    "create_multi_node_evaluator",
    "load_weights",
    "synchronize_torchmetrics",
    "torchmetrics_sync",
    "without_repeats",
]
