"""Support for `torch.func.functional_call`, which replaces the parameters of a parallel model while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchmn._torch_compat import own_parameters
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import checksum_of
from torchmn.errors import MismatchError, ParallelizeError

_OPERATION = "forward of a parallel model with parameters of functional_call"


class ParameterSlots:
    """The slots of a model's modules in which its parameters are registered; finds out which were replaced."""

    def __init__(self, model: nn.Module):
        self._slots = [
            (f"{prefix}.{key}" if prefix else key, own_parameters(module), key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        ]

    def replaced(self) -> dict[str, Any]:
        """Returns by name the tensors that replace parameters. Their gradients are summed over tiles in backward."""
        return {
            name: registered[key]
            for name, registered, key, parameter in self._slots
            if registered.get(key) is not parameter and not isinstance(registered.get(key), nn.Parameter | None)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which the model has its own parameters again, whose gradient roles a dry run sets."""
        replaced = [
            (registered, key, registered.get(key))
            for _, registered, key, parameter in self._slots
            if registered.get(key) is not parameter
        ]
        for _, registered, key, parameter in self._slots:
            if not isinstance(registered.get(key), nn.Parameter | None):
                registered[key] = parameter
        try:
            yield
        finally:
            for registered, key, tensor in replaced:
                registered[key] = tensor


def check_registered(model: nn.Module) -> None:
    """Raises a ParallelizeError if parameters of a model are replaced in its first forward, before they have roles."""
    replaced = [name for name, p in model.named_parameters() if not isinstance(p, nn.Parameter)]
    if replaced:
        raise ParallelizeError(
            f"functional_call of a copy of a parallel model, with {', '.join(replaced)}: the roles of its parameters "
            "are not known yet. Call the copy itself once before"
        )


def compare_replaced(comm: Communicator, replaced: Mapping[str, Any]) -> None:
    """Raises a MismatchError on every rank if ranks that share images would compute with different parameters."""
    checksums = {name: checksum_of(torch.ops.aten.detach(x)) for name, x in replaced.items()}
    by_rank = comm.agree(_OPERATION, differ=tuple(checksums.values()), optional=True, parameters=tuple(checksums))
    different = [name for place, name in enumerate(checksums) if len({values[place] for values in by_rank}) > 1]
    if different:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {_OPERATION}: ranks that share images have different values of "
            f"{', '.join(different)}. torch.autograd.grad returns this rank's contribution to the gradient of a "
            "parameter: take the mean over ranks, comm.allreduce(g, 'mean'), before computing new parameters with it"
        )
