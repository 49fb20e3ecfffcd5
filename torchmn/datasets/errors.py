"""What goes wrong between a dataset and the files it comes from."""

from __future__ import annotations

from torchmn.errors import TorchMNError


class DatasetError(TorchMNError):
    """A dataset's file is missing, damaged or can not be fetched; the message names it and the way out."""
