"""What a model meets in a run without values besides its input: constants that it makes or keeps, and attributes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchmn._torch_compat import own_buffers, own_modules, own_parameters
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of, map_only


class ConstantsWithoutValues(TorchFunctionMode):
    """While it lasts, a constant that meets a tensor without values loses its own: torch computes on one device only.

    So a model may write `x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)`, as it may on one CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = leaves_of(Tensor, (args, kwargs))
        if func is torch.tensor and any(isinstance(x, ShardedTensor) for x in tensors):
            refuse("torch.tensor of a cut tensor would copy this rank's part alone. Use x.detach().clone()")
        if len(tensors) > 1 and any(x.is_meta for x in tensors) and any(_is_constant(x) for x in tensors):
            args = map_only(Tensor, _without_values, args)
            kwargs = {name: map_only(Tensor, _without_values, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_constant(x: Tensor) -> bool:
    """Not what learns: the role of a parameter that no module has registered could not be found."""
    return not x.is_meta and x.dim() > 0 and not x.requires_grad


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta") if _is_constant(x) else x


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes that they had before: none keeps what a run without values left there."""
    before = [(module, [(held, dict(held)) for held in _attributes(module)]) for module in model.modules()]
    try:
        yield
    finally:
        for _, dicts in before:
            for held, values in dicts:
                held.clear()
                held.update(values)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the generators of torch, Python and NumPy are as before: the next forward draws what the first would.

    Not for ranks that are threads: they share the generators, and a model that draws from them is refused there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [module.__dict__, own_parameters(module), own_buffers(module), own_modules(module)]
