"""GenericMultiNodeEvaluator: for metrics that need all outputs at once, such as the area under a ROC curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.data.scattered import noted_uses
from torchmn.errors import ArgumentError
from torchmn.training.exact_data import is_data, without_repeats
from torchmn.trees import map_only


class GenericMultiNodeEvaluator:
    """An evaluation whose results of single batches are all brought to rank `root` and judged there together.

    comm: every rank calls `evaluate`; ranks may have different numbers of batches, or none.
    iterator: this rank's batches: a DataLoader, or any iterable that starts again each time it is iterated. Items
        that `scatter_dataset` repeated to make lengths equal are left out of a DataLoader; an iterable of another kind
        that gives them is an error on all ranks.
    target: what `calc_local` calls, usually the model. A module is put in eval mode while evaluating.
    device: where to move the tensors of a batch; None: they stay.
    converter: turns what the iterator gives into the batch to evaluate, called as `converter(batch, device)`.
    progress_hook: called on `root` with the number of batches done, after each of them.

    Derive from it to change `calc_local`, the result of one batch, and `aggregate`, the result of all.
    """

    def __init__(
        self,
        comm: Communicator,
        iterator: Iterable[Any],
        target: Callable[..., Any],
        device: torch.device | str | None = None,
        converter: Callable[[Any, Any], Any] | None = None,
        root: int = 0,
        progress_hook: Callable[[int], None] | None = None,
    ):
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"{type(self).__name__}: expected comm to be a communicator, got {comm!r}")
        self.comm, self.iterator, self.target, self.root = comm, iterator, target, root
        self.device, self.converter, self.progress_hook = device, converter, progress_hook
        self._used_up: Any = None  # an iterator that can not start again

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """The result of one batch, any object that pickles: by default, what `target` returns."""
        return self.target(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """The result of the evaluation, on `root`: by default, the list of all batches' results.

        They are in round-robin order: the first batches of all ranks in rank order, then the second ones, and so
        on; ranks that have no more batches are left out.
        """
        return results

    def evaluate(self) -> Any:
        """On `root`, what `aggregate` makes of the results of all batches of all ranks; None on other ranks."""
        comm = self.comm
        problem = arguments.rank_problem(self.root, comm.size, "root")
        batches, problem = self._batches(problem)
        comm.agree(type(self).__name__, problem, root=self.root)
        results = []
        with torch.no_grad(), _eval_mode(self.target), noted_uses() as uses:
            for batch in batches:
                results.append(_on_host(self._result_of(batch)))
                if comm.rank == self.root and self.progress_hook is not None:
                    self.progress_hook(len(results))
        comm.agree(type(self).__name__, uses.problem())
        everyone = comm.gather_obj(results, self.root)
        if everyone is None:
            return None
        rounds = max(len(results) for results in everyone)
        return self.aggregate([results[turn] for turn in range(rounds) for results in everyone if turn < len(results)])

    __call__ = evaluate

    def _batches(self, problem: str | None) -> tuple[Iterable[Any], str | None]:
        if self.iterator is self._used_up:
            problem = (
                problem or f"the {type(self.iterator).__name__} can be iterated only once: pass a list or a loader"
            )
        elif isinstance(self.iterator, Iterator):
            self._used_up = self.iterator
        try:
            return (without_repeats(self.iterator) if is_data(self.iterator) else self.iterator), problem
        except ArgumentError as error:
            return (), problem or str(error)

    def _result_of(self, batch: Any) -> Any:
        if self.converter is not None:
            batch = self.converter(batch, self.device)
        elif self.device is not None:
            batch = map_only(Tensor, lambda x: x.to(self.device), batch)
        if isinstance(batch, Mapping):
            return self.calc_local(**batch)
        return self.calc_local(*batch) if isinstance(batch, tuple | list) else self.calc_local(batch)


@contextmanager
def _eval_mode(target: object):
    """Puts a module into eval mode, and each of its modules back into the mode that it had."""
    modes = [(m, m.training) for m in target.modules()] if isinstance(target, nn.Module) else []
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _on_host(result: Any) -> Any:
    """The result with its tensors outside any graph and any GPU, so that they can travel."""
    return map_only(Tensor, lambda x: x.detach().cpu(), result)
