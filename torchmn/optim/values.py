"""The values that all ranks must share for their steps to be the same: parameters, state, momentum and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.digests import digest_of
from torchmn.errors import MismatchError
from torchmn.gradient_role import role_of

# How a step is computed, and not what comes out: ranks may differ in it.
ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")
_PLAIN = (bool, int, float, str, tuple)
_SHOWN = 5


def hyperparameters(optimizer: Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Of each group, what the optimizer was made with or a schedule has set since: learning rate, momentum, betas."""
    names = [name for name in optimizer.defaults if name not in ONLY_SPEED]
    return tuple(
        tuple((name, plain) for name in names if (plain := plain_value(group.get(name))) is not None)
        for group in optimizer.param_groups
    )


def plain_value(value: Any) -> Any:
    """A value that can be compared by what it says; None for others. A number on a GPU is not waited for."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    return value if isinstance(value, _PLAIN) else None


class Written(NamedTuple):
    """To what, beside the optimizer."""

    parameters: bool = False
    state: bool = False


NOTHING = Written()


class Writing:
    """Watches whether this rank writes to parameters or state between steps.

    `if comm.rank == 0: model.load_state_dict(...)` does: then the ranks' models part, and no loss tells it.
    """

    def __init__(self) -> None:
        self.loaded = False  # state
        self._before: list[tuple[int, int]] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """From here on: the optimizer has just written."""
        self._before = _signs(parameters)
        self.loaded = False

    def since_then(self, parameters: Iterable[Tensor]) -> Written:
        return Written(_signs(parameters) != self._before, self.loaded)


def _signs(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What changes when somebody writes to a parameter or replaces its `.data`; not when he writes to that."""
    return [(parameter._version, parameter.data_ptr()) for parameter in parameters]


def on_some_ranks(written: Sequence[Written]) -> Written:
    """What some ranks have written to and others not: all know what each has, and their values may differ now.

    What all have written to, a projection of the weights for one, is taken to be the same everywhere.
    """
    return Written(*(len(set(answers)) > 1 for answers in zip(*written, strict=True)))


def compare_values(comm: Communicator, doubtful: Written, named: Sequence[tuple[str, Tensor]], state: Any) -> None:
    """Raise on all ranks if `doubtful` values are not the same bits on all of them; slices are a rank's own."""
    shared = [(name, parameter) for name, parameter in named if role_of(parameter).over is None]
    digests = {}
    if doubtful.parameters:
        digests.update({name: _digest([parameter]) for name, parameter in shared})
    if doubtful.state:
        digests.update({f"state of {name}": _digest(_tensors_in(state.get(p, {}))) for name, p in shared})
    if not digests:
        return
    operation = "optimizer step: values of the parameters"
    told = comm.agree(operation, differ=tuple(digests.values()))
    odd = [name for place, name in enumerate(digests) if len({values[place] for values in told}) > 1]
    if not odd:
        return
    more = [f"and {len(odd) - _SHOWN} more"] if len(odd) > _SHOWN else []
    raise MismatchError(
        f"rank {comm.rank} of {comm.size}: optimizer step: since the last step only some ranks have written to what "
        "all must have alike (load_state_dict on one rank?), and these differ now: "
        f"{', '.join([*odd[:_SHOWN], *more])}. Do it on all ranks, or call comm.bcast_data(model) afterwards on all"
    )


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _tensors_in(state[key])
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)


def _digest(tensors: Iterable[Tensor]) -> str:
    return digest_of(x.detach().to_dense() for x in tensors)
