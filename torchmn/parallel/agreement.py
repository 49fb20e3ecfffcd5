"""What ranks of a parallel model compare, so that none goes on alone: before forward, after a dry run, in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator


def compare_forwards(
    comm: Communicator,
    model: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    inputs: Sequence[Tensor],
    told: Callable[[], tuple],
    others: tuple,
    parameters: Sequence[tuple[str, nn.Parameter]],
) -> None:
    """Raises MismatchError on every rank unless all are about to compute the same forward, and the same backward.

    Args:
        modules: of the model, with their names.
        told: returns, of each input, what ranks have in common.
        others: arguments that are no tensors.
        parameters: of the model, with their names.
    """
    training = model.training
    other_modes = [name for name, module in modules if module.training != training]
    gradients = "inference mode" if torch.is_inference_mode_enabled() else torch.is_grad_enabled()
    # What one rank alone has frozen, its backward does not reach: the others would wait for it there.
    same = {
        "mode": "training" if training else "evaluation",
        "modules in the other mode": tuple(other_modes),
        "gradients": gradients,
        "autocast": _autocast(inputs),
        "whole inputs": told,
        "other arguments": others,
        "frozen parameters": lambda: tuple([name for name, p in parameters if not p.requires_grad]),
    }
    comm.agree("forward of a parallel model", **same)


def _autocast(inputs: Sequence[Tensor]) -> torch.dtype | None:
    """What computations are cast to; None for nothing."""
    device = inputs[0].device.type if inputs else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def plain_values(leaves: Sequence[Any]) -> tuple:
    """Those arguments that a rank can compare with another's, and on which the path of a forward may depend."""
    return tuple(x for x in leaves if x is None or isinstance(x, bool | int | float | str))
