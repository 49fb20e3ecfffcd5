"""Argument checks: what is wrong with an argument here, and whether all ranks say the same.

Before a collective operation moves data, its ranks compare one integer: a fingerprint of the operation and of
everything they must agree on. Equal fingerprints cost one tiny all-reduce. Unequal ones lead every rank into
the same slow path, where they tell each other what they were asked to do and raise the same error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from torchmn.communicators import wire
from torchmn.communicators.bounded_cache import BoundedCache
from torchmn.communicators.watchdog import ranks_text, user_line
from torchmn.errors import ArgumentError, MismatchError

# Bounded by the letters of what they know, which take about four bytes each: values that never repeat (a learning rate
# that changes at every step) must not fill the memory.
_fingerprints: BoundedCache[int] = BoundedCache(256 << 10)
_digests: BoundedCache[str] = BoundedCache(1 << 20)  # of long tuples: the shapes of a model are kept once
_LONG = 16
_SHOWN = 200  # characters of a value, in a disagreement


def enabled_by_default() -> bool:
    """Whether ranks compare their arguments before they communicate: yes, unless `TORCHMN_CHECKS=0`."""
    return os.environ.get("TORCHMN_CHECKS", "1") != "0"


def fingerprint(key: tuple) -> int:
    """A positive 56-bit number that is the same on every rank for the same `key` (unlike `hash`)."""
    known = _fingerprints.get(key)
    if known is None:
        short = _shortened(key)
        if short is not key:
            return fingerprint(short)
        text = repr(key).encode()
        known = int.from_bytes(blake2b(text, digest_size=7).digest(), "little")
        _fingerprints.keep(key, known, len(text))
    return known


def _shortened(value: Any) -> Any:
    """`value` with digests in the place of long tuples; `value` itself if there is none in it."""
    if type(value) is not tuple:
        return value
    if len(value) <= _LONG:
        parts = tuple([_shortened(part) for part in value])
        return value if all(part is own for part, own in zip(parts, value, strict=True)) else parts
    known = _digests.get(value)
    if known is None:
        text = repr(value).encode()
        known = blake2b(text, digest_size=16).hexdigest()
        _digests.keep(value, known, len(text))
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
    if not wire.address(x) and x.numel() and not x._is_zerotensor():
        return (
            f"expected a tensor that has memory, got a {type(x).__name__} that has none: it stands for others (a fake, "
            "masked or distributed tensor, one inside torch.func), or its storage was freed; pass a plain tensor"
        )
    if torch._C._is_tracing():  # type: ignore[attr-defined]
        return "expected a tensor with values, got one that torch.jit.trace records: messages can not be recorded"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return (
            "expected a tensor without a forward-mode tangent, which would be lost on the way: use backward, or pass "
            "forward_ad.unpack_dual(x).primal"
        )
    return _writing_problem(x) if written else None


def _writing_problem(x: Tensor) -> str | None:
    """Why `x` can not be overwritten as it lies, or None."""
    if x._is_zerotensor() or has_overlap(x):
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
    dtypes = sorted({str(x.dtype) for x in xs})
    if len(dtypes) > 1:
        return f"expected tensors of one dtype, got {', '.join(dtypes)}"
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


class Aside(NamedTuple):
    """What a rank says of a collective operation on behalf of autograd, beside its arguments."""

    call: int  # the how-manieth differentiable one of this communicator: all ranks must be at the same
    order: int  # 0 in forward, 1 in the backward of that call, 2 in the backward of that ...
    wish: int  # one of those below; it may differ

    def mixed_into(self, number: int) -> int:
        """A fingerprint that is the same on all ranks only if this is, too."""
        return (number + (self.call << 10 | self.order << 2 | self.wish) * 0x9E3779B97F4A7C15) & (1 << 56) - 1

    def text(self) -> str:
        return "backward of " * self.order + f"torchmn.functions call {self.call}"


NO_GRAD, NEEDS_NONE, NEEDS_GRADIENT = range(3)


@dataclass
class Statement:
    """What one rank was asked to do, as it tells the others once they found that they disagree."""

    operation: str
    must_agree: dict[str, Any]
    may_differ: Any
    problem: str | None
    where: str
    wish: int | None = None

    def text(self, everyone: Sequence[Statement]) -> str:
        """What this rank said; of long values, only what `everyone` did not say."""
        details = [
            f"{name} {_short(value, [other.must_agree[name] for other in everyone if name in other.must_agree])}"
            for name, value in self.must_agree.items()
        ]
        return f"{self.operation}({', '.join(details)})  at {self.where}"


def state_here(
    operation: str, must_agree: dict[str, Any], may_differ: Any, problem: str | None, aside: Aside | None = None
) -> Statement:
    """This rank's statement, with the line of the user's code that called the operation."""
    if aside is not None:
        operation, wish = f"{operation} ({aside.text()})", aside.wish
    else:
        wish = None
    return Statement(operation, must_agree, may_differ, problem, user_line(sys._getframe(1)), wish)


def raise_disagreement(statements: Sequence[Statement], rank: int) -> None:
    """Raise, on every rank alike, if a rank's argument is wrong or if what must agree does not."""
    size = len(statements)
    wrong = [(culprit, s) for culprit, s in enumerate(statements) if s.problem]
    if wrong:
        lines = [f"rank {culprit} of {size}: {s.operation}: {s.problem}  (at {s.where})" for culprit, s in wrong]
        if all(culprit != rank for culprit, _ in wrong):
            lines.append(f"(raised on rank {rank} too, because its {statements[rank].operation} needs that rank)")
        raise ArgumentError("\n".join(lines))
    first = statements[0]
    if all((s.operation, s.must_agree) == (first.operation, first.must_agree) for s in statements):
        return
    texts: dict[str, list[int]] = {}
    for speaker, statement in enumerate(statements):
        texts.setdefault(statement.text(statements), []).append(speaker)
    what = (
        "call different operations" if len({s.operation for s in statements}) > 1 else f"disagree in {first.operation}"
    )
    lines = [f"rank {rank} of {size}: ranks {what}; nothing was sent:"]
    lines += [f"  rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {text}" for text, ranks in texts.items()]
    lines.append("All ranks of a communicator must call the same operation, in the same order, with these alike.")
    raise MismatchError("\n".join(lines))


def _alike(sequences: Sequence[Any]) -> int:
    """How many items, or letters, are the same at the start of all sequences."""
    for place, items in enumerate(zip(*sequences, strict=False)):
        if any(item != items[0] for item in items):
            return place
    return min(map(len, sequences))


def _short(value: Any, everyones: Sequence[Any]) -> str:
    """The text of a value, if it is short; else what is not the same in everyone's (this one among them)."""
    text = str(tuple(value)) if isinstance(value, torch.Size) else str(value)
    if len(text) <= _SHOWN:
        return text
    if all(each == value for each in everyones):
        return "the same on all ranks"
    if all(isinstance(each, list | tuple) for each in everyones):
        odd = [str(item) for item in value if not all(item in each for each in everyones)]
        what = "not alike: " + ", ".join(odd) if odd else f"which differ from place {_alike(everyones)} on"
        text = f"{len(value)} of them, {what}"
    elif all(isinstance(each, str) for each in everyones):
        text = "..." + text[max(0, _alike(everyones) - 40) :]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
