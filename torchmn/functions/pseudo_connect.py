"""Connecting a delegate to other tensors, so that backward from them visits its `send`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn._torch_compat import Function, plain_torch_function
from torchmn.communicators.arguments import describe
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.other_spellings import check_foreign_message


def pseudo_connect(delegate_variable: Tensor | None, *actual_variables: Tensor) -> Any:
    """Returns the actual variables, unchanged; backward from them also visits the delegate.

    Differentiable: gradients pass through unchanged. The delegate gets no gradient, but is visited.

    ChainerMN returns a tuple for one variable. So the tensor that is returned for one variable also unpacks as a tuple
    of one: `x, = pseudo_connect(phi, x)` and `x = pseudo_connect(phi, x)` are the same, whatever its shape. `[0]`,
    which could mean the tensor or its first row, raises an error; for rows, use `unbind` or `select`. What is computed
    from it is a plain tensor. Under torch.compile it is a plain tensor itself, which unpacks into rows.

    Args:
        delegate_variable: what `send` returned, or None.
        actual_variables: at least one of them must be a floating-point tensor, such as another delegate: others have no
            gradient.

    Returns:
        A tensor for one variable, a tuple for several.

    Raises:
        ArgumentError: for wrong arguments, and for `[0]` of the result for one variable.
    """
    joined = connect(delegate_variable, actual_variables)
    if len(actual_variables) > 1:
        return joined
    x = joined[0]
    # torch.compile would not call its __iter__; a tensor of another class may have its own __iter__.
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter):
        return x
    return x.as_subclass(ConnectedTensor)


class ConnectedTensor(Tensor):
    """The result of `pseudo_connect` for one variable: a tensor that unpacks as a tuple of one, itself."""

    # As nn.Parameter: no overhead, and results are plain tensors.
    __torch_function__ = plain_torch_function

    def __iter__(self) -> Iterator[Tensor]:
        yield self

    def __getitem__(self, index: Any) -> Tensor:
        if type(index) is int and index in (0, -1):
            raise ArgumentError(
                f"pseudo_connect: [{index}] of its result for one variable, of shape {tuple(self.shape)}, could mean "
                "the tensor, as in ChainerMN's tuple of one, or a row of it. Write x = pseudo_connect(phi, x), or "
                f"x.select(0, {index}) for the row"
            )
        return super().__getitem__(index)


@uncompiled
def connect(delegate_variable: Tensor | None, actual_variables: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As `pseudo_connect`, but returns a tuple of plain tensors for any number of variables."""
    given: list[Any] = [*actual_variables]
    for place, x in enumerate(given):
        if not isinstance(x, Tensor):
            check_foreign_message(x)
            raise ArgumentError(f"pseudo_connect: expected tensors, got {describe(x)} at place {place}")
    delegate: Any = delegate_variable
    if delegate is not None and not isinstance(delegate, Tensor):
        raise ArgumentError(
            f"pseudo_connect: expected delegate_variable to be a tensor or None, got {describe(delegate_variable)}"
        )
    if not actual_variables:
        raise ArgumentError("pseudo_connect: expected the variables to connect the delegate to, got none")
    if delegate_variable is None or not (torch.is_grad_enabled() and delegate_variable.requires_grad):
        return tuple(actual_variables)
    if not any(_has_gradient(x) for x in actual_variables):
        raise ArgumentError(
            "pseudo_connect: expected at least one floating-point tensor to carry the delegate, got "
            + ", ".join(describe(x) for x in actual_variables)
        )
    return _PseudoConnect.apply(delegate_variable, *actual_variables)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _PseudoConnect(Function):
    @staticmethod
    def forward(ctx: Any, delegate: Tensor, *actual: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Autograd forbids in-place operations on inputs and views.
        out = tuple([x.detach() for x in actual])
        without = [x for x in out if not _has_gradient(x)]
        if without:
            ctx.mark_non_differentiable(*without)
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)  # autograd visits the delegate although its gradient is None
