"""Errors about sharded tensors that name the module of the user's model in which they occurred."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.utils import checkpoint

from torchmn._torch_compat import MODULE_CALL
from torchmn.communicators.watchdog.source_lines import running_frames
from torchmn.context import here
from torchmn.errors import ParallelizeError


def where() -> str:
    """Returns a description of the innermost running module, such as `conv2 (Conv2d(...))`. Walks the stack."""
    owners = [frame.f_locals.get("self") for frame in running_frames() if frame.f_code.co_name != MODULE_CALL]
    running = [owner for owner in owners if isinstance(owner, nn.Module)]
    parallel = (module for module in running if hasattr(module, "parallelism"))
    model = here.recorder.model if here.recorder is not None else next(parallel, None)
    names = {} if model is None else {module: name for name, module in model.named_modules()}
    module = next((module for module in running if module in names), None)
    if module is None:
        return "the model"
    inner = repr(module) if not any(module.children()) else type(module).__name__
    return f"{names[module] or type(module).__name__} ({inner})"


def refuse(problem: str) -> NoReturn:
    """Raises a ParallelizeError that names the running module."""
    raise ParallelizeError(f"{where()}: {problem}")


def refuse_in_checkpoint(function: str) -> None:
    """Raises a ParallelizeError inside a function that `torch.utils.checkpoint` will recompute in backward.

    The recomputation runs outside of the model's forward: results that depend on which samples this rank has, or on
    random numbers that ranks share, would differ from those of the first time.

    Args:
        function: its name, for the error.
    """
    if any(frame.f_code.co_filename == checkpoint.__file__ for frame in running_frames()):
        refuse(
            f"{function} inside torch.utils.checkpoint would give other values when it is recomputed on this grid. "
            "Leave it out of the checkpointed part"
        )
