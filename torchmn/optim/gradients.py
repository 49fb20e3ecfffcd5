"""The mean of the gradients of all ranks: agreement on which exist and on their weights, and the reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.mean import means
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import MismatchError
from torchmn.gradient_role import role_of

ABSENT, DENSE, SPARSE = 0, 1, 2


@dataclass
class Gradient:
    """The gradient of one parameter. While it is sent, it may be detached from the parameter.

    Attributes:
        name: of the parameter, for error messages.
        parameter: whose gradient it is.
        value: the gradient, or None.
        over: of a slice, the ranks with the same slice.
    """

    name: str
    parameter: Tensor
    value: Tensor | None
    over: Communicator | None = None

    def put_back(self) -> None:
        """Sets `parameter.grad`."""
        self.parameter.grad = self.value


class GradientCollection:
    """The gradients of an optimizer's parameters, in the order of its groups, which is the same on all ranks.

    Args:
        optimizer: that has the parameters.
        names: of parameters, by id; others are named by their group and position.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]):
        self._optimizer = optimizer
        self._names = names
        self._trainable: set[int] | None = None
        self._ids: list[int] = []
        self._gradients: list[Gradient] = []

    def gradients(self) -> list[Gradient]:
        """Returns the current gradients. The next call changes the returned objects."""
        parameters = self.parameters()
        ids = [id(p) for p in parameters]
        if ids != self._ids:
            self._gradients = [Gradient(name, p, None) for name, p in zip(self._all_names(), parameters, strict=True)]
            self._ids = ids
        for grad in self._gradients:
            grad.value, grad.over = grad.parameter.grad, role_of(grad.parameter).over
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Returns all parameters."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def trainable(self) -> set[int]:
        """Returns the ids of parameters that need a gradient."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}

    def unfrozen(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns those of `grads` whose parameters were frozen at the last call of `mark_trainable`."""
        before = self._trainable or set()
        return [grad for grad in grads if grad.parameter.requires_grad and id(grad.parameter) not in before]

    def mark_trainable(self, grads: Sequence[Gradient] | None = None) -> None:
        """Records which parameters need a gradient now, for `unfrozen`; with `grads`, only adds those of them."""
        if grads is None or self._trainable is None:
            self._trainable = self.trainable()
        else:
            self._trainable |= {id(grad.parameter) for grad in grads if grad.parameter.requires_grad}

    def _all_names(self) -> list[str]:
        return [
            self._names.get(id(p)) or f"param_groups[{group}]['params'][{place}]"
            for group, values in enumerate(self._optimizer.param_groups)
            for place, p in enumerate(values["params"])
        ]


@dataclass(frozen=True)
class StepAgreement:
    """The agreement of all ranks on the gradients of a step.

    Attributes:
        kinds: `ABSENT`, `DENSE` or `SPARSE` for each gradient; None if they were compared before, bucket by bucket.
        share: weight of this rank in the mean; the weights of all ranks add up to 1.
        equal: whether all ranks have the same weight.
        dtypes: of gradients whose dtype is not that of their parameter; () if all are.
        statements: `StepFingerprint.differ` of all ranks, by element and by rank; None if all are equal.
    """

    kinds: tuple[int, ...] | None
    share: float
    equal: bool = True
    dtypes: tuple[torch.dtype | None, ...] = ()
    statements: Sequence[Sequence[Any]] | None = None


@dataclass(frozen=True)
class StepFingerprint:
    """What ranks compare before a step besides gradients: `same` must be equal on all ranks, `differ` need not."""

    same: Mapping[str, Any] = field(default_factory=dict)
    differ: tuple[Any, ...] = ()


def agree(
    comm: Communicator,
    grads: Sequence[Gradient],
    weight: float | None,
    zero_fill: bool,
    operation: str,
    fingerprint: StepFingerprint = StepFingerprint(),  # noqa: B008  (frozen)
) -> StepAgreement:
    """Compares gradients and weights over ranks, in one small message if they are equal.

    A gradient that no rank has stays absent, as in one process. One that only some ranks have counts as zeros on the
    others.

    Args:
        comm: communicator of the ranks.
        grads: of this rank.
        weight: number of samples of this rank; None on all ranks for equal weights.
        zero_fill: if False, a gradient that only some ranks have raises an error.
        operation: for error messages.
        fingerprint: what else is compared.

    Raises:
        MismatchError: on every rank, if what must be the same differs, or if all weights are 0.
    """
    weight, problem = number_of_samples(weight)
    shapes, kinds, odd_dtypes = [], [], []
    for grad in grads:
        x, parameter = grad.value, grad.parameter
        shapes.append(f"{'own slice' if grad.over else list(parameter.shape)} {parameter.dtype}")
        kinds.append(ABSENT if x is None else DENSE if x.layout is torch.strided else SPARSE)
        # It may differ from its parameter's with `parameter.grad_dtype`.
        odd_dtypes.append(None if x is None or x.dtype is parameter.dtype else x.dtype)
    kinds, dtypes = tuple(kinds), tuple(odd_dtypes) if any(odd_dtypes) else ()
    # Shapes as one string, which is faster to compare than a tuple.
    same = {"weighted": weight is not None, **fingerprint.same, "parameters": ", ".join(shapes)}
    with comm.agreed(operation, problem, differ=(kinds, weight, dtypes, *fingerprint.differ), **same) as ranks:
        alike, statements = ranks.alike, ranks.differ
    if alike:
        _check_samples(comm, operation, weight)
        return StepAgreement(kinds, 1.0 / comm.size, dtypes=dtypes)
    all_kinds, weights, all_dtypes, *more = zip(*statements, strict=True)
    union = tuple(max(column) for column in zip(*all_kinds, strict=True))
    _check(comm, operation, grads, all_kinds, union, zero_fill)
    dtypes = _common_dtypes(comm, operation, grads, all_kinds, all_dtypes)
    if weight is None:
        return StepAgreement(union, 1.0 / comm.size, True, dtypes, more)
    _check_samples(comm, operation, max(weights))
    return StepAgreement(union, weight / sum(weights), len(set(weights)) == 1, dtypes, more)


