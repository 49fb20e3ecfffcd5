"""Communication that autograd differentiates. The loss is the sum of all ranks' losses; each adjoint is exact."""

from torchmn.functions.allgather import allgather
from torchmn.functions.allreduce import allreduce
from torchmn.functions.alltoall import alltoall
from torchmn.functions.bcast import bcast
from torchmn.functions.gather import gather
from torchmn.functions.global_mean import global_mean
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add
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
