"""`GenericMultiNodeEvaluator`: metrics that need the outputs of all batches, such as the area under a ROC curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.data.scattered import record_uses
from torchmn.errors import ArgumentError
from torchmn.iterators import EpochIterator
from torchmn.other_spellings import other_spellings
from torchmn.training.exact_data import is_data, without_repeats
from torchmn.trees import map_only


class GenericMultiNodeEvaluator:
    """Gathers the results of all batches of all ranks on rank `root`, and aggregates them there.

    Override `calc_local`, the result of one batch, and `aggregate`, the result of all batches.

    Args:
        comm: communicator whose ranks all call `evaluate`; their numbers of batches may differ, or be 0.
        iterator: this rank's batches: a DataLoader, or an iterable that can be iterated once per evaluation. Items
            that `scatter_dataset` repeated are removed from a DataLoader; reading them from another iterable raises
            an ArgumentError on all ranks.
        target: called by `calc_local`, usually the model. Modules are in eval mode during the evaluation.
        device: the device for the tensors of a batch; None leaves them where they are.
        converter: called as `converter(batch, device)`; returns the batch to evaluate.
        root: the rank that aggregates.
        progress_hook: called on `root` after each batch with the number of batches done.
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
        comm = as_communicator(comm, type(self).__name__)
        self.comm, self.iterator, self.target, self.root = comm, iterator, target, root
        self.device, self.converter, self.progress_hook = device, converter, progress_hook
        self._exhausted: Any = None  # the last iterator that can be iterated only once

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of one batch, an object that pickles; by default, what `target` returns."""
        return self.target(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Returns the result of the evaluation, on `root`; by default, the list of the results of all batches.

        Args:
            results: of all batches, in round-robin order: the first batches of all ranks in rank order, then the
                second ones, and so on; ranks without further batches are left out.

        Returns:
            The result, which the other ranks do not get.
        """
        return results

    @other_spellings
    def evaluate(self) -> Any:
        """Returns, on `root`, what `aggregate` returns for all batches of all ranks; None on other ranks."""
        comm = self.comm
        problem = arguments.rank_problem(self.root, comm.size, "root")
        batches, problem = self._batches(problem)
        comm.agree(type(self).__name__, problem, root=self.root)
        results = []
        with torch.no_grad(), _eval_mode(self.target), record_uses() as uses:
            for batch in batches:
                results.append(_on_host(self._result_of(batch)))
                if comm.rank == self.root and self.progress_hook is not None:
                    self.progress_hook(len(results))
        comm.agree(type(self).__name__, uses.problem())
        ranks = comm.gather_obj(results, self.root)
        if ranks is None:
            return None
        rounds = max(map(len, ranks))
        return self.aggregate([results[turn] for turn in range(rounds) for results in ranks if turn < len(results)])

    __call__ = evaluate

    def _batches(self, problem: str | None) -> tuple[Iterable[Any], str | None]:
        if self.iterator is self._exhausted:
            problem = (
                problem or f"the {type(self.iterator).__name__} can be iterated only once: pass a list or a loader"
            )
        elif isinstance(self.iterator, Iterator) and not isinstance(self.iterator, EpochIterator):
            self._exhausted = self.iterator
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
    """Context in which a module is in eval mode; restores the mode of each submodule."""
    modes = [(m, m.training) for m in target.modules()] if isinstance(target, nn.Module) else []
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _on_host(result: Any) -> Any:
    """Returns the result with its tensors detached and on the CPU, to be sent."""
    return map_only(Tensor, lambda x: x.detach().cpu(), result)
