"""combined_dims: the dims along which a torch function combines elements, such as dim 0 for `x.sort(0)`.

Ranks along `data` have different samples, so a function that combines elements of the batch dim would compute with
this rank's samples only. Rules refuse it (`check_samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import names

if TYPE_CHECKING:
    from torchmn.sharded.sharding import Sharding

_ALL = "all"  # the default of functions that combine all dims if none is given
_SOFTMAX = "softmax"  # the default depends on the number of dims

# Name -> the place of `dim` among the arguments after the tensor, and its default.
_TABLE: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(names("sum mean prod nansum nanmean amax amin max min all any argmax argmin"), (0, _ALL)),
    **dict.fromkeys(names("median nanmedian std var std_mean var_mean count_nonzero logsumexp"), (0, _ALL)),
    **dict.fromkeys(names("aminmax unique unique_consecutive"), (99, _ALL)),  # `dim` is a keyword, or comes last
    **dict.fromkeys(names("norm linalg_vector_norm quantile nanquantile roll take_along_dim fft_fftn"), (1, _ALL)),
    **dict.fromkeys(names("cumsum cumprod cummax cummin logcumsumexp"), (0, _ALL)),
    **dict.fromkeys(names("gather scatter scatter_add scatter_reduce index_select index_add index_copy"), (0, _ALL)),
    **dict.fromkeys(names("index_fill select narrow flip"), (0, _ALL)),
    **dict.fromkeys(names("softmax log_softmax softmin"), (0, _SOFTMAX)),
    **dict.fromkeys(names("sort argsort mode glu"), (0, -1)),
    **dict.fromkeys(names("topk kthvalue diff renorm fft_fft fft_ifft fft_rfft trapezoid trapz"), (1, -1)),
    **dict.fromkeys(names("normalize cosine_similarity"), (1, 1)),
    **dict.fromkeys(names("split split_with_sizes chunk tensor_split"), (1, 0)),
    "unbind": (0, 0),
    "rot90": (1, (0, 1)),
    **dict.fromkeys(names("msort flipud"), (99, 0)),
    "fliplr": (99, 1),
}


def _repeated_dims(count: int, *times: Any, **_: Any) -> tuple[int, ...]:
    """Returns the dims along which copies follow each other, as in a concatenation."""
    if times and isinstance(times[0], Sequence):
        times = tuple(times[0])
    first = count - len(times)
    return tuple({max(first + at, 0) for at, number in enumerate(times) if number != 1 or first + at < 0})


def _padded_dims(count: int, pad: Sequence[int], *_: Any, **__: Any) -> tuple[int, ...]:
    return tuple(range(count - len(pad) // 2, count))


def _normalized_dims(count: int, normalized_shape: Sequence[int], *_: Any, **__: Any) -> tuple[int, ...]:
    return tuple(range(count - len(normalized_shape), count))


# Functions whose arguments list the dims in other ways.
_OF_SEQUENCES: dict[str, Callable[..., tuple[int, ...]]] = {
    "repeat": _repeated_dims,
    "tile": _repeated_dims,
    "pad": _padded_dims,
    "layer_norm": _normalized_dims,
}

COMBINING = frozenset(
    function
    for name in (*_TABLE, *_OF_SEQUENCES)
    for namespace in (torch, F, Tensor, torch.fft, torch.linalg)
    for function in (getattr(namespace, part, None) for part in (name, f"{name}_", name.split("_")[-1]))
    if getattr(function, "__name__", "").rstrip("_") == name
)
"""The torch functions in the table, and their in-place forms."""

_TOTALS = ("sum", "mean", "nansum", "nanmean")


def combined_dims(function: str, count: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the dims along which a call combines elements, counted from the first; none for a function not listed.

    Args:
        function: name of the torch function. `cumsum_` stands for `cumsum`.
        count: the number of dims of the tensor.
        args, kwargs: of the call, after the tensor.
    """
    if function in _OF_SEQUENCES:
        return _OF_SEQUENCES[function](count, *args, **kwargs)
    place, default = _TABLE.get(function) or _TABLE.get(function.rstrip("_")) or (None, ())
    if place is None:
        return ()
    if function in ("max", "min") and (
        isinstance(kwargs.get("other"), Tensor) or (args and isinstance(args[0], Tensor))
    ):
        return ()  # elementwise
    dim = args[place] if len(args) > place else None
    dim = next((kwargs[name] for name in ("dim", "dims", "axis") if name in kwargs), dim)
    if function == "flip" and len(args) > 1:
        dim = args
    if dim is None or isinstance(dim, bool) or dim == ():  # x.var(False) takes no dim
        dim = default
    if dim == _ALL:
        return tuple(range(count))
    if dim == _SOFTMAX:
        dim = 0 if count in (1, 3) else 1
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(sorted({d % count for d in dims if isinstance(d, int) and -count <= d < count}))


def is_total(function: str, dims: Sequence[int], count: int) -> bool:
    """Whether a call is the sum or mean of all elements, which of this rank's samples is its part of a loss."""
    return function in _TOTALS and len(dims) == count


def check_samples(layout: Sharding, dims: Sequence[int], function: str) -> None:
    """Refuses a function that combines elements along `dims` if these include a batch of which ranks have parts."""
    if 0 in dims and layout.grid.sizes["data"] > 1 and layout.cuts[0] is None:
        refuse(
            f"{function} along dim 0 of {layout} would combine this rank's samples only, and ranks along 'data' have "
            "other samples of the batch. Compute it from the output of the model, or use a grid without the axis data"
        )
