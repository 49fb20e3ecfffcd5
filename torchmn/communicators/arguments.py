"""Checks of arguments on one rank, and fingerprints by which ranks compare their arguments.

Functions called `..._problem` return why an argument is wrong, for an error message, or None.
"""

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
from torchmn.other_spellings import check_foreign_message

# Bounded by the characters of their entries, which take about four bytes each: values that never repeat (a learning
# rate that changes at every step) must not fill the memory.
_fingerprints: BoundedCache[int] = BoundedCache(256 << 10)
_digests: BoundedCache[str] = BoundedCache(1 << 20)  # of long tuples: the shapes of a model are stored once
_LONG = 16


def fingerprint(key: tuple[Any, ...]) -> int:
    """Returns a positive 56-bit number that is the same on every rank for the same `key` (unlike `hash`)."""
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
    """Returns `value` with long tuples replaced by digests; `value` itself if it has none."""
    if type(value) is not tuple:
        return value
    if len(value) <= _LONG:
        parts = tuple([_shortened(part) if type(part) is tuple else part for part in value])
        changed = [part for part, given in zip(parts, value, strict=True) if part is not given]
        return parts if changed else value
    known = _digests.get(value)
    if known is None:
        text = repr(value)
        known = digest_of((text,), size=16)
        _digests.put(value, known, len(text))
    return known


def tensor_problem(x: object, written: bool = False) -> str | None:
    """Returns why `x` cannot be sent; with `written`, also why it cannot be overwritten."""
    if not isinstance(x, Tensor):
        check_foreign_message(x)
        return f"expected a tensor, got {describe(x)}"
    if is_lazy(x):
        return "expected a tensor, got a lazy parameter, which has no shape yet: run a forward pass first"
    if x.layout is not torch.strided:
        return f"expected a dense tensor, got layout {x.layout} (send its indices and values, or x.to_dense())"
    if x.is_nested:
        return "expected a dense tensor, got a nested one (send the tensors of x.unbind())"
    if x.dtype not in wire.DTYPE_CODES:
        return f"expected a dtype that can be sent, got {x.dtype}"
    if not (x.is_cpu or x.is_cuda):
        return f"expected a tensor on cpu or cuda, got one on {x.device}"
    try:
        address = x.data_ptr()
    except RuntimeError:  # a wrapper of other tensors
        address = 0
    if not address and x.numel() and not is_zero_tensor(x):
        return (
            f"expected a tensor that has memory, got a {type(x).__name__} without: it wraps others (a fake, masked or "
            "distributed tensor, one inside torch.func), or its storage was freed; pass a plain tensor"
        )
    if is_tracing():
        return "expected a tensor with values, got one that torch.jit.trace records: messages cannot be recorded"
    if forward_mode_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return (
            "expected a tensor without a forward-mode tangent, which would not be sent: use backward, or pass "
            "forward_ad.unpack_dual(x).primal"
        )
    return _writing_problem(x) if written else None


def _writing_problem(x: Tensor) -> str | None:
    """Returns why `x` cannot be overwritten in place."""
    if is_zero_tensor(x) or has_overlap(x):
        return (
            f"expected a tensor to overwrite, got one of shape {tuple(x.shape)} and strides {x.stride()}, some of "
            "whose elements share memory (is it expanded?): pass x.clone()"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "expected a tensor to overwrite, got one that was made under torch.inference_mode and cannot be changed "
            "outside of it: pass x.clone()"
        )
    return None


def has_overlap(x: Tensor) -> bool:
    """Returns whether elements of `x` share memory. Also True for a few strides that slicing never produces."""
    if x.is_contiguous():  # the common case, fast
        return False
    reach = 0  # of the dims with smaller strides: the stride of the next one must exceed it
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def sequence_problem(xs: object, size: int) -> str | None:
    """Returns why `xs` is not one dense tensor per rank: a sequence, or a tensor whose first dim is `size`."""
    if isinstance(xs, Tensor):
        if xs.dim() == 0 or xs.shape[0] != size:
            return f"expected a tensor whose first dim is {size}, one part per rank, got shape {tuple(xs.shape)}"
        return tensor_problem(xs)
    if not isinstance(xs, list | tuple):
        check_foreign_message(xs)
        return f"expected {size} tensors, one per rank, got {describe(xs)}"
    if len(xs) != size:
        return f"expected {size} tensors, one per rank, got {len(xs)}"
    for index, x in enumerate(xs):
        problem = tensor_problem(x)
        if problem:
            return f"element {index}: {problem}"
        if x.dtype != xs[0].dtype:
            return f"expected tensors of one dtype, got {xs[0].dtype} and {x.dtype}"
    return None


def rank_problem(rank: object, size: int, name: str) -> str | None:
    """Returns why `rank`, the argument called `name`, is not a rank of a communicator of this size."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        return f"expected {name} to be a rank (an int), got {describe(rank)}"
    if not 0 <= rank < size:
        alone = ": there is only one rank; `torchmn run -n N script.py` or mpiexec starts more" if size == 1 else ""
        return f"expected {name} in 0..{size - 1}, got {rank}{alone}"
    return None


def describe(x: object) -> str:
    """Returns a short description of an argument, for error messages."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    if isinstance(x, list | tuple):
        return f"a {type(x).__name__} of {len(x)}"
    text = repr(x)
    return text if len(text) <= 40 and "\n" not in text else f"an object of type {type(x).__name__}"
