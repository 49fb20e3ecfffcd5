"""The exceptions that TorchMN raises: one class per kind of error, all derived from `TorchMNError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DOCUMENTATION = "https://torchmn.readthedocs.io/en/latest/docs"
"""Address of the pages in docs/, for messages: an installed TorchMN does not have the files."""


class TorchMNError(Exception):
    """Base class of all errors of TorchMN. The message names the rank, what was expected, what came, and a remedy."""


class ArgumentError(TorchMNError, ValueError):
    """An argument is wrong, on this rank or on another rank of the same operation."""


class MismatchError(TorchMNError):
    """Ranks call different operations, or pass different values where they must be equal."""


class PeerError(TorchMNError):
    """Another rank failed, or left, while this rank waited for it."""


class ThreadError(TorchMNError, RuntimeError):
    """A second thread of a rank called a collective operation of a communicator that another thread uses."""


class DelegateError(TorchMNError):
    """A gradient arrived for a value that this rank sent, but its backward did not include the delegate of it."""


class RecomputeError(TorchMNError):
    """A part of the model that torch.utils.checkpoint computes twice contains a message that can be sent only once."""


class WaitTimeout(TorchMNError):
    """A wait exceeded the communicator's timeout. Raised where ranks are threads; a job of processes is ended."""


class LaunchError(TorchMNError):
    """The ranks cannot be started, or cannot find each other."""


class ExperimentError(TorchMNError):
    """An experiment file is wrong. Each line of the message is `file:line:column: what was expected, what came`."""


class DatasetError(TorchMNError):
    """A dataset's file is missing, damaged or cannot be downloaded; the message names the file and a remedy."""


class HaloError(TorchMNError, ValueError):
    """An image cannot be cut into these tiles: it is smaller than a window, or has fewer rows than ranks."""


class GraphError(TorchMNError):
    """A model-parallel graph cannot run, or a value cannot be sent along one of its edges."""


class ComponentError(TorchMNError, RuntimeError):
    """A component of a MultiNodeChainList raised. The message names it, its rank and its arguments."""


class ParallelizeError(TorchMNError):
    """A model, or a function in it, cannot be computed on shards with the same numbers as on one rank."""


def nearest(name: object, names: Iterable[str]) -> str:
    """Returns a sentence that suggests the valid name nearest to `name`, or lists all valid names."""
    names = sorted(names)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid: {', '.join(names)}."
