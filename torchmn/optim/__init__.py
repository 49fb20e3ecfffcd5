"""The multi-node optimizer."""

from torchmn.optim.create import create_multi_node_optimizer
from torchmn.optim.multi_node import MultiNodeOptimizer

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]
