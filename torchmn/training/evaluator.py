"""`create_multi_node_evaluator`: turns an evaluation of one rank's data into an evaluation of all ranks' data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.data.scattered import record_uses
from torchmn.errors import ArgumentError, nearest
from torchmn.other_spellings import other_spellings
from torchmn.training import combined_metrics
from torchmn.training.exact_data import is_data, sampler_problem, samples_in, stream_of, without_repeats

WEIGHTS = ("samples", "equal")


@other_spellings
def create_multi_node_evaluator(
    actual_evaluator: Any, comm: Communicator, *, weights: str = "samples"
) -> MultiNodeEvaluator:
    """Returns an evaluator that returns the same metrics as one process evaluating the data of all ranks.

        evaluate = torchmn.create_multi_node_evaluator(evaluate, comm)
        metrics = evaluate(model, loader)     # the same dict on every rank

    The number of samples, by which means are weighted, is taken from the first of these that has it: the metric,
    `{"loss": (mean, samples)}`; the result, `return metrics, samples`; the only argument that is a DataLoader or a data
    set. From the latter, items that `scatter_dataset` repeated are removed before the call, which is omitted if no
    items are left. A metric in a `torchmn.training.Sum` is summed. Metrics and collections of torchmetrics, as the
    result or in the dict, are computed from the data of all ranks. A rank may return None or lack a metric.

    Args:
        actual_evaluator: a function, or an object with a method `evaluate`, that returns a dict of metrics or one
            number: means over this rank's samples (numbers, tensors, arrays). Other attributes of the returned
            evaluator are those of this object.
        comm: communicator whose ranks have different samples; all of them must call the evaluator.
        weights: "samples", or "equal" if all ranks evaluate equally many samples and their number is unknown.

    Returns:
        A function with the arguments of `evaluator`.

    Raises:
        ArgumentError: for a wrong argument; when called, on every rank, for a result that is not a metric, or if the
            evaluation read a repeated item, which would be counted twice.
        MismatchError: when called, on every rank, if several ranks have a metric and one lacks its number of samples.
    """
    advice = ". Of a grid, pass grid.replicas, the ranks that evaluate different samples"
    comm = as_communicator(comm, "create_multi_node_evaluator", advice)
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
        # Directly, because __setattr__ sets attributes of the actual evaluator.
        vars(self).update(actual_evaluator=actual_evaluator, comm=comm, weights=weights, _evaluate_locally=local)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the metrics of all ranks' data; takes the arguments of the actual evaluator."""
        comm: Communicator = self.comm
        problem, samples = None, None
        try:
            args = tuple(without_repeats(arg) if is_data(arg) else arg for arg in args)
            kwargs = {name: without_repeats(arg) if is_data(arg) else arg for name, arg in kwargs.items()}
        except ArgumentError as error:
            problem = str(error)
        data = [arg for arg in (*args, *kwargs.values()) if is_data(arg)]
        if len(data) == 1 and problem is None:
            samples = samples_in(data[0])
        comm.agree("evaluate", problem, weights=self.weights)
        with record_uses() as uses:
            result = None if samples == 0 else self._evaluate_locally(*args, **kwargs)
        local, problem = combined_metrics.read(result, samples)
        local.stream_lengths = tuple(stream.global_length for stream in map(stream_of, data) if stream is not None)
        counts = [metric.samples for metric in local.metrics.values()]
        with comm.agreed("evaluate", problem or uses.problem() or sampler_problem(self.actual_evaluator, counts)):
            ranks = comm.allgather_obj(local)
        return combined_metrics.combine(ranks, self.weights == "equal", f"rank {comm.rank} of {comm.size}: evaluate")

    __call__ = evaluate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look these up before `actual_evaluator` is set
            raise AttributeError(name)
        return getattr(self.actual_evaluator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.actual_evaluator, name, value)

    def __repr__(self) -> str:
        return f"MultiNodeEvaluator({self.actual_evaluator!r}, {self.comm!r})"
