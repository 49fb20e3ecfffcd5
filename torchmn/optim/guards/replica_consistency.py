"""Guard against ranks whose parameters or optimizer states differ: compares digests if a rank changed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.errors import MismatchError
from torchmn.gradient_role import role_of
from torchmn.optim.events import StepGuard, WatchedOptimizer, guard
from torchmn.optim.gradients import Gradient

_SHOWN = 5


class ParameterChanges(NamedTuple):
    """Whether parameters or optimizer state were modified since the last step, other than by the optimizer."""

    parameters: bool = False
    state: bool = False


@guard(
    on="step",
    why="after `if comm.rank == 0: model.load_state_dict(...)` the models of ranks differ, and no loss shows it",
)
class ReplicaConsistency(StepGuard):
    """Compares parameters and state over ranks if only some ranks modified them between steps."""

    def __init__(self, watched: WatchedOptimizer) -> None:
        super().__init__(watched)
        self.stepped()

    def stepped(self) -> None:
        self._parameters = self.watched.collection.parameters()
        self._before = _versions(self._parameters)
        self._state_was_loaded = False

    def initialized(self) -> None:
        before = {id(p): facts for p, *facts in zip(self._parameters, *self._before, strict=True)}
        self._parameters = self.watched.collection.parameters()
        now = zip(self._parameters, *_versions(self._parameters), strict=True)
        versions, pointers = zip(*(before.get(id(p), facts) for p, *facts in now), strict=True)
        self._before = list(versions), list(pointers)

    def loaded(self) -> None:
        self._state_was_loaded = True

    def differ(self, grads: list[Gradient]) -> ParameterChanges:
        return ParameterChanges(_versions([grad.parameter for grad in grads]) != self._before, self._state_was_loaded)

    def check(self, statements: Sequence[ParameterChanges], grads: list[Gradient]) -> None:
        unfrozen = {id(grad.parameter) for grad in self.watched.collection.unfrozen(grads)}  # which are broadcast
        named = [(grad.name, grad.parameter) for grad in grads if id(grad.parameter) not in unfrozen]
        _compare_digests(self.watched.comm, _changed_on_some_ranks(statements), named, self.watched.actual.state)


def _versions(parameters: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Returns version counters and data pointers of parameters. Writes into `.data` in place are not detected."""
    return list(map(version_of, parameters)), list(map(Tensor.data_ptr, parameters))


def _changed_on_some_ranks(changes: Sequence[ParameterChanges]) -> ParameterChanges:
    """Returns what some ranks have modified and others have not.

    What all ranks have modified, for example by a projection of the weights, is assumed to be the same on all.
    """
    return ParameterChanges(*(len(set(values)) > 1 for values in zip(*changes, strict=True)))


def _compare_digests(
    comm: Communicator, changed: ParameterChanges, named: Sequence[tuple[str, Tensor]], state: Any
) -> None:
    """Raises on all ranks if `changed` values differ in any bit between ranks. Slices are not compared."""
    shared = [(name, parameter) for name, parameter in named if role_of(parameter).over is None]
    digests = {}
    if changed.parameters:
        digests.update({name: _digest([parameter]) for name, parameter in shared})
    if changed.state:
        digests.update({f"state of {name}": _digest(_tensors_in(state.get(p, {}))) for name, p in shared})
    if not digests:
        return
    operation = "optimizer step: values of the parameters"
    statements = comm.agree(operation, differ=tuple(digests.values()))
    differing = [name for place, name in enumerate(digests) if len({values[place] for values in statements}) > 1]
    if not differing:
        return
    more = [f"and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
    raise MismatchError(
        f"rank {comm.rank} of {comm.size}: optimizer step: since the last step only some ranks have modified what "
        "must be the same on all (load_state_dict on one rank?), and these differ now: "
        f"{', '.join([*differing[:_SHOWN], *more])}. Modify it on all ranks, or call comm.bcast_data(model) afterwards"
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
