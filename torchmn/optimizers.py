"""The names of ChainerMN's `optimizers`; they are those of torchmn.optim."""

from torchmn.optim import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]
