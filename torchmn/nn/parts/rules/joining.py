"""Joining tensors: skips of a U-Net, stacked maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.nn.parts.moving import cut_like, entering, whole
from torchmn.nn.parts.part import Part, local, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import rule
from torchmn.nn.parts.wide import smallest_margin, wide_part, wides_of


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [x for x in tensors if isinstance(x, Part)]
    layout = parts[0].layout_
    dim %= len(layout.shape)
    if not any(x.layout_.is_tile for x in parts):
        return torch.cat([whole(x) if isinstance(x, Part) else x for x in tensors], dim)
    if layout.cuts[dim] is not None:
        refuse(f"cat along dim {dim}, which is cut over ranks in {layout}, is not supported")
    shapes = [x.layout_.shape if isinstance(x, Part) else tuple(x.shape) for x in tensors]
    for x in parts:
        if x.layout_.cuts != layout.cuts:
            refuse(f"cat of {layout} and {x.layout_}, which are cut in different ways")
    for shape in shapes:
        if len(shape) != len(layout.shape) or any(
            a != b for at, (a, b) in enumerate(zip(shape, layout.shape, strict=True)) if at != dim
        ):
            refuse(f"cat along dim {dim} of shapes {shapes} that do not fit")
    shape = list(layout.shape)
    shape[dim] = sum(s[dim] for s in shapes)
    result = layout.with_dims(tuple(shape), layout.cuts)
    wides = wides_of(tensors) if dim == 1 else None
    if wides is not None and any(margin := smallest_margin(wides)):
        return wide_part(torch.cat([wide.tensor for wide in wides], 1), result, wides[0].width, margin, wides[0].run)
    pieces = [
        local(x)
        if isinstance(x, Part)
        else cut_like(entering(x, layout), layout, {d: d for d in range(x.dim()) if d != dim})
        for x in tensors
    ]
    return wrap(torch.cat(pieces, dim), result)


@rule("stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [x for x in tensors if isinstance(x, Part)]
    layout = parts[0].layout_
    if not any(x.layout_.is_tile for x in parts):
        return torch.stack([whole(x) if isinstance(x, Part) else x for x in tensors], dim)
    if any(not isinstance(x, Part) or x.layout_ != layout for x in tensors):
        refuse("stack of tensors that are not cut in the same way is not supported")
    dim %= len(layout.shape) + 1
    if dim == 0:
        refuse("stack along a new batch dim is not supported")
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape.insert(dim, len(tensors))
    cuts.insert(dim, None)
    return wrap(torch.stack([local(x) for x in tensors], dim), layout.with_dims(tuple(shape), tuple(cuts)))
