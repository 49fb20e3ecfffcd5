"""What can go wrong with checkpoints."""

from torchmn.errors import TorchMNError


class CheckpointError(TorchMNError):
    """State that can not be stored, written, read or loaded; raised on every rank."""


class Broken(Exception):
    """A checkpoint that can not be read as it was written. The loader catches it, says so and looks further."""
