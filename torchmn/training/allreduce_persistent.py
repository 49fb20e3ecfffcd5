"""AllreducePersistent: the running statistics of all ranks become one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm, persistent_buffers
from torchmn.communicators import models
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.functions.moments import Moments, union
from torchmn.optim.gradients import number_of_samples


class AllreducePersistent:
    """Makes the buffers of `model` equal on all ranks, by joining what each of them has seen; call it on every rank.

        synchronize_buffers = AllreducePersistent(model, comm)
        ...
        synchronize_buffers()    # before an evaluation or a checkpoint
        evaluate(model, loader)

    Ordinary BatchNorm layers track the statistics of their own rank's batches. Joined, with a weight for each rank:

    - running mean: the weighted mean;
    - running variance: that of the union, so the weighted mean of variances *plus* that of the squared distances
      of the ranks' means from the common mean;
    - num_batches_tracked: the largest, which is what one process would have counted.

    The weights are each layer's num_batches_tracked, so that a rank that saw nothing counts for nothing; where no rank
    saw anything, or all weights are 0, all count alike. Pass `weight=number of samples` to the call instead where ranks
    saw batches of different sizes.

    Other floating-point buffers become their plain mean. Integers and bools stay as they are, and so do buffers that
    are not in `state_dict`.
    """

    def __init__(self, model: nn.Module, comm: Communicator):
        if not isinstance(model, nn.Module) or not isinstance(comm, Communicator):
            raise ArgumentError(f"AllreducePersistent: expected a module and a communicator, got {model!r}, {comm!r}")
        self.model, self.comm = model, comm

    @torch.no_grad()
    def __call__(self, weight: float | None = None) -> None:
        named = dict(_persistent_floats(self.model))
        layers = [m for m in self.model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        statistics = {id(x) for layer in layers for x in (layer.running_mean, layer.running_var)}
        weight, problem = number_of_samples(weight)
        self._check(named, weight, problem)
        _join_statistics(self.comm, layers, weight)
        _average(self.comm, [x for x in named.values() if id(x) not in statistics])

    def _check(self, named: dict[str, Tensor], weight: float | None, problem: str | None) -> None:
        signature = tuple((name, x.dtype, tuple(x.shape)) for name, x in named.items())
        with self.comm.agreed("AllreducePersistent", problem, differ=signature, weighted=weight is not None) as ranks:
            if not ranks.alike:
                models.raise_difference(self.comm, "AllreducePersistent", "buffer", ranks.differ)


def _persistent_floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The floating-point and complex buffers that `state_dict` has, each once."""
    seen = set()
    for path, module in model.named_modules():
        for name, x in persistent_buffers(module):
            inexact = x.is_floating_point() or x.is_complex()
            if inexact and id(x) not in seen:
                seen.add(id(x))
                yield f"{path}.{name}" if path else name, x


def _join_statistics(comm: Communicator, layers: list[BatchNorm], weight: float | None) -> None:
    """Give every layer the running statistics of the union of what the ranks' layers saw; one message."""
    mine = [torch.cat([_packed(layer, weight), _tracked(layer)]) for layer in layers]
    if not mine:
        return
    sizes = [len(part) for part in mine]
    everyone = [flat.split(sizes) for flat in comm.allgather(torch.cat(mine))]
    for place, layer in enumerate(layers):
        assert layer.running_mean is not None and layer.running_var is not None
        told = [parts[place] for parts in everyone]
        whole = union(_weighted([Moments.unpacked(part[:-1]) for part in told]))
        layer.running_mean.copy_(whole.mean)
        layer.running_var.copy_(whole.squares / whole.count)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(int(max(part[-1] for part in told)))


def _weighted(seen: list[Moments]) -> list[Moments]:
    """Moments of as many values as each rank has weight, of one value each where no rank has any.

    seen: weight, mean and variance (in place of the squares) of each rank
    """
    alike = all(float(part.count) == 0 for part in seen)
    counts = [1.0 if alike else float(part.count) for part in seen]
    return [Moments(n, part.mean, part.squares * n) for part, n in zip(seen, counts, strict=True)]


def _packed(layer: BatchNorm, weight: float | None) -> Tensor:
    """Weight, mean and variance of what this rank's layer saw; the variance is not lost where the weight is 0."""
    assert layer.running_mean is not None and layer.running_var is not None
    tracked = float(_tracked(layer))
    count = tracked if weight is None or tracked == 0 else float(weight)
    return Moments(count, layer.running_mean.double(), layer.running_var.double()).packed()


def _tracked(layer: BatchNorm) -> Tensor:
    assert layer.running_mean is not None
    number = 1 if layer.num_batches_tracked is None else layer.num_batches_tracked
    return torch.as_tensor(number, dtype=torch.float64, device=layer.running_mean.device).reshape(1)


def _average(comm: Communicator, tensors: list[Tensor]) -> None:
    """Replace tensors by their means over ranks; one message."""
    if not tensors:
        return
    wide = [(torch.view_as_real(x) if x.is_complex() else x).double().reshape(-1) for x in tensors]
    means = comm.allreduce(torch.cat([x.to(wide[0].device) for x in wide]), "mean")
    for x, mean in zip(tensors, means.split([len(part) for part in wide]), strict=True):
        x.copy_((torch.complex(*mean.view(-1, 2).unbind(1)) if x.is_complex() else mean).view(x.shape))
