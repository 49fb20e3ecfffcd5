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


def pseudo_connect(delegate_variable: Tensor | None, *actual_variables: Tensor) -> Any:
    """Returns the actual variables, unchanged; backward from them also visits the delegate.

    Differentiable: gradients pass through unchanged. The delegate gets no gradient, but is visited.

    ChainerMN returns a tuple for one variable; here `x, = pseudo_connect(phi, x)` would take the only row of a batch of
    one. So the tensor that is returned for one variable cannot be unpacked or iterated over, whatever its shape; what
    is computed from it is a plain tensor. Under torch.compile it is a plain tensor itself, without this check.

    Args:
        delegate_variable: what `send` returned, or None.
        actual_variables: at least one of them must be a floating-point tensor, such as another delegate: others have no
            gradient.

    Returns:
        A tensor for one variable, a tuple for several.

    Raises:
        ArgumentError: for wrong arguments, and if the result for one variable is unpacked.
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
    """The result of `pseudo_connect` for one variable: a tensor that cannot be iterated over."""

    # As nn.Parameter: no overhead, and results are plain tensors.
    __torch_function__ = plain_torch_function

    def __iter__(self) -> Iterator[Tensor]:
        raise ArgumentError(
            f"pseudo_connect: its result for one variable, of shape {tuple(self.shape)}, was unpacked or iterated "
            "over. One variable in, one tensor out, and no tuple as in ChainerMN: write x = pseudo_connect(phi, x). "
            "For the rows of the tensor: x.unbind()"
        )


@uncompiled
def connect(delegate_variable: Tensor | None, actual_variables: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As `pseudo_connect`, but returns a tuple of plain tensors for any number of variables."""
    given: list[Any] = [*actual_variables]
    for place, x in enumerate(given):
        if not isinstance(x, Tensor):
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
