"""Evaluators with a loader that is not an argument raise if they read repeated items, which would count twice."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.data import scatter_dataset
from torchmn.training import GenericMultiNodeEvaluator, create_multi_node_evaluator, without_repeats


class Ported:
    """An evaluator as in ChainerMN: an object with a loader, whose method has no arguments."""

    def __init__(self, loader):
        self.loader = loader

    def evaluate(self):
        total = number = 0
        for (x,) in self.loader:
            total, number = total + x.sum().item(), number + len(x)
        return {"mean": total / max(number, 1)}, number


def whole_set(length):
    return TensorDataset(torch.arange(length, dtype=torch.float64) ** 2)


def mean_of(length):
    return pytest.approx(whole_set(length).tensors[0].mean().item(), rel=1e-12)


@ranks(2, 3, on="threads")
@ranks(3, on="mpi")
def test_a_ported_evaluator_that_reads_a_repeated_item_is_refused_on_every_rank(comm):
    share = scatter_dataset(whole_set(comm.size * 3 + 1), comm)
    assert sum(comm.allgather_obj(share.repeated)) == comm.size - 1
    for loader in (
        DataLoader(share, batch_size=2),
        DataLoader(share, batch_size=2, shuffle=True),
        DataLoader(torch.utils.data.Subset(share, range(len(share)))),
        ((x[None],) for (x,) in share),
    ):
        evaluate = create_multi_node_evaluator(Ported(loader), comm)
        assert_refused(comm, evaluate, "counted on another rank", "without_repeats", kind=torchmn.ArgumentError)
    names = create_multi_node_evaluator(lambda: (sum(share[-1]).item(), 1), comm)
    assert_refused(comm, names, "repeated", kind=torchmn.ArgumentError)


@ranks(2, on="mpi")
def test_repeated_items_that_workers_read_are_refused(comm):
    share = scatter_dataset(whole_set(5), comm)
    loader = DataLoader(share, batch_size=2, num_workers=1, multiprocessing_context="fork")
    evaluate = create_multi_node_evaluator(Ported(loader), comm)
    assert_refused(comm, evaluate, "counted on another rank", kind=torchmn.ArgumentError)


@ranks(1, 2, 3, on="threads")
def test_without_repeats_a_ported_evaluator_gives_the_value_of_one_process(comm):
    length = comm.size * 3 + 1
    share = scatter_dataset(whole_set(length), comm)
    exact = scatter_dataset(whole_set(length), comm, force_equal_length=False)
    divisible = scatter_dataset(whole_set(comm.size * 3), comm)
    for data, expected in (
        (without_repeats(share), mean_of(length)),
        (exact, mean_of(length)),
        (divisible, mean_of(comm.size * 3)),
    ):
        evaluate = create_multi_node_evaluator(Ported(DataLoader(data, batch_size=2)), comm)
        assert evaluate() == {"mean": expected}

    def evaluate_argument(loader):
        return Ported(loader).evaluate()

    assert create_multi_node_evaluator(evaluate_argument, comm)(DataLoader(share, batch_size=2)) == {
        "mean": mean_of(length)
    }
    only_own = create_multi_node_evaluator(lambda: (sum(share[k][0].item() for k in range(3)) / 3, 3), comm)
    assert isinstance(only_own(), float), "a part may be read without its repeated item"


@ranks(2, on="threads")
def test_an_evaluator_with_a_loader_whose_sampler_repeats_items_is_refused(comm):
    def loader(length):
        data = whole_set(length)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, comm.size, comm.rank))

    uneven, even, in_a_dict = loader(5), loader(6), {"test": loader(5)}
    for refused in (
        Ported(uneven),
        lambda: Ported(uneven).evaluate(),
        lambda: {"mean": (Ported(in_a_dict["test"]).evaluate()[0]["mean"], 3)},
    ):
        evaluate = create_multi_node_evaluator(refused, comm)
        assert_refused(comm, evaluate, "DistributedSampler repeats items", kind=torchmn.ArgumentError)
    trainer = Ported(even)
    trainer.training = uneven  # which the evaluation does not read
    exact = create_multi_node_evaluator(trainer, comm)
    assert exact.training is uneven
    assert_refused(comm, exact, "DistributedSampler repeats items", kind=torchmn.ArgumentError)  # equally many samples
    trainer.training = loader(9)
    assert exact() == {"mean": mean_of(6)}


@ranks(2, on="threads")
def test_outputs_of_a_repeated_item_are_refused_by_the_generic_evaluator(comm):
    share = scatter_dataset(whole_set(5), comm)

    class Batches:
        """An iterable that is not a DataLoader, so that its items are unknown."""

        def __iter__(self):
            return iter(DataLoader(share, batch_size=2))

    refused = GenericMultiNodeEvaluator(comm, Batches(), lambda x: x)
    assert_refused(comm, refused, "GenericMultiNodeEvaluator", "counted on another rank", kind=torchmn.ArgumentError)
    results = GenericMultiNodeEvaluator(comm, DataLoader(share, batch_size=2), lambda x: x)()
    if comm.rank == 0:
        assert sorted(torch.cat(results).tolist()) == [0.0, 1.0, 4.0, 9.0, 16.0]


@ranks(2, on="threads")
def test_lists_and_arrays_are_data_sets_of_loaders(comm):
    def evaluate(loader):
        return {"mean": torch.cat(list(loader)).double().mean()}

    everything = list(range(7))
    own = everything[comm.rank :: 2]
    for dataset in (own, np.array(own)):
        mean = create_multi_node_evaluator(evaluate, comm)(DataLoader(dataset, batch_size=2))
        assert mean == {"mean": pytest.approx(3)}
        outputs = GenericMultiNodeEvaluator(comm, DataLoader(dataset), torch.flatten)()
        assert comm.rank == 1 or sorted(int(x) for x in outputs) == everything
