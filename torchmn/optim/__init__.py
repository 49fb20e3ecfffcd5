"""The multi-node optimizer."""

from torchmn.optim.multi_node import MultiNodeOptimizer, create_multi_node_optimizer

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]
