"""The names of ChainerMN's `links`; layers are in torchmn.nn, chains in torchmn.graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.graph import MultiNodeChainList
from torchmn.nn import create_mnbn_model, create_multi_node_n_step_rnn
from torchmn.nn.layers.batch_norm import MultiNodeBatchNorm
from torchmn.other_spellings import other_spellings

__all__ = ["MultiNodeBatchNormalization", "MultiNodeChainList", "create_mnbn_model", "create_multi_node_n_step_rnn"]

_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "avg_mean": "running_mean",
    "avg_var": "running_var",
    "N": "num_batches_tracked",
}
"""ChainerMN's names of parameters and statistics, and torch's."""


class MultiNodeBatchNormalization(MultiNodeBatchNorm):
    """Batch normalisation over the batches of all ranks, with ChainerMN's arguments, of inputs with any number of dims.

    Args:
        size: the number of channels, of dim 1.
        comm: the ranks over whose batches to normalise.
        decay: of the running statistics: 1 - momentum.
        eps: added to the variance.
        dtype: of parameters and statistics, of torch or NumPy.
        use_gamma, use_beta: whether to have a scale (`weight`) and a shift (`bias`).
        initial_gamma, initial_beta: a number, or one per channel.
    """

    @other_spellings
    def __init__(
        self,
        size: int,
        comm: Communicator,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
    ):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        super().__init__(size, comm, eps, 1 - decay, affine=use_gamma or use_beta, dtype=dtype)
        for name, used, initial in (("weight", use_gamma, initial_gamma), ("bias", use_beta, initial_beta)):
            parameter: nn.Parameter | None = getattr(self, name)
            if not used:
                self.register_parameter(name, None)
            elif initial is not None and parameter is not None:
                with torch.no_grad():
                    parameter.copy_(torch.as_tensor(initial))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(_NAMES.get(name, name))

    def forward(self, input: Tensor, finetune: bool = False) -> Tensor:  # noqa: A002  (torch's name)
        """Normalises `input`; with `finetune`, the running statistics become the mean of all batches so far."""
        if not finetune:
            return super().forward(input)
        momentum, self.momentum = self.momentum, None
        try:
            return super().forward(input)
        finally:
            self.momentum = momentum

    def start_finetuning(self) -> None:
        """Counts batches from zero: calls with `finetune` then average from the next one on."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (as in torch)
        if input.dim() < 2:
            raise ArgumentError(f"expected an input of shape (batch, channel, ...), got {tuple(input.shape)}")
