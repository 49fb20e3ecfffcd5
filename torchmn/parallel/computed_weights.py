"""Weights that torch computes before every forward and keeps as attributes: of pruned layers, the old weight_norm."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from torchmn._torch_compat import forward_pre_hooks


def copy_with_computed_weights(model: nn.Module) -> Any:
    """Returns a deep copy of a model: torch copies no result of a computation, and these will be computed anew."""
    memo: dict[int, Any] = {}  # of deepcopy: by id, what stands for an object in the copy
    for module in model.modules():
        if any(type(hook).__module__.startswith("torch.nn.utils") for hook in forward_pre_hooks(module).values()):
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    memo[id(value)] = deepcopy(value.detach(), memo)
    return deepcopy(model, memo)
