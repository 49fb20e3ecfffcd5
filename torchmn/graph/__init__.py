"""MultiNodeChainList: pipeline and graph model parallelism, with components on several ranks.

Reading order: `chain_list` (the public class), `description` (the graph of all ranks), `schedule` (the order of tasks),
`program` (a forward pass on one rank), `channel` and `payload` (messages), `delegates` (backward), `microbatches`,
`sequential` (cutting an nn.Sequential into stages), `text` and `picture`.
"""

from torchmn.graph.chain_list import MultiNodeChainList
from torchmn.graph.picture import draw
from torchmn.graph.text import describe

__all__ = ["MultiNodeChainList", "describe", "draw"]
