"""Argument checks: what is wrong with an argument on this rank; and the number by which ranks compare theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from torchmn._torch_compat import forward_mode_level, is_tracing, is_zero_tensor
from torchmn.bounded_cache import BoundedCache
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.digest import digest_of, number_of

# Bounded by the letters of what they know, which take about four bytes each: values that never repeat (a learning rate
# that changes at every step) must not fill the memory.
_fingerprints: BoundedCache[int] = BoundedCache(256 << 10)
_digests: BoundedCache[str] = BoundedCache(1 << 20)  # of long tuples: the shapes of a model are kept once
_LONG = 16


def fingerprint(key: tuple[Any, ...]) -> int:
    """A positive 56-bit number that is the same on every rank for the same `key` (unlike `hash`)."""
    known = _fingerprints.get(key)
    if known is None:
        short = _shortened(key)
        if short is not key:
            return fingerprint(short)
        text = repr(key)
        known = number_of(text)
        _fingerprints.put(key, known, len(text))
    return known


def _shortened(value: Any) -> Any:
    """`value` with digests in the place of long tuples; `value` itself if there is none in it."""
    if type(value) is not tuple:
        return value
    if len(value) <= _LONG:
        parts = tuple([_shortened(part) if type(part) is tuple else part for part in value])
        changed = [part for part, own in zip(parts, value, strict=True) if part is not own]
        return parts if changed else value
    known = _digests.get(value)
    if known is None:
        text = repr(value)
        known = digest_of((text,), size=16)
        _digests.put(value, known, len(text))
    return known


def tensor_problem(x: object, written: bool = False) -> str | None:
    """Why `x` can not travel, or None; with `written`, also why a result can not overwrite it."""
    if not isinstance(x, Tensor):
        return f"expected a tensor, got {describe(x)}"
    if is_lazy(x):
        return "expected a tensor, got a lazy parameter, which has no shape yet: run a forward pass first"
    if x.layout is not torch.strided:
        return f"expected a dense tensor, got layout {x.layout} (send its indices and values, or x.to_dense())"
    if x.is_nested:
        return "expected a dense tensor, got a nested one (send the tensors of x.unbind())"
    if x.dtype not in wire.DTYPE_CODES:
        return f"expected a dtype that can travel, got {x.dtype}"
    if not (x.is_cpu or x.is_cuda):
        return f"expected a tensor on cpu or cuda, got one on {x.device}"
    try:
        address = x.data_ptr()
    except RuntimeError:  # it only stands for other tensors
        address = 0
    if not address and x.numel() and not is_zero_tensor(x):
        return (
            f"expected a tensor that has memory, got a {type(x).__name__} that has none: it stands for others (a fake, "
            "masked or distributed tensor, one inside torch.func), or its storage was freed; pass a plain tensor"
        )
    if is_tracing():
        return "expected a tensor with values, got one that torch.jit.trace records: messages can not be recorded"
    if forward_mode_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return (
            "expected a tensor without a forward-mode tangent, which would be lost on the way: use backward, or pass "
            "forward_ad.unpack_dual(x).primal"
        )
    return _writing_problem(x) if written else None


def _writing_problem(x: Tensor) -> str | None:
    """Why `x` can not be overwritten as it lies, or None."""
    if is_zero_tensor(x) or has_overlap(x):
        return (
            f"expected a tensor to overwrite, got one of shape {tuple(x.shape)} and strides {x.stride()}, several of "
            "whose elements share their memory (is it expanded?): pass x.clone()"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "expected a tensor to overwrite, got one that was made under torch.inference_mode, which torch forbids to "
            "change outside of it: pass x.clone()"
        )
    return None


def has_overlap(x: Tensor) -> bool:
    """Whether elements of `x` share memory. True, too, for a few strides that nobody gets by slicing."""
    if x.is_contiguous():  # the common case, at once
        return False
    reach = 0  # of the dims so far, from the finest on: the next one must step beyond it
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def sequence_problem(xs: object, size: int) -> str | None:
    """Why `xs` is not one dense tensor per rank (a sequence, or a tensor whose first dim is the size)."""
    if isinstance(xs, Tensor):
        if xs.dim() == 0 or xs.shape[0] != size:
            return f"expected a tensor whose first dim is {size}, one part per rank, got shape {tuple(xs.shape)}"
        return tensor_problem(xs)
    if not isinstance(xs, list | tuple):
        return f"expected {size} tensors, one per rank, got {describe(xs)}"
    if len(xs) != size:
        return f"expected {size} tensors, one per rank, got {len(xs)}"
    for place, x in enumerate(xs):
        problem = tensor_problem(x)
        if problem:
            return f"element {place}: {problem}"
        if x.dtype != xs[0].dtype:
            return f"expected tensors of one dtype, got {xs[0].dtype} and {x.dtype}"
    return None


def rank_problem(rank: object, size: int, name: str) -> str | None:
    """Why `rank` is no rank of a communicator of `size`, or None."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        return f"expected {name} to be a rank (an int), got {describe(rank)}"
    if not 0 <= rank < size:
        alone = ": there is only one rank; `torchmn run -n N script.py` or mpiexec starts more" if size == 1 else ""
        return f"expected {name} in 0..{size - 1}, got {rank}{alone}"
    return None


def describe(x: object) -> str:
    """A few words that tell a user what they passed."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    if isinstance(x, list | tuple):
        return f"a {type(x).__name__} of {len(x)}"
    text = repr(x)
    return text if len(text) <= 40 and "\n" not in text else f"an object of type {type(x).__name__}"
