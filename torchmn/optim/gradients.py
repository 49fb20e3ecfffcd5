"""The mean of all ranks' gradients: which there are, how much each rank's counts, and how they travel."""

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
    """A parameter's gradient, which may be taken away from it while it travels, and the name errors call it by."""

    name: str
    parameter: Tensor
    value: Tensor | None
    over: Communicator | None = None  # of a slice: the ranks with the same slice

    def put_back(self) -> None:
        self.parameter.grad = self.value


class Collection:
    """The gradients of an optimizer's parameters, in the order of its groups, which all ranks share."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]):
        """`names`: of parameters that have one, by their ids."""
        self._optimizer = optimizer
        self._names = names
        self._trainable: set[int] | None = None
        self._ids: list[int] = []
        self._kept: list[Gradient] = []

    def gradients(self) -> list[Gradient]:
        """Returns all of them, as they are now. The next call changes their values."""
        parameters = self.parameters()
        ids = [id(p) for p in parameters]
        if ids != self._ids:
            self._kept = [Gradient(name, p, None) for name, p in zip(self._all_names(), parameters, strict=True)]
            self._ids = ids
        for grad in self._kept:
            grad.value, grad.over = grad.parameter.grad, role_of(grad.parameter).over
        return self._kept

    def parameters(self) -> list[Tensor]:
        """Returns all parameters."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def trainable(self) -> set[int]:
        """Returns the ids of parameters that need a gradient."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}

    def unfrozen(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns those of parameters that were frozen when `keep_trainable` was called last."""
        before = self._trainable or set()
        return [grad for grad in grads if grad.parameter.requires_grad and id(grad.parameter) not in before]

    def keep_trainable(self, grads: Sequence[Gradient] | None = None) -> None:
        """Lets parameters that need a gradient now count as known; of `grads` only, if given."""
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
class Agreement:
    """What all ranks know of gradients that become means: the kind of each, and this rank's share of the mean."""

    kinds: tuple[int, ...] | None  # None: they were compared before, bucket by bucket
    share: float
    equal: bool = True  # whether all ranks count the same
    dtypes: tuple[torch.dtype | None, ...] = ()  # of gradients that are not of their parameter's; () if all are
    statements: Sequence[Sequence[Any]] | None = (
        None  # what ranks say beside that, by what and by rank; None where all say the same
    )


@dataclass(frozen=True)
class Facts:
    """What a rank says of its next step beside its gradients: what must be the same on all ranks, and what need not."""

    same: Mapping[str, Any] = field(default_factory=dict)
    differ: tuple = ()


def agree(
    comm: Communicator,
    grads: Sequence[Gradient],
    weight: float | None,
    zero_fill: bool,
    operation: str,
    facts: Facts = Facts(),  # noqa: B008  (frozen)
) -> Agreement:
    """Compare gradients and weights over ranks, in one tiny message where all ranks are alike.

    A gradient that no rank has stays absent, as in one process. One that only some ranks have counts as zeros on
    the others; without `zero_fill` it is an error on every rank. So are facts that must be the same and are not.
    """
    weight, problem = number_of_samples(weight)
    shapes, kinds, odd_dtypes = [], [], []
    for grad in grads:
        x, parameter = grad.value, grad.parameter
        shapes.append(f"{'own slice' if grad.over else list(parameter.shape)} {parameter.dtype}")
        kinds.append(ABSENT if x is None else DENSE if x.layout is torch.strided else SPARSE)
        # Those that are not their parameter's, as torch allows with `parameter.grad_dtype`.
        odd_dtypes.append(None if x is None or x.dtype is parameter.dtype else x.dtype)
    kinds, dtypes = tuple(kinds), tuple(odd_dtypes) if any(odd_dtypes) else ()
    # Shapes as one text: what ranks compare is walked through, and this is the longest of it.
    same = {"weighted": weight is not None, **facts.same, "parameters": ", ".join(shapes)}
    with comm.agreed(operation, problem, differ=(kinds, weight, dtypes, *facts.differ), **same) as ranks:
        alike, statements = ranks.alike, ranks.differ
    if alike:
        _refuse_no_samples(comm, operation, weight)
        return Agreement(kinds, 1.0 / comm.size, dtypes=dtypes)
    all_kinds, weights, all_dtypes, *more = zip(*statements, strict=True)
    union = tuple(max(column) for column in zip(*all_kinds, strict=True))
    _check(comm, operation, grads, all_kinds, union, zero_fill)
    dtypes = _common_dtypes(comm, operation, grads, all_kinds, all_dtypes)
    if weight is None:
        return Agreement(union, 1.0 / comm.size, True, dtypes, more)
    _refuse_no_samples(comm, operation, max(weights))
    return Agreement(union, weight / sum(weights), len(set(weights)) == 1, dtypes, more)


def fair_share(comm: Communicator, samples: float) -> float:
    """By what a rank's mean loss over `samples` must be multiplied so that the plain mean over ranks is exact."""
    number, problem = number_of_samples(samples)
    if samples is None:
        problem = "expected a number of samples, got None"
    numbers = [samples for (samples,) in comm.agree("weigh", problem, differ=(number,))]
    _refuse_no_samples(comm, "weigh", max(numbers))
    return number * comm.size / sum(numbers)


def number_of_samples(given: Any) -> tuple[Any, str | None]:
    """A weight as a plain number (None stays None), and what is wrong with it or None."""
    number = given.item() if isinstance(given, Tensor | np.generic) and math.prod(given.shape) == 1 else given
    if number is None or (isinstance(number, int | float) and 0 <= number < float("inf")):
        return number, None
    return None, f"expected weight to be a number of samples >= 0, got {number!r}"


def _refuse_no_samples(comm: Communicator, operation: str, largest: float | None) -> None:
    if largest == 0:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {operation}: the weights of all ranks are 0, so there is nothing to "
            "take the mean of: leave this step out on all ranks"
        )


def _check(
    comm: Communicator,
    operation: str,
    grads: Sequence[Gradient],
    all_kinds: Sequence[tuple[int, ...]],
    union: tuple[int, ...],
    zero_fill: bool,
) -> None:
    """Raise on every rank alike if gradients are missing that must not be, or are dense here and sparse there."""
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
    """The dtypes that are not their parameter's; raises on every rank alike if a gradient has several."""
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
                "ranks: set its grad_dtype alike on all ranks"
            )
        common.append(found.pop() if found else None)
    return tuple(common)


def take_mean(
    comm: Communicator, grads: Sequence[Gradient], agreement: Agreement, wire_dtype: torch.dtype | None
) -> None:
    """Replace every gradient by its weighted mean over ranks: of a rank's own slice, over those that have the same."""
    dense: dict[Communicator, dict[int, Tensor]] = {comm: {}}  # by place
    equal = agreement.equal  # which all ranks know
    assert agreement.kinds is not None
    for place, (grad, kind) in enumerate(zip(grads, agreement.kinds, strict=True)):
        among = grad.over or comm
        if kind == SPARSE:
            share = agreement.share * comm.size / among.size
            grad.value = _mean_of_sparse(among, grad.value, grad.parameter, share)
        elif kind == DENSE:
            if grad.value is None or agreement.share == 0:
                # With no samples the mean loss of a rank is 0/0: its gradient must not count, nor its NaNs.
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
    """The sum over ranks of `share` times each rank's sparse gradient of a parameter, on every rank.

    Only the rows that were touched travel. A rank without a gradient, or with a share of 0, adds nothing.
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
