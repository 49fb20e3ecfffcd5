"""Sharded tensors, and the rules by which torch functions compute with them.

sharding.py       Sharding: how a global tensor is cut over the ranks of a process grid
tensor.py         ShardedTensor: this rank's shard of a global tensor, a subclass of torch.Tensor
redistribute.py   conversions between whole and sharded tensors
replicated.py     the differentiable collectives below them
registry.py       the table of rules: torch function -> rule
rules/            the rules, one file per family of torch functions
combined_dims.py  along which dims a function combines elements, which is refused for the samples of a batch
windows.py        rules of images and functions of windows: halo exchange, then the local computation
exchange.py       the halo exchange of a sharded tensor
saved_buffers.py  memory that autograd need not keep: tiles with their halo
memory_format.py  memory formats (channels_last, transposed) of results
parameter_use.py  the recorder of a dry run: which parameters are used with sharded tensors
refusals.py       errors that name the module of the user's model
fusion/           optional: convolutions that share one halo exchange
"""

from torchmn.sharded.redistribute import shard_like as shard_like
from torchmn.sharded.redistribute import shard_of as shard_of
from torchmn.sharded.redistribute import whole as whole
from torchmn.sharded.sharding import Cut, FlatCut, Sharding
from torchmn.sharded.sharding import Samples as Samples
from torchmn.sharded.sharding import image_layout as image_layout
from torchmn.sharded.tensor import ShardedTensor

__all__ = ["Cut", "FlatCut", "ShardedTensor", "Sharding"]
