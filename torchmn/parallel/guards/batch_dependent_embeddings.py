"""Guard: embeddings whose result depends on all samples of a batch."""

from __future__ import annotations

from torch import nn

from torchmn.parallel.events import ModelEvent, guard


@guard(
    on="model", why="max_norm and scale_grad_by_freq depend on the ids of the whole batch, not of one rank's samples"
)
def batch_dependent_embeddings(seen: ModelEvent) -> str | None:
    """Returns an error for such an embedding if ranks along `data` have different samples."""
    if seen.parallelism.grid.sizes["data"] == 1:
        return None
    for name, module in seen.model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        settings = [setting for setting in ("max_norm", "scale_grad_by_freq") if getattr(module, setting)]
        if settings:
            return (
                f"{name} ({type(module).__name__}): {' and '.join(settings)} depends on the ids of the whole batch, of "
                "which each rank along 'data' has only its samples. Leave it out, or use a grid without the axis data"
            )
    return None
