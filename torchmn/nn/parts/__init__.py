"""Parts of global tensors, and what each torch function does to them.

layout.py     how a global tensor is cut over the ranks of a grid
part.py       Part: this rank's part of a global tensor, as a tensor that ordinary models compute with
refusals.py   errors that name the module in the user's model
roles.py      with what each parameter is used, found out in a dry run
wide.py       tiles that remember what lies around them: one halo exchange for a run of convolutions
chains.py     runs of convolutions inside an nn.Sequential, computed in one go
rules/        torch function -> what it means for parts: one family, one file
"""

from torchmn.nn.parts.layout import Cut, FlatCut, Layout
from torchmn.nn.parts.part import Part

__all__ = ["Cut", "FlatCut", "Layout", "Part"]
