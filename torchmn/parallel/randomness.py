"""Dropout and batch statistics of whole values as the serial run has them.

Parts have rules of their own. What is whole on each rank (behind the first Linear, or everything under datapar) is
computed by torch itself; this mode catches the few functions whose result depends on samples that other ranks hold,
or on a random generator that ranks do not share in the same way as one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.nn.batch_norm import normalize_over_ranks, track_statistics
from torchmn.nn.moments import Moments, local_moments, union
from torchmn.nn.parts.layout import Layout, Samples
from torchmn.nn.parts.part import Part
from torchmn.nn.parts.rules.dropout import part_of_mask


class SerialRandomness(TorchFunctionMode):
    """While it lasts, dropout and batch normalisation of plain tensors give what one process would."""

    def __init__(self, grid: ProcessGrid, samples: Samples, batch: int):
        super().__init__()
        self.grid, self.samples, self.batch = grid, samples, batch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        catch = _CAUGHT.get(func)
        if catch is None or isinstance(args[0] if args else None, Part):
            return func(*args, **(kwargs or {}))
        return catch(self, *args, **(kwargs or {}))

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
        replicas = self.grid.replicas
        if not training or replicas.size == 1 or x.is_meta:
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.no_grad():
            mine = local_moments(x if x.dtype == torch.float64 else x.float()).packed()
            moments = union([Moments.unpacked(part) for part in replicas.allgather(mine)])
        if running_mean is not None and running_var is not None:
            track_statistics(running_mean, running_var, moments, momentum)
        return normalize_over_ranks(x, weight, bias, moments, eps, replicas)

    def _dropped(self, x: Tensor, p: float, training: bool, inplace: bool, mask_shape: tuple[int, ...]) -> Tensor:
        if not training or p == 0 or x.is_meta or x.numel() == 0:
            return x
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
        layout = Layout(self.grid, tuple(x.shape), (None,) * x.dim(), samples)
        kept = part_of_mask(layout, tuple(mask_shape), 1 - p, x).div_(1 - p)
        return x.mul_(kept) if inplace else x * kept


_CAUGHT = {
    F.dropout: SerialRandomness.dropout,
    torch.dropout: SerialRandomness.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), SerialRandomness.feature_dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), SerialRandomness.alpha_dropout),
    F.batch_norm: SerialRandomness.batch_norm,
}
