"""Reductions: the accumulator of each dtype, and reductions of tensors in rank order.

MPI, gloo and torch each lack some (dtype, operation) pairs. The rules here give the same results on all transports:
16-bit and 8-bit floats are accumulated in float32, bools follow NumPy (a sum is an `or`), and dtypes that a transport
cannot reduce are gathered and reduced here, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.communicators.messages import wire

OPERATIONS = ("sum", "mean", "max", "min", "prod")


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return {torch.bool: torch.uint8, torch.complex32: torch.complex64}.get(dtype, dtype)


ACCUMULATORS = {dtype: _widest(dtype) for dtype in wire.DTYPE_CODES}
"""The dtype in which values of each dtype are reduced."""
# torch implements few operations for these; NumPy has them.
_THROUGH_NUMPY = {torch.uint16, torch.uint32, torch.uint64}
REDUCED_BY_TORCH = {dtype for dtype in wire.DTYPE_CODES if ACCUMULATORS[dtype] == dtype} - _THROUGH_NUMPY
"""Dtypes that torch reduces without conversion."""
_COMBINE = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


def accumulating_operation(dtype: torch.dtype, op: str) -> str:
    """Returns the operation in the accumulator's dtype. For bools, which are uint8 there, `or` is max, `and` is min."""
    if dtype == torch.bool:
        return {"sum": "max", "prod": "min"}.get(op, op)
    return "sum" if op == "mean" else op


def may_lose_nan(dtype: torch.dtype, op: str) -> bool:
    """Returns whether MPI and gloo may drop a NaN, on some ranks only, because comparisons with NaN are false."""
    return dtype.is_floating_point and op in ("max", "min")


def problem(dtype: torch.dtype, op: object) -> str | None:
    """Returns why `op` cannot reduce `dtype`, or None."""
    if op not in OPERATIONS:
        return f"expected op to be one of {', '.join(OPERATIONS)}, got {op!r}"
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"expected a floating-point or complex tensor for op='mean', got {dtype} (convert it, or use op='sum')"
    if op in ("max", "min") and dtype.is_complex:
        return f"expected a real tensor for op={op!r}, got {dtype}, which has no order"
    return None


def reduce_in_order(parts: Sequence[Tensor], op: str) -> Tensor:
    """Returns `parts[0] op parts[1] op ...` as a new tensor, for an accumulating operation (not mean)."""
    if parts[0].dtype in _THROUGH_NUMPY:
        return _reduce_through_numpy(parts, op)
    combine = _COMBINE[op]
    if len(parts) == 1:
        return parts[0].clone()
    total = combine(parts[0], parts[1])
    for part in parts[2:]:
        combine(total, part, out=total)
    return total


def reduce_into(x: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Writes `parts[0] op parts[1] op ...` into `x`, which may be one of two parts, but not of more."""
    combine = _COMBINE[op]
    combine(parts[0], parts[1], out=x)
    for part in parts[2:]:
        combine(x, part, out=x)


def scale_(x: Tensor, scale: float) -> None:
    """Multiplies `x` in place by `scale`, unless that is 1."""
    if scale != 1.0:
        x.mul_(scale)


def combine(parts: Sequence[Tensor], x: Tensor, op: str, in_place: bool) -> Tensor:
    """Returns the reduction of all ranks' `parts`, on the host: a new tensor on the device of `x`, or `x` itself."""
    operation = "sum" if op == "mean" else op
    if in_place and x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        total = x.detach()
        reduce_into(total, parts, operation)
    else:
        total = reduce_in_order(parts, operation)
    if op == "mean":
        total.mul_(1 / len(parts))
    if not in_place:
        return total.to(x.device) if x.is_cuda else total
    if total.data_ptr() != x.data_ptr():
        x.detach().copy_(total)
    return x


def _reduce_through_numpy(parts: Sequence[Tensor], op: str) -> Tensor:
    import numpy

    combine = {"sum": numpy.add, "prod": numpy.multiply, "max": numpy.maximum, "min": numpy.minimum}[op]
    total = parts[0].numpy().copy()
    for part in parts[1:]:
        combine(total, part.numpy(), out=total)
    return torch.from_numpy(total)
