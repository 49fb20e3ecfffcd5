"""Sharded tensors, and the rules by which torch functions compute with them.

sharding.py       Sharding: how a global tensor is cut over the ranks of a process grid
tensor.py         ShardedTensor: this rank's shard of a global tensor, a subclass of torch.Tensor
redistribute.py   conversions between whole and sharded tensors
replicated.py     the differentiable collectives below them
registry.py       the table of rules: torch function -> rule
rules/            the rules, one file per family of torch functions
image_rule.py     registration of rules for functions of images (conv1d, conv2d, conv3d, ...)
windows.py        convolutions, pools and other functions of windows: halo exchange, then the local computation
exchange.py       the halo exchange of a sharded tensor
saved_buffers.py  memory that autograd need not keep: tiles with their halo
memory_format.py  memory formats (channels_last, transposed) of results
parameter_use.py  the recorder of a dry run: which parameters are used with sharded tensors
refusals.py       errors that name the module of the user's model
fusion/           optional: convolutions that share one halo exchange
"""

from torchmn.sharded.sharding import Cut, FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor

__all__ = ["Cut", "FlatCut", "ShardedTensor", "Sharding"]
