"""Checkpoints of a run on many ranks: safetensors and a JSON manifest, whole or not there at all."""

from torchmn.training.checkpoint.checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer
from torchmn.training.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "MultiNodeCheckpointer", "create_multi_node_checkpointer"]
