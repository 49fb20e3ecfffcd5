"""Every error that TorchMN raises on purpose: one class per kind of mistake, all of them a `TorchMNError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TorchMNError(Exception):
    """Something that TorchMN refuses or cannot go on with; the message says what to do."""


class ArgumentError(TorchMNError, ValueError):
    """An argument that can not be right, on this rank or on another rank of the same operation."""


class MismatchError(TorchMNError):
    """Ranks that should have said the same thing said different things."""


class PeerError(TorchMNError):
    """Another rank failed, or left, while this one needed it."""


class ThreadError(TorchMNError, RuntimeError):
    """A collective operation in a thread, while another thread uses the same communicator for them."""


class DelegateError(TorchMNError):
    """A gradient came back for something that was sent, and this rank's backward never asked for it."""


class RecomputeError(TorchMNError):
    """A message inside a part of the model that is computed twice, but can be sent and received only once."""


class WaitTimeout(TorchMNError):
    """A wait that lasted longer than the communicator's timeout (raised where ranks are threads)."""


class LaunchError(TorchMNError):
    """The ranks can not be started or can not find each other."""


class ExperimentError(TorchMNError):
    """An experiment file that can not work: each line is `file:line:column: what was expected, what came`."""


class DatasetError(TorchMNError):
    """A dataset's file is missing, damaged or cannot be downloaded; the message names the file and a remedy."""


class HaloError(TorchMNError, ValueError):
    """An image that can not be cut as asked: smaller than a window, or with fewer rows than ranks."""


class GraphError(TorchMNError):
    """A graph over ranks that can not run, or a value that can not travel on its edges."""


class ComponentError(TorchMNError, RuntimeError):
    """A component of a MultiNodeChainList raised; the message names it, its rank and what it was called with."""


class ParallelizeError(TorchMNError):
    """A model, or a function in it, that can not be computed in parts with the numbers of one rank."""


def nearest(name: object, names: Iterable[str]) -> str:
    """A sentence that offers the valid name nearest to `name`, or lists them all."""
    names = sorted(names)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid: {', '.join(names)}."
