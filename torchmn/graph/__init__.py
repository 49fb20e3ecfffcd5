"""Models whose components lie on several ranks."""

from torchmn.graph.chain_list import MultiNodeChainList
from torchmn.graph.picture import draw
from torchmn.graph.text import describe

__all__ = ["MultiNodeChainList", "describe", "draw"]
