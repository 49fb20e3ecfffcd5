"""Batches on many ranks: the same batches everywhere, or the same order of each rank's own."""

from torchmn.iterators.multi_node import MultiNodeIterator, create_multi_node_iterator
from torchmn.iterators.synchronized import SynchronizedIterator, create_synchronized_iterator

__all__ = [
    "MultiNodeIterator",
    "SynchronizedIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
]
