"""Sharded tensors, and what each torch function does to them.

sharding.py      how a global tensor is cut over the ranks of a grid
tensor.py        ShardedTensor: this rank's part of a global tensor, as a tensor that ordinary models compute with
redistribute.py  between whole tensors and sharded ones
registry.py      which torch function has which rule
rules/           what torch functions compute with sharded tensors: one family, one file
refusals.py      errors that name the module in the user's model
roles.py         with what each parameter is used, found out in a dry run
windows.py       functions of windows: what outputs need is fetched, and they are computed from it
passes.py        optional layers that compute the same numbers faster
fusion/          one: convolutions that share an exchange of halos
"""

from torchmn.sharded.sharding import Cut, FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor

__all__ = ["Cut", "FlatCut", "ShardedTensor", "Sharding"]
