"""The mean of the gradients of all ranks: agreement on which exist and on their weights, and the reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.mean import Means, TensorShapes
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import MismatchError
from torchmn.gradient_role import role_of

ABSENT, DENSE, SPARSE = 0, 1, 2

# For `map`: a step handles thousands of parameters, and a line of Python for each would take longer than its gradient.
_requires_grad = attrgetter("requires_grad")
_dtype_of = attrgetter("dtype")


@dataclass(slots=True)
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
        self._required: list[bool] = []  # whether each parameter required a gradient when these were recorded
        self._ids: list[int] = []
        self._gradients: list[Gradient] = []
        self._has_lazy = any(is_lazy(p) for p in self._all_parameters())

    def gradients(self) -> list[Gradient]:
        """Returns the current gradients. The next call changes the returned objects."""
        parameters = self.parameters()
        ids = list(map(id, parameters))
        if ids != self._ids:
            named = zip(self._all_names(), self._all_parameters(), strict=True)
            present = set(ids)
            self._gradients = [Gradient(name, p, None) for name, p in named if id(p) in present]
            self._ids = ids
        for grad, parameter in zip(self._gradients, parameters, strict=True):
            grad.value, grad.over = parameter.grad, role_of(parameter).over
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Returns all parameters but lazy ones, which have no shape yet."""
        found = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in found if not is_lazy(p)] if self._has_lazy else found

    def lazy(self) -> list[Tensor]:
        """Returns the parameters that have no shape yet."""
        found: list[Tensor] = []
        if self._has_lazy:
            found += [p for p in self._all_parameters() if is_lazy(p)]
        self._has_lazy = bool(found)
        return found

    def trainable(self) -> set[int]:
        """Returns the ids of parameters that need a gradient, and have a shape."""
        lazy = self._has_lazy
        return {
            id(p)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and not (lazy and is_lazy(p))
        }

    def unfrozen(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns those of `grads` whose parameters were frozen at the last call of `mark_trainable`."""
        if self._required == self._requirements():  # the usual case, fast
            return []
        before = self._trainable or set()
        return [grad for grad in grads if grad.parameter.requires_grad and id(grad.parameter) not in before]

    def mark_trainable(self, grads: Sequence[Gradient] | None = None) -> None:
        """Records which parameters need a gradient now, for `unfrozen`; with `grads`, only adds those of them."""
        if grads is None or self._trainable is None:
            required = self._requirements()
            if self._trainable is None or required != self._required:
                self._trainable, self._required = self.trainable(), required
        else:
            self._trainable |= {id(grad.parameter) for grad in grads if grad.parameter.requires_grad}
            self._required = []

    def _requirements(self) -> list[bool]:
        return list(map(_requires_grad, self.parameters()))

    def _all_parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

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
        layout: shapes of the parameters, the same object in every step; another one after a shape has changed.
    """

    kinds: tuple[int, ...] | None
    share: float
    equal: bool = True
    dtypes: tuple[torch.dtype | None, ...] = ()
    statements: Sequence[Sequence[Any]] | None = None
    layout: TensorShapes | None = None


@dataclass(frozen=True)
class StepFingerprint:
    """What ranks compare before a step besides gradients: `same` must be equal on all ranks, `differ` need not."""

    same: Mapping[str, Any] = field(default_factory=dict)
    differ: tuple[Any, ...] = ()


class GradientAverager:
    """Averages gradients over the ranks of a communicator, step by step.

    Keeps what depends on the shapes of the parameters only, and the buffers of small gradients, from step to step.

    Args:
        comm: communicator of the ranks.
        zero_fill: if False, a gradient that only some ranks have raises an error.
        wire_dtype: a 16-bit dtype in which gradients are sent, or None.
        operation: for error messages.
    """

    def __init__(self, comm: Communicator, zero_fill: bool, wire_dtype: torch.dtype | None, operation: str):
        self.comm, self.zero_fill, self.wire_dtype, self.operation = comm, zero_fill, wire_dtype, operation
        self._layout = TensorShapes()
        self._sliced: list[bool] = []
        self._shapes = ""  # the text of both
        self._means: dict[Communicator, Means] = {}
        self._planned_for: tuple[Any, ...] = ()  # what `_means` depends on

    def agree(
        self,
        grads: Sequence[Gradient],
        weight: float | None,
        fingerprint: StepFingerprint = StepFingerprint(),  # noqa: B008  (frozen)
    ) -> StepAgreement:
        """Compares gradients and weights over ranks, in one small message if they are equal.

        A gradient that no rank has stays absent, as in one process. One that only some ranks have counts as zeros on
        the others.

        Args:
            grads: of this rank.
            weight: number of samples of this rank; None on all ranks for equal weights.
            fingerprint: what else is compared.

        Raises:
            MismatchError: on every rank, if what must be the same differs, or if all weights are 0.
        """
        comm, operation = self.comm, self.operation
        weight, problem = number_of_samples(weight)
        shapes = self._shapes_of(grads)
        values = [grad.value for grad in grads]
        kinds = tuple([ABSENT if x is None else DENSE if x.layout is torch.strided else SPARSE for x in values])
        dtypes = self._odd_dtypes(values, kinds)
        same = {"weighted": weight is not None, **fingerprint.same, "parameters": shapes}
        with comm.agreed(operation, problem, differ=(kinds, weight, dtypes, *fingerprint.differ), **same) as ranks:
            alike, statements = ranks.alike, ranks.differ
        if alike:
            _check_samples(comm, operation, weight)
            return StepAgreement(kinds, 1.0 / comm.size, dtypes=dtypes, layout=self._layout)
        all_kinds, weights, all_dtypes, *more = zip(*statements, strict=True)
        union = tuple(max(column) for column in zip(*all_kinds, strict=True))
        _check(comm, operation, grads, all_kinds, union, self.zero_fill)
        dtypes = _common_dtypes(comm, operation, grads, all_kinds, all_dtypes)
        if weight is None:
            return StepAgreement(union, 1.0 / comm.size, True, dtypes, more, self._layout)
        _check_samples(comm, operation, max(weights))
        return StepAgreement(union, weight / sum(weights), len(set(weights)) == 1, dtypes, more, self._layout)

    def _shapes_of(self, grads: Sequence[Gradient]) -> str:
        """Returns shapes and dtypes of the parameters as one string, which is faster to compare than a tuple."""
        parameters, sliced = [grad.parameter for grad in grads], [grad.over is not None for grad in grads]
        if sliced != self._sliced or not self._layout.fits(parameters):
            self._sliced, self._layout = sliced, TensorShapes(parameters)
            texts = [
                f"{'own slice' if is_slice else list(p.shape)} {p.dtype}"
                for p, is_slice in zip(parameters, sliced, strict=True)
            ]
            self._shapes = ", ".join(texts)
        return self._shapes

    def _odd_dtypes(self, values: Sequence[Tensor | None], kinds: tuple[int, ...]) -> tuple[torch.dtype | None, ...]:
        """Returns the dtypes of gradients that are not their parameter's, as `parameter.grad_dtype` allows, or ()."""
        expected = self._layout.dtypes
        if ABSENT not in kinds and all(map(is_, map(_dtype_of, values), expected)):
            return ()
        odd = [None if x is None or x.dtype is dtype else x.dtype for x, dtype in zip(values, expected, strict=True)]
        return tuple(odd) if any(odd) else ()

    def take_mean(self, grads: Sequence[Gradient], agreement: StepAgreement) -> list[Gradient]:
        """Replaces every gradient by its weighted mean over ranks; of a slice, over the ranks with the same slice.

        Returns:
            Those whose value is another tensor now; the means of the others were written into theirs.
        """
        comm = self.comm
        assert agreement.kinds is not None
        planned_for = agreement.kinds, agreement.dtypes, agreement.layout
        if planned_for != self._planned_for:
            self._planned_for, self._means = planned_for, {}
        replaced: list[Gradient] = []
        for place, (grad, kind) in enumerate(zip(grads, agreement.kinds, strict=True)):
            if kind == SPARSE:
                among = grad.over or comm
                share = agreement.share * comm.size / among.size
                grad.value = _mean_of_sparse(among, grad.value, grad.parameter, share)
                replaced.append(grad)
            elif kind == DENSE and (grad.value is None or agreement.share == 0):
                # Without samples the mean loss of a rank is 0/0, and its gradient NaN.
                dtype = agreement.dtypes[place] if agreement.dtypes else None
                like = grad.parameter if grad.value is None else grad.value
                grad.value = torch.zeros_like(like, dtype=dtype)
                replaced.append(grad)
        with comm.agreed("gradient mean", compared=True):
            for among, its_grads in self._dense_by_ranks(grads, agreement.kinds).items():
                if among.size > 1 and its_grads:
                    share = None if agreement.equal else agreement.share * comm.size / among.size
                    values = [grad.value for grad in its_grads if grad.value is not None]
                    if among not in self._means:
                        self._means[among] = Means(among, self.wire_dtype, values)
                    means = self._means[among](values, share)
                    if means is not values:
                        for grad, mean in zip(its_grads, means, strict=True):
                            if grad.value is not mean:
                                grad.value = mean
                                replaced.append(grad)
        return replaced

    def _dense_by_ranks(self, grads: Sequence[Gradient], kinds: tuple[int, ...]) -> dict[Communicator, list[Gradient]]:
        """Returns the dense gradients by the ranks over which their means are taken."""
        comm = self.comm
        dense = [grad for grad, kind in zip(grads, kinds, strict=True) if kind == DENSE]
        found = {comm: [grad for grad in dense if grad.over is None or grad.over is comm]}
        if len(found[comm]) < len(dense):
            for grad in dense:
                if grad.over is not None and grad.over is not comm:
                    found.setdefault(grad.over, []).append(grad)
        return found


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
