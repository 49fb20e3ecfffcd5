"""Parameters that `torch.func.functional_call` puts in place of a parallel model's own while it runs."""

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


class OwnParameters:
    """Where a model keeps its parameters, to notice that others are there."""

    def __init__(self, model: nn.Module):
        self._places = [
            (f"{prefix}.{key}" if prefix else key, own_parameters(module), key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        ]

    def replaced(self) -> dict[str, Any]:
        """By name, what stands for a parameter now and is none: its gradient is summed over tiles in backward."""
        return {
            name: held[key]
            for name, held, key, own in self._places
            if held.get(key) is not own and not isinstance(held.get(key), nn.Parameter | None)
        }

    @contextmanager
    def back(self) -> Iterator[None]:
        """While it lasts, the model has its own parameters: they are the ones whose roles are learnt and marked."""
        given = [(held, key, held.get(key)) for _, held, key, own in self._places if held.get(key) is not own]
        for _, held, key, own in self._places:
            if not isinstance(held.get(key), nn.Parameter | None):
                held[key] = own
        try:
            yield
        finally:
            for held, key, tensor in given:
                held[key] = tensor


def check_own(model: nn.Module) -> None:
    """An error if a model that is seen for the first time has not its own parameters, to which roles belong."""
    given = [name for name, p in model.named_parameters() if not isinstance(p, nn.Parameter)]
    if given:
        raise ParallelizeError(
            f"functional_call of a copy of a parallel model, with {', '.join(given)}: call the copy itself once "
            "before, so that it knows its own parameters"
        )


def compare_given(comm: Communicator, given: Mapping[str, Any]) -> None:
    """MismatchError on every rank if ranks that share images would compute with different parameters."""
    numbers = {name: checksum_of(torch.ops.aten.detach(x)) for name, x in given.items()}
    told = comm.agree(_OPERATION, differ=tuple(numbers.values()), optional=True, parameters=tuple(numbers))
    odd = [name for place, name in enumerate(numbers) if len({values[place] for values in told}) > 1]
    if odd:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {_OPERATION}: ranks that share images were given different values of "
            f"{', '.join(odd)}. What torch.autograd.grad returns for a parameter is this rank's share of the gradient: "
            "take the mean over ranks, comm.allreduce(g, 'mean'), before you compute new parameters with it"
        )
