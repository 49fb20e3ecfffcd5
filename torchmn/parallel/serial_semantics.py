"""SerialSemantics: dropout and batch statistics of whole tensors as on one rank.

Sharded tensors have rules. Tensors that are whole on each rank (after the first Linear, or everything under datapar)
are computed by torch; this mode replaces the few functions whose result depends on samples of other ranks, and refuses
functions that draw random numbers in another order than one rank would.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchmn._torch_compat import DISTRIBUTION_SAMPLERS, count_function_modes
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.sharded.refusals import refuse, refuse_in_checkpoint
from torchmn.sharded.rules.dropout import check_dropout, mask_shard
from torchmn.sharded.rules.normalization import batch_norm_over_ranks
from torchmn.sharded.sharding import Samples, Sharding
from torchmn.sharded.tensor import ShardedTensor


class SerialSemantics(TorchFunctionMode):
    """A mode in which dropout and batch normalisation of plain tensors give the results of one rank.

    Args:
        grid: the ranks.
        samples: which samples of the global batch this rank computes.
        batch: how many.
    """

    ignores_convolutions = True  # fused convolutions need not call it

    def __init__(self, grid: ProcessGrid, samples: Samples, batch: int):
        super().__init__()
        self.grid, self.samples, self.batch = grid, samples, batch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and not isinstance(args[0] if args else kwargs.get("input"), ShardedTensor):
            return replacement(self, *args, **kwargs)
        if func in _RANDOM and _is_random(func, args, kwargs):
            self._check_may_draw(func)
        if args and type(args[0]) is ShardedTensor and not count_function_modes():
            # The shortest way if there is no other mode: torch would search the arguments again.
            return ShardedTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _check_may_draw(self, func: Any) -> None:
        """Raises an error unless ranks are processes with the same samples, which draw the same numbers."""
        if self.grid.sizes["data"] > 1 or self.grid.comm.traits.shares_process:
            refuse(
                f"{getattr(func, '__name__', func)!r} draws random numbers, and each rank would draw others than one "
                "process does. Use F.dropout or nn.Dropout, whose mask is that of one process (and dropout=0 in layers "
                "with internal dropout), or a function with generator=, seeded with the same number on every rank"
            )

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._dropped(x, p, training, inplace, x.shape[1:])

    def feature_dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._dropped(x, p, training, inplace, (x.shape[1], *[1] * (x.dim() - 2)))

    def alpha_dropout(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        if training and p > 0:
            raise ParallelizeError("alpha dropout in training is not supported in a parallel model. Use Dropout")
        return x

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not self.samples.known:  # in evaluation ranks may have different numbers of batches: no communication
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum or 0.0, eps)
        if training and self.grid.replicas.size > 1:
            refuse_in_checkpoint("batch_norm")
        settings = (weight, bias, training, momentum, eps, self.grid.replicas)
        return batch_norm_over_ranks(x, running_mean, running_var, *settings)

    def _dropped(self, x: Tensor, p: float, training: bool, inplace: bool, mask_shape: tuple[int, ...]) -> Tensor:
        if not training or p == 0:
            return x
        check_dropout(self.grid, self.samples, of_image=False)
        if x.is_meta:
            return x  # an empty batch must not return here: ranks that are threads broadcast the mask
        if p == 1:
            return x.mul_(0) if inplace else x * 0
        samples = self.samples
        if self.grid.sizes["data"] == 1:
            samples = Samples(0, x.shape[0])
        elif x.shape[0] != self.batch:
            raise ParallelizeError(
                f"dropout of a tensor of shape {tuple(x.shape)}: expected the batch of {self.batch} as its first dim, "
                "to cut the mask of the global batch"
            )
        layout = Sharding(self.grid, tuple(x.shape), (None,) * x.dim(), samples)
        scale = mask_shard(layout, tuple(mask_shape), 1 - p, x).div_(1 - p)
        return x.mul_(scale) if inplace else x * scale


_REPLACEMENTS = {
    F.dropout: SerialSemantics.dropout,
    torch.dropout: SerialSemantics.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), SerialSemantics.feature_dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), SerialSemantics.alpha_dropout),
    F.batch_norm: SerialSemantics.batch_norm,
}

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# Functions of torch below F.dropout2d and others. They are rarely called directly, so their masks are not cut.
_LIKE_DROPOUT = {
    getattr(torch, name)
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for name in (kind, f"{kind}_")
} - {torch.dropout} | {torch.native_dropout}

# Other functions and methods that draw from torch's generator, directly or inside.
_RANDOM = {
    *(getattr(torch, name) for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")),
    *(getattr(torch, name) for name in ("rand_like", "randn_like", "randint_like", "poisson", "rrelu")),
    *(getattr(Tensor, name) for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_")),
    *(getattr(Tensor, name) for name in ("log_normal_", "geometric_", "bernoulli", "multinomial")),
    *(torch.rrelu_, torch.binomial, *DISTRIBUTION_SAMPLERS),
    *(F.gumbel_softmax, F.rrelu, F.scaled_dot_product_attention, F.multi_head_attention_forward),
    *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
    *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
    *_RECURRENT,
    *_LIKE_DROPOUT,
}


def _is_random(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call draws from torch's default generator: not if it gets another one, or with a dropout of 0."""
    if func is F.scaled_dot_product_attention:
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if func is F.multi_head_attention_forward:
        dropout = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
        return dropout > 0 and (args[13] if len(args) > 13 else kwargs.get("training", True))
    if func in _LIKE_DROPOUT:
        p, training = [*args[1:3], *(kwargs.get(name) for name in ("p", "train")[len(args[1:3]) :])]
        return p != 0 and training is not False
    if func in _RECURRENT:
        return _drops_between_layers(args, kwargs)
    if func in (F.rrelu, torch.rrelu, torch.rrelu_):
        return bool(args[3] if len(args) > 3 else kwargs.get("training", False))
    return kwargs.get("generator") is None and kwargs.get("_random_samples") is None


def _drops_between_layers(args: tuple, kwargs: dict) -> bool:
    """Whether a call of torch.lstm, gru or rnn has dropout. Its settings follow the list of weights in `args`."""
    lists = [place for place, argument in enumerate(args) if isinstance(argument, list | tuple)]
    rest = args[lists[-1] + 1 :] if lists and "params" not in kwargs else ()
    settings = {**dict(zip(("has_biases", "num_layers", "dropout", "train"), rest, strict=False)), **kwargs}
    return bool(settings.get("num_layers", 2) > 1 and settings.get("dropout", 1) > 0 and settings.get("train", True))
