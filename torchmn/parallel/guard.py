"""Keeps the parts of a parallel model from being taken for the whole: by an optimizer, or in a call of a submodule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmn.errors import ParallelizeError
from torchmn.sharded.sharding import is_in_forward
from torchmn.sharded.tensor import ShardedTensor

_installed = False


def guard(parameter: nn.Parameter) -> None:
    """Let only multi-node optimizers step this parameter, whose gradient is a share of the whole."""
    global _installed
    parameter._torchmn_is_shared = True  # type: ignore[attr-defined]
    if not _installed:
        register_optimizer_step_pre_hook(_check)
        _installed = True


def _check(optimizer: Optimizer, *_: Any) -> None:
    # A multi-node optimizer marks the one that it wraps.
    if getattr(optimizer, "_torchmn_takes_mean", False) or hasattr(optimizer, "actual_optimizer"):
        return
    if any(getattr(p, "_torchmn_is_shared", False) for group in optimizer.param_groups for p in group["params"]):
        raise ParallelizeError(
            f"{type(optimizer).__name__}.step on a parallel model: each rank has only its share of the gradients. Wrap "
            "it: optimizer = torchmn.create_multi_node_optimizer(optimizer, grid, model=model)"
        )


_check.only_looks = True  # type: ignore[attr-defined]  (at gradients: fused updates need not mind it)


def keep_inside(model: nn.Module) -> None:
    """Let the submodules of a model on tiles be called with images only by the model itself."""
    for name, module in model.named_modules():
        if module is not model:
            module.register_forward_pre_hook(_OnlyInside(name))


class _OnlyInside:
    """A hook that refuses a plain image outside of the model's forward: the layer would compute without its halo."""

    ignores_convolutions = True  # of ShardedTensors: chains need not call it

    def __init__(self, name: str):
        self.name = name

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if is_in_forward() or not args or not isinstance(args[0], Tensor):
            return
        if not isinstance(args[0], ShardedTensor) and args[0].dim() > 2:
            raise ParallelizeError(
                f"{self.name} ({type(module).__name__}) was called outside of the forward of its parallel model, where "
                "a tile has no halo. Call the whole model; what it should return, its forward must return."
            )