def loss_weight(comm: Communicator, samples: float) -> float:
    """Returns the factor of a rank's mean loss over `samples` for which the plain mean over ranks is exact."""
    number, problem = number_of_samples(samples)
    if samples is None:
        problem = "expected a number of samples, got None"
    numbers = [samples for (samples,) in comm.agree("weigh", problem, differ=(number,))]
    _check_samples(comm, "weigh", max(numbers))
    return number * comm.size / sum(numbers)


def number_of_samples(given: Any) -> tuple[Any, str | None]:
    """Returns a weight as a plain number (None for None), and an error text or None."""
    number = given.item() if isinstance(given, Tensor | np.generic) and math.prod(given.shape) == 1 else given
    if number is None or (isinstance(number, int | float) and 0 <= number < float("inf")):
        return number, None
    return None, f"expected weight to be a number of samples >= 0, got {number!r}"


def _check_samples(comm: Communicator, operation: str, largest: float | None) -> None:
    if largest == 0:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {operation}: the weights of all ranks are 0, so there is no mean: "
            "skip this step on all ranks"
        )


def _check(
    comm: Communicator,
    operation: str,
    grads: Sequence[Gradient],
    all_kinds: Sequence[tuple[int, ...]],
    union: tuple[int, ...],
    zero_fill: bool,
) -> None:
    """Raises on every rank if gradients are missing without `zero_fill`, or are sparse on some ranks only."""
    lines = []
    for place, grad in enumerate(grads):
        kinds = [rank_kinds[place] for rank_kinds in all_kinds]
        without = [rank for rank, kind in enumerate(kinds) if kind == ABSENT]
        present = {kind for kind in kinds if kind != ABSENT}
        if len(present) > 1:
            lines.append(f"  {grad.name}: the gradient is sparse on some ranks and dense on others")
        elif union[place] != ABSENT and without and not zero_fill:
            lines.append(f"  {grad.name}: no gradient on rank {ranks_text(without)}")
    if lines:
        lines.insert(0, f"rank {comm.rank} of {comm.size}: {operation}: ranks do not have the same gradients:")
        lines.append("zero_fill=True counts a missing gradient as zeros.")
        raise MismatchError("\n".join(lines))


def _common_dtypes(
    comm: Communicator,
    operation: str,
    grads: Sequence[Gradient],
    all_kinds: Sequence[tuple[int, ...]],
    all_dtypes: Sequence[tuple[torch.dtype | None, ...]],
) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes that are not their parameter's; raises on every rank if a gradient has several."""
    if not any(all_dtypes):
        return ()
    common = []
    for place, grad in enumerate(grads):
        present = [rank for rank, kinds in enumerate(all_kinds) if kinds[place] != ABSENT]
        found = {all_dtypes[rank][place] if all_dtypes[rank] else None for rank in present}
        if len(found) > 1:
            names = " and ".join(sorted(str(dtype or grad.parameter.dtype) for dtype in found))
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: {operation}: the gradient of {grad.name} is of {names} on different "
                "ranks: set the same grad_dtype on all ranks"
            )
        common.append(found.pop() if found else None)
    return tuple(common)


def take_mean(
    comm: Communicator, grads: Sequence[Gradient], agreement: StepAgreement, wire_dtype: torch.dtype | None
) -> None:
    """Replaces every gradient by its weighted mean over ranks; that of a slice, over the ranks with the same slice."""
    dense: dict[Communicator, dict[int, Tensor]] = {comm: {}}  # by place
    equal = agreement.equal
    assert agreement.kinds is not None
    for place, (grad, kind) in enumerate(zip(grads, agreement.kinds, strict=True)):
        among = grad.over or comm
        if kind == SPARSE:
            share = agreement.share * comm.size / among.size
            grad.value = _mean_of_sparse(among, grad.value, grad.parameter, share)
        elif kind == DENSE:
            if grad.value is None or agreement.share == 0:
                # Without samples the mean loss of a rank is 0/0, and its gradient NaN.
                dtype = agreement.dtypes[place] if agreement.dtypes else None
                like = grad.parameter if grad.value is None else grad.value
                grad.value = torch.zeros_like(like, dtype=dtype)
            dense.setdefault(among, {})[place] = grad.value
    with comm.agreed("gradient mean", compared=True):
        for among, values in dense.items():
            if among.size > 1 and values:
                share = None if equal else agreement.share * comm.size / among.size
                for place, mean in zip(values, means(among, list(values.values()), share, wire_dtype), strict=True):
                    grads[place].value = mean


def _mean_of_sparse(comm: Communicator, grad: Tensor | None, parameter: Tensor, share: float) -> Tensor:
    """Returns the sum over ranks of `share` times each rank's sparse gradient of a parameter, on every rank.

    Only rows with a gradient are sent. A rank without a gradient, or with a share of 0, sends none.
    """
    if grad is None or share == 0:
        sparse_dims = 1
        indices = torch.zeros(sparse_dims, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_zeros(0, *parameter.shape[sparse_dims:])
    else:
        grad = grad.coalesce()
        indices, values = grad.indices(), grad.values() * share
    all_indices = torch.cat(comm.allgather(indices), dim=1)
    all_values = torch.cat(comm.allgather(values), dim=0)
    return torch.sparse_coo_tensor(all_indices, all_values, parameter.shape, check_invariants=False).coalesce()
