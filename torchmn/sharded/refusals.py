"""Errors that name the module of the user's model in which they happened."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.utils import checkpoint

from torchmn._torch_compat import MODULE_CALL
from torchmn.communicators.watchdog import running_frames
from torchmn.errors import ParallelizeError


def where() -> str:
    """Words for the innermost running module: `conv2 (Conv2d(...))`.

    It is found by walking the stack, which only errors pay for.
    """
    owners = [frame.f_locals.get("self") for frame in running_frames() if frame.f_code.co_name != MODULE_CALL]
    running = [owner for owner in owners if isinstance(owner, nn.Module) and "training" in vars(owner)]  # initialised
    if not running:
        return "the model"
    # A model that is not parallel yet is the outermost one, but for modules that do not hold it.
    for model in [module for module in running if hasattr(module, "parallelism")] or reversed(running):
        names = {module: name for name, module in model.named_modules()}
        module = next(module for module in running if module in names)
        if module is not model:
            return _words(names[module], module)
    return _words(type(running[0]).__name__, running[0])


def _words(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__ if any(module.children()) else module!r})"


def refuse(problem: str) -> NoReturn:
    """Raise, naming the running module."""
    raise ParallelizeError(f"{where()}: {problem}")


def refuse_in_checkpoint(function: str) -> None:
    """Raise if this runs in a part of the model that `torch.utils.checkpoint` will compute again.

    That happens during backward, outside of the model's forward: what depends on which samples this rank has, or on
    random numbers that ranks share, would be computed in another way than the first time.
    """
    if any(frame.f_code.co_filename == checkpoint.__file__ for frame in running_frames()):
        refuse(
            f"{function} in a part that torch.utils.checkpoint computes again would not give the same again on this "
            "grid. Leave it out of the checkpointed part"
        )
