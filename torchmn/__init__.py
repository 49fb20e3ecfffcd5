"""TorchMN: PyTorch across processes and machines, with the same numbers at any number of ranks."""

from torchmn import datasets, optim
from torchmn.communicators.base import Communicator
from torchmn.communicators.factory import create_communicator
from torchmn.communicators.threads import run_threads
from torchmn.errors import (
    ArgumentError,
    LaunchError,
    MismatchError,
    PeerError,
    TorchMNError,
    WaitTimeout,
)
from torchmn.optim import create_multi_node_optimizer

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Communicator",
    "LaunchError",
    "MismatchError",
    "PeerError",
    "TorchMNError",
    "WaitTimeout",
    "__version__",
    "create_communicator",
    "create_multi_node_optimizer",
    "datasets",
    "optim",
    "run_threads",
]
