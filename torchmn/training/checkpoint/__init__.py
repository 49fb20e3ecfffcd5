"""Checkpoints of the state of all ranks: safetensors files and a JSON manifest, written atomically."""

from torchmn.training.checkpoint.checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer
from torchmn.training.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "MultiNodeCheckpointer", "create_multi_node_checkpointer"]
