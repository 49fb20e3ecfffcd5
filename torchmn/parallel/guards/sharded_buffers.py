"""Guard: buffers that a model sets to a sharded tensor."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchmn.errors import ParallelizeError
from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.tensor import ShardedTensor


@guard(on="trace", why="each rank would keep its shard, and the state dict would not hold the global tensor")
class ShardedBuffers(TraceGuard):
    """Raises an error if a buffer is a sharded tensor after forward."""

    def __init__(self, model: nn.Module):
        self.model = model

    def end(self, result: Any) -> None:
        for name, buffer in self.model.named_buffers():
            if isinstance(buffer, ShardedTensor):
                raise ParallelizeError(
                    f"the buffer {name} is set to a tensor that is cut over ranks, {buffer.spec}: each rank would keep "
                    "its shard, and the state dict would not hold the global tensor. Keep statistics that are whole, "
                    "such as a mean over all cut dims, or use mode='datapar'"
                )
