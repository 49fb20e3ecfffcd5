"""GenericMultiNodeEvaluator gathers all outputs on one rank, in round-robin order."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, filled, numbers, roots, tensor
from torchmn.data import scatter_dataset
from torchmn.training import GenericMultiNodeEvaluator


def area_under_roc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """The probability that a positive scores higher than a negative, pair by pair."""
    pairs = scores[positive][:, None] - scores[~positive][None, :]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).double().mean())


class AreaUnderRoc(GenericMultiNodeEvaluator):
    def calc_local(self, x, positive):
        return self.target(x).squeeze(1), positive

    def aggregate(self, results):
        scores, positive = zip(*results, strict=True)
        return area_under_roc(torch.cat(scores), torch.cat(positive))


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_an_area_under_the_curve_is_that_of_the_whole_data_set(comm):
    model = nn.Sequential(filled(nn.Linear(3, 1), 5), nn.Dropout(0.9)).double()
    x = tensor(np.round(numbers((23, 3), 1), 1))
    whole = TensorDataset(x, torch.arange(23) % 3 == 0)
    model.eval()
    expected = area_under_roc(model(x).squeeze(1), whole.tensors[1])
    model.train()
    for equal in (True, False):
        mine = scatter_dataset(whole, comm, shuffle=True, seed=1, force_equal_length=equal)
        for root in roots(comm):
            got = AreaUnderRoc(comm, DataLoader(mine, batch_size=2), model, root=root)()
            assert got == (expected if comm.rank == root else None)
    assert model.training and model[1].training, "the modes of the modules are put back"


@ranks(1, 2, 3, 4, on="threads")
def test_results_come_by_round_and_then_by_rank_with_uneven_shards(comm):
    lengths = [3, 0, 5, 1][: comm.size]
    batches = [(comm.rank, place) for place in range(lengths[comm.rank])]
    done = []
    evaluator = GenericMultiNodeEvaluator(
        comm, batches, lambda rank, place: None if place == 1 else (place, rank), progress_hook=done.append
    )
    expected = [
        None if turn == 1 else (turn, rank)
        for turn in range(max(lengths))
        for rank in range(comm.size)
        if turn < lengths[rank]
    ]
    for _ in range(2):  # again: the batches start from the beginning
        assert evaluator.evaluate() == (expected if comm.rank == 0 else None)
    assert done == ([1, 2, 3] * 2 if comm.rank == 0 else [])


@ranks(2, on="threads")
def test_batches_reach_calc_local_as_positions_names_or_one_value(comm):
    def seen(*args, **kwargs):
        assert not torch.is_grad_enabled()
        return args, kwargs

    batches = [(1, 2), [3], {"x": 4}, torch.ones(2, dtype=torch.float64)]
    got = GenericMultiNodeEvaluator(comm, batches, seen)()
    if comm.rank == 0:
        assert got[::2][:3] == [((1, 2), {}), ((3,), {}), ((), {"x": 4})]
        assert torch.equal(got[6][0][0], torch.ones(2, dtype=torch.float64))
    moved = GenericMultiNodeEvaluator(comm, [torch.ones(1)], lambda x: str(x.device), device="meta")()
    assert moved == (["meta", "meta"] if comm.rank == 0 else None)
    converted = GenericMultiNodeEvaluator(comm, [3], lambda x: x, converter=lambda batch, device: (batch + 1,))()
    assert converted == ([4, 4] if comm.rank == 0 else None)


@ranks(2, on="threads")
def test_a_generator_is_exhausted_after_one_evaluation_which_raises_on_every_rank(comm):
    batches = (torch.ones(1) for _ in range(2)) if comm.rank else [torch.ones(1)]
    evaluator = GenericMultiNodeEvaluator(comm, batches, torch.Tensor.item)
    assert evaluator() == ([1.0, 1.0, 1.0] if comm.rank == 0 else None)
    assert_refused(comm, evaluator, "rank 1", "generator", "only once", kind=torchmn.ArgumentError)


@ranks(2, on="threads")
def test_a_wrong_root_is_refused_on_every_rank(comm):
    evaluator = GenericMultiNodeEvaluator(comm, [], print, root=0 if comm.rank else 7)
    assert_refused(comm, evaluator, "rank 0", "root", "7", kind=torchmn.ArgumentError)
    evaluator = GenericMultiNodeEvaluator(comm, [], print, root=comm.rank)
    assert_refused(comm, evaluator, "root", kind=torchmn.MismatchError)
