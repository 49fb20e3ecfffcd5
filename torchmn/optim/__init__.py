"""The multi-node optimizer: steps with the mean of the gradients of all ranks.

Reading order: `multi_node` (the public class and function), `wrapper` (what it takes from the wrapped optimizer),
`gradients` (the mean), `reducers` (when it is computed: at the step, during backward, or one step later), `checks`.
`guards`, which `events` loads, raise errors where ranks would silently diverge.
"""

from torchmn.optim.combined import CombinedOptimizer as CombinedOptimizer
from torchmn.optim.events import GUARDS as GUARDS
from torchmn.optim.multi_node import MultiNodeOptimizer, create_multi_node_optimizer

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]
