"""`AllreducePersistent`: combines the running statistics and other buffers of a model over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm, persistent_buffers
from torchmn.communicators import models
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.errors import ArgumentError
from torchmn.functions.moments import Moments, union
from torchmn.optim.gradients import number_of_samples


class AllreducePersistent:
    """Makes the floating-point buffers of a model equal on all ranks; all ranks must call.

        synchronize_buffers = AllreducePersistent(model, comm)
        ...
        synchronize_buffers()    # before an evaluation or a checkpoint
        evaluate(model, loader)

    BatchNorm layers track the statistics of one rank's batches. They are combined with a weight for each rank:

    - running mean: the weighted mean;
    - running variance: the variance of the union, that is the weighted mean of the variances *plus* that of the
      squared distances of the ranks' means from the common mean;
    - num_batches_tracked: the maximum, which is what one process would have counted.

    The weight of a rank is the layer's num_batches_tracked; if all weights are 0, all ranks count equally. If ranks had
    batches of different sizes, pass their number of samples: `synchronize_buffers(weight=samples)`.

    Other floating-point buffers become their unweighted mean. Integers, bools and non-persistent buffers, which are
    not in `state_dict`, are not changed.

    Args:
        model: the same on all ranks.
        comm: communicator whose ranks have trained the model.

    Raises:
        ArgumentError: for a wrong argument.
        MismatchError: when called, on every rank, if the buffers differ in name, dtype or shape.
    """

    def __init__(self, model: nn.Module, comm: Communicator):
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"AllreducePersistent: expected model to be a module, got {describe(model)}")
        self.model, self.comm = model, as_communicator(comm, "AllreducePersistent")

    @torch.no_grad()
    def __call__(self, weight: float | None = None) -> None:
        named = dict(_persistent_floats(self.model))
        layers = [m for m in self.model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        statistics = {id(x) for layer in layers for x in (layer.running_mean, layer.running_var)}
        weight, problem = number_of_samples(weight)
        self._check(named, weight, problem)
        _combine_statistics(self.comm, layers, weight)
        _average(self.comm, [x for x in named.values() if id(x) not in statistics])

    def _check(self, named: dict[str, Tensor], weight: float | None, problem: str | None) -> None:
        signature = tuple((name, x.dtype, tuple(x.shape)) for name, x in named.items())
        with self.comm.agreed("AllreducePersistent", problem, differ=signature, weighted=weight is not None) as ranks:
            if not ranks.alike:
                models.raise_difference(self.comm, "AllreducePersistent", "buffer", ranks.differ)


def _persistent_floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of the floating-point and complex buffers in `state_dict`, each once."""
    seen = set()
    for path, module in model.named_modules():
        for name, x in persistent_buffers(module):
            inexact = x.is_floating_point() or x.is_complex()
            if inexact and id(x) not in seen:
                seen.add(id(x))
                yield f"{path}.{name}" if path else name, x


def _combine_statistics(comm: Communicator, layers: list[BatchNorm], weight: float | None) -> None:
    """Sets the running statistics of every layer to those of the union of all ranks' batches, with one message."""
    local = [torch.cat([_packed(layer, weight), _tracked(layer)]) for layer in layers]
    if not local:
        return
    sizes = [len(part) for part in local]
    ranks = [flat.split(sizes) for flat in comm.allgather(torch.cat(local))]
    for number, layer in enumerate(layers):
        assert layer.running_mean is not None and layer.running_var is not None
        parts = [rank[number] for rank in ranks]
        whole = union(_weighted([Moments.unpacked(part[:-1]) for part in parts]))
        layer.running_mean.copy_(whole.mean)
        layer.running_var.copy_(whole.squares / whole.count)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(int(max(part[-1] for part in parts)))


def _weighted(ranks: list[Moments]) -> list[Moments]:
    """Returns moments whose counts are the weights of the ranks, or 1 if all weights are 0.

    Args:
        ranks: weight, mean, and in the field `squares` the variance, of each rank.
    """
    unweighted = all(float(part.count) == 0 for part in ranks)
    counts = [1.0 if unweighted else float(part.count) for part in ranks]
    return [Moments(n, part.mean, part.squares * n) for part, n in zip(ranks, counts, strict=True)]


def _packed(layer: BatchNorm, weight: float | None) -> Tensor:
    """Returns weight, mean and variance of this rank's layer; the variance itself, to keep it if the weight is 0."""
    assert layer.running_mean is not None and layer.running_var is not None
    tracked = float(_tracked(layer))
    count = tracked if weight is None or tracked == 0 else float(weight)
    return Moments(count, layer.running_mean.double(), layer.running_var.double()).packed()


def _tracked(layer: BatchNorm) -> Tensor:
    assert layer.running_mean is not None
    number = 1 if layer.num_batches_tracked is None else layer.num_batches_tracked
    return torch.as_tensor(number, dtype=torch.float64, device=layer.running_mean.device).reshape(1)


def _average(comm: Communicator, tensors: list[Tensor]) -> None:
    """Replaces tensors by their means over ranks, with one message."""
    if not tensors:
        return
    wide = [(torch.view_as_real(x) if x.is_complex() else x).double().reshape(-1) for x in tensors]
    means = comm.allreduce(torch.cat([x.to(wide[0].device) for x in wide]), "mean")
    for x, mean in zip(tensors, means.split([len(part) for part in wide]), strict=True):
        x.copy_((torch.complex(*mean.view(-1, 2).unbind(1)) if x.is_complex() else mean).view(x.shape))
