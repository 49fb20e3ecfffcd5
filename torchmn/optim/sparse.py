"""Gradients of embeddings: only the rows that were touched travel."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator


def mean_of_sparse(comm: Communicator, grad: Tensor | None, parameter: Tensor, share: float) -> Tensor:
    """The sum over ranks of `share` times each rank's sparse gradient of a parameter, on every rank.

    A rank without a gradient, or with a share of 0, adds nothing.
    """
    if grad is None or share == 0:
        sparse_dims = 1
        indices = torch.zeros(sparse_dims, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_zeros(0, *parameter.shape[sparse_dims:])
    else:
        grad = grad.coalesce()
        indices, values = grad.indices(), grad.values() * share
    all_indices = torch.cat(comm.allgather(indices), dim=1)
    all_values = torch.cat(comm.allgather(values), dim=0)
    return torch.sparse_coo_tensor(all_indices, all_values, parameter.shape, check_invariants=False).coalesce()
