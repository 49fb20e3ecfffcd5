"""Differentiable communication. The loss is the sum of the losses of all ranks; backward is the exact adjoint.

Each file contains one operation: the public function, whose docstring states when it is differentiable and what its
adjoint is, then its autograd node. Reading order:

1. `collective`: the agreement on whether backward follows. Then any of `allreduce`, `bcast`, `allgather`,
   `reduce_scatter`, `gather`, `scatter`, `alltoall`, `global_mean`.
2. `send`, `recv`, `pseudo_connect`: messages between two ranks; `nodes`, their autograd nodes; `edges`, which matches
   gradients with messages and detects forgotten delegates.
3. `recomputation`: communication under `torch.utils.checkpoint`.
4. `halo`: the halo exchange between tiles; `moments`: batch statistics over ranks.
"""

from torchmn.functions.allgather import allgather
from torchmn.functions.allreduce import allreduce
from torchmn.functions.alltoall import alltoall
from torchmn.functions.bcast import bcast
from torchmn.functions.edges import edges_of as edges_of
from torchmn.functions.gather import gather
from torchmn.functions.global_mean import global_mean
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add
from torchmn.functions.halo.exchange import start_halo_exchange as start_halo_exchange
from torchmn.functions.halo.exchange import start_halo_scatter_add as start_halo_scatter_add
from torchmn.functions.pseudo_connect import pseudo_connect
from torchmn.functions.recomputation import keep_messages
from torchmn.functions.recv import recv
from torchmn.functions.reduce_scatter import reduce_scatter
from torchmn.functions.scatter import scatter
from torchmn.functions.send import send

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "global_mean",
    "halo_exchange",
    "halo_scatter_add",
    "keep_messages",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
