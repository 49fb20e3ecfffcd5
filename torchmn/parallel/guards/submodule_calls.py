"""Guard: submodules that are called with a plain image outside of the forward of their parallel model."""

from __future__ import annotations

from torch import Tensor, nn

from torchmn.context import here
from torchmn.errors import ParallelizeError
from torchmn.parallel.events import ModelEvent, guard
from torchmn.sharded.tensor import ShardedTensor


@guard(on="model", why="outside of the model's forward a layer would compute a tile without its halo")
def submodule_calls(seen: ModelEvent) -> None:
    """Registers hooks by which submodules of a model on tiles take images only inside the model's forward."""
    if not seen.parallelism.cuts_images or seen.parallelism.grid.tile_count == 1:
        return
    for name, module in seen.model.named_modules():
        if module is not seen.model:
            module.register_forward_pre_hook(_OnlyInside(name))


class _OnlyInside:
    """A forward pre-hook that raises an error for a plain image outside of the model's forward."""

    ignores_convolutions = True  # of ShardedTensors: fused convolutions need not call it

    def __init__(self, name: str):
        self.name = name

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if here.samples is not None or not args or not isinstance(args[0], Tensor):
            return
        if not isinstance(args[0], ShardedTensor) and args[0].dim() > 2:
            raise ParallelizeError(
                f"{self.name} ({type(module).__name__}) was called outside of the forward of its parallel model, where "
                "a tile has no halo. Call the whole model, and let its forward return what you need."
            )
