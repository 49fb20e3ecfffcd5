"""create_multi_node_evaluator: an evaluation of this rank's data in, the evaluation of all ranks' data out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.data.scattered import noted_uses
from torchmn.errors import ArgumentError, nearest
from torchmn.training import metrics
from torchmn.training.exact_data import is_data, sampler_problem, samples_in, without_repeats

WEIGHTS = ("samples", "equal")


def create_multi_node_evaluator(
    actual_evaluator: Any, comm: Communicator, *, weights: str = "samples"
) -> MultiNodeEvaluator:
    """An evaluator that returns, on every rank, the metrics of all ranks' data: those of one process on all of it.

        evaluate = torchmn.create_multi_node_evaluator(evaluate, comm)
        metrics = evaluate(model, loader)     # the same dict on every rank

    actual_evaluator: a function, or an object with a method `evaluate`. It evaluates this rank's data and returns a
        dict of metrics, or one number: means over its samples (numbers, tensors, arrays). It is not changed; what is
        returned here passes everything else on to it.

    Means are weighted by the number of samples. It is taken, in this order, from

    - the metric: `{"loss": (mean, samples)}`,
    - the result: `return metrics, samples`,
    - the arguments: where exactly one of them is a DataLoader or a data set, all of it counts. Items that
      `scatter_dataset` repeated to make lengths equal are left out before the evaluator sees it, and the evaluator is
      not called where nothing is left.

    An evaluator that reads a repeated item all the same, from a loader that it keeps itself, is an error on all ranks:
    the item would be counted twice.

    A metric or a collection of torchmetrics may be returned as it is, or in the dict: it is computed from all ranks'
    data, whatever their lengths. (The number that its `compute` gave would be one rank's.)

    Where several ranks have a metric and one does not say its number of samples: an error on all ranks, unless
    `weights="equal"` says that they all evaluate equally many. A metric in a `torchmn.training.Sum` is added up.
    Ranks that return None or lack a metric (or have None for it) do not count for it. One message carries all metrics.
    """
    if not isinstance(comm, Communicator):
        raise ArgumentError(
            f"create_multi_node_evaluator: expected comm to be a communicator, got {comm!r}. Of a grid, pass the ranks "
            "that evaluate other samples: grid.replicas"
        )
    if weights not in WEIGHTS:
        raise ArgumentError(
            f"create_multi_node_evaluator: expected weights to be 'samples' or 'equal', got {weights!r}. "
            f"{nearest(weights, WEIGHTS)}"
        )
    local = getattr(actual_evaluator, "evaluate", actual_evaluator)
    if not callable(local):
        raise ArgumentError(
            "create_multi_node_evaluator: expected a function, or an object with a method 'evaluate', got "
            f"{actual_evaluator!r}"
        )
    return MultiNodeEvaluator(actual_evaluator, local, comm, weights)


class MultiNodeEvaluator:
    """Made by `create_multi_node_evaluator`: call it, or its `evaluate`, on every rank."""

    def __init__(self, actual_evaluator: Any, local: Callable[..., Any], comm: Communicator, weights: str):
        # Past __setattr__, which passes everything on.
        vars(self).update(actual_evaluator=actual_evaluator, comm=comm, weights=weights, _evaluate_locally=local)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The metrics of all ranks' data, from this rank's: the arguments are those of the actual evaluator."""
        comm: Communicator = self.comm
        refused, samples = None, None
        try:
            args = tuple(without_repeats(arg) if is_data(arg) else arg for arg in args)
            kwargs = {name: without_repeats(arg) if is_data(arg) else arg for name, arg in kwargs.items()}
        except ArgumentError as error:
            refused = str(error)
        data = [arg for arg in (*args, *kwargs.values()) if is_data(arg)]
        if len(data) == 1 and refused is None:
            samples = samples_in(data[0])
        comm.agree("evaluate", refused, weights=self.weights)
        with noted_uses() as uses:
            result = None if samples == 0 else self._evaluate_locally(*args, **kwargs)
        mine, problem = metrics.read(result, samples)
        counts = [metric.samples for metric in mine.metrics.values()]
        with comm.agreed("evaluate", problem or uses.problem() or sampler_problem(self.actual_evaluator, counts)):
            everyone = comm.allgather_obj(mine)
        where = f"rank {comm.rank} of {comm.size}: evaluate"
        return metrics.combine(everyone, self.weights == "equal", where)

    __call__ = evaluate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is anything to pass them on to
            raise AttributeError(name)
        return getattr(self.actual_evaluator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.actual_evaluator, name, value)

    def __repr__(self) -> str:
        return f"MultiNodeEvaluator({self.actual_evaluator!r}, {self.comm!r})"
