"""Dropout and batch statistics of whole values as the serial run has them.

Sharded tensors have rules of their own. What is whole on each rank (behind the first Linear, or everything under
datapar) is computed by torch itself; this mode catches the few functions whose result depends on samples that other
ranks hold, or on a random generator that ranks do not share in the same way as one process.
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
from torchmn.sharded.rules.dropout import check_dropout, part_of_mask
from torchmn.sharded.rules.normalization import batch_norm_over_ranks
from torchmn.sharded.sharding import Samples, Sharding
from torchmn.sharded.tensor import ShardedTensor


class SerialRandomness(TorchFunctionMode):
    """While it lasts, dropout and batch normalisation of plain tensors give what one process would."""

    ignores_convolutions = True  # chains need not call it

    def __init__(self, grid: ProcessGrid, samples: Samples, batch: int):
        super().__init__()
        self.grid, self.samples, self.batch = grid, samples, batch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        catch = _CAUGHT.get(func)
        if catch is not None and not isinstance(args[0] if args else kwargs.get("input"), ShardedTensor):
            return catch(self, *args, **kwargs)
        if func in _DRAWS and _draws(func, args, kwargs):
            self._check_may_draw(func)
        if args and type(args[0]) is ShardedTensor and not count_function_modes():
            # Where torch would end too, if no other mode listens, after another search of the arguments.
            return ShardedTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _check_may_draw(self, func: Any) -> None:
        """Processes with one seed draw the same numbers, if each draws for the same samples; others may not."""
        if self.grid.sizes["data"] > 1 or self.grid.comm.traits.shares_process:
            refuse(
                f"{getattr(func, '__name__', func)!r} draws random numbers, and each rank would draw others than one "
                "process does. Use F.dropout or nn.Dropout, whose mask is that of one process (and dropout=0 in layers "
                "that drop out inside), or pass a generator=, seeded alike on every rank, to a function that takes one"
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
        if not self.samples.known:  # ranks evaluate as many batches as they have: nobody may wait for another
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
            return x  # but not for an empty batch: ranks that are threads hand the mask out together
        if p == 1:
            return x.mul_(0) if inplace else x * 0
        samples = self.samples
        if self.grid.sizes["data"] == 1:
            samples = Samples(0, x.shape[0])
        elif x.shape[0] != self.batch:
            raise ParallelizeError(
                f"dropout of a tensor of shape {tuple(x.shape)}: expected the batch of {self.batch} as its first dim, "
                "to cut the mask of the whole batch"
            )
        layout = Sharding(self.grid, tuple(x.shape), (None,) * x.dim(), samples)
        kept = part_of_mask(layout, tuple(mask_shape), 1 - p, x).div_(1 - p)
        return x.mul_(kept) if inplace else x * kept


_CAUGHT = {
    F.dropout: SerialRandomness.dropout,
    torch.dropout: SerialRandomness.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), SerialRandomness.feature_dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), SerialRandomness.alpha_dropout),
    F.batch_norm: SerialRandomness.batch_norm,
}

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# torch's own, below F.dropout2d and its like; hardly anyone calls them, so their masks are not cut.
_LIKE_DROPOUT = {
    getattr(torch, name)
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for name in (kind, f"{kind}_")
} - {torch.dropout} | {torch.native_dropout}

# What else draws from torch's generator: as functions, as methods, or deep inside.
_DRAWS = {
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


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call draws from the generator that all share: not with one of its own, nor with dropout of 0."""
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
    """Whether a call of torch.lstm and its like draws: what says so follows the list of weights, packed or not."""
    lists = [place for place, given in enumerate(args) if isinstance(given, list | tuple)]
    rest = args[lists[-1] + 1 :] if lists and "params" not in kwargs else ()
    said = {**dict(zip(("has_biases", "num_layers", "dropout", "train"), rest, strict=False)), **kwargs}
    return bool(said.get("num_layers", 2) > 1 and said.get("dropout", 1) > 0 and said.get("train", True))
