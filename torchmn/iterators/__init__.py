"""Iterators over batches: one rank's batches on all ranks, or each rank's batches in an order that all ranks share."""

from torchmn.iterators.epochs import EpochIterator
from torchmn.iterators.multi_node import MultiNodeIterator, create_multi_node_iterator
from torchmn.iterators.synchronized import SynchronizedIterator, create_synchronized_iterator

__all__ = [
    "EpochIterator",
    "MultiNodeIterator",
    "SynchronizedIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
]
