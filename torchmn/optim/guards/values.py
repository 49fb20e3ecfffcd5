"""The values that all ranks must share for their steps to be the same: parameters, state, momentum and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.errors import MismatchError
from torchmn.gradient_role import role_of
from torchmn.optim.events import Optimizing, StepGuard, guard
from torchmn.optim.gradients import Gradient

_SHOWN = 5


class Written(NamedTuple):
    """To what, beside the optimizer."""

    parameters: bool = False
    state: bool = False


@guard(
    on="step",
    why="`if comm.rank == 0: model.load_state_dict(...)`: the ranks' models part, and no loss shows it",
)
class Writing(StepGuard):
    """Watches whether this rank alone writes to parameters or state between steps."""

    def __init__(self, seen: Optimizing) -> None:
        super().__init__(seen)
        self.stepped()

    def stepped(self) -> None:
        self._before = _signs(self.seen.collection.parameters())
        self._state_was_loaded = False

    def loaded(self) -> None:
        self._state_was_loaded = True

    def differ(self, grads: list[Gradient]) -> Written:
        return Written(_signs([grad.parameter for grad in grads]) != self._before, self._state_was_loaded)

    def check(self, statements: Sequence[Written], grads: list[Gradient]) -> None:
        unfrozen = {id(grad.parameter) for grad in self.seen.collection.unfrozen(grads)}  # which become rank 0's
        named = [(grad.name, grad.parameter) for grad in grads if id(grad.parameter) not in unfrozen]
        _compare_values(self.seen.comm, _on_some_ranks(statements), named, self.seen.actual.state)


def _signs(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What changes when somebody writes to a parameter or replaces its `.data`; not when he writes to that."""
    return [(version_of(parameter), parameter.data_ptr()) for parameter in parameters]


def _on_some_ranks(written: Sequence[Written]) -> Written:
    """What some ranks have written to and others not: all know what each has, and their values may differ now.

    What all have written to, a projection of the weights for one, is taken to be the same everywhere.
    """
    return Written(*(len(set(answers)) > 1 for answers in zip(*written, strict=True)))


def _compare_values(comm: Communicator, doubtful: Written, named: Sequence[tuple[str, Tensor]], state: Any) -> None:
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
    statements = comm.agree(operation, differ=tuple(digests.values()))
    odd = [name for place, name in enumerate(digests) if len({values[place] for values in statements}) > 1]
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
