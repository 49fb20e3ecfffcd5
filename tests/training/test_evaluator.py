"""create_multi_node_evaluator: the metrics of one process on the whole data set, on every rank."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, numbers, tensor
from torchmn.data import scatter_dataset
from torchmn.training import Sum, create_multi_node_evaluator, without_repeats


def whole_set(length: int) -> TensorDataset:
    return TensorDataset(tensor(numbers((length, 3), length)), torch.arange(length) % 3)


def evaluate(model, loader) -> dict[str, float]:
    """A typical evaluation, which divides by the length of the data set that it gets."""
    loss = correct = 0.0
    for x, y in loader:
        outputs = model(x)
        loss += torch.nn.functional.cross_entropy(outputs, y, reduction="sum").item()
        correct += (outputs.argmax(1) == y).sum().item()
    return {"loss": loss / len(loader.dataset), "accuracy": correct / len(loader.dataset)}


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_the_plain_script_gives_the_metrics_of_one_process(comm):
    for length in (1, comm.size, 5 * comm.size - 1, 23):
        whole = whole_set(length)
        expected = evaluate(torch.sin, DataLoader(whole, batch_size=4))
        for equal in (True, False):
            mine = scatter_dataset(whole, comm, shuffle=True, seed=3, force_equal_length=equal)
            everywhere = create_multi_node_evaluator(evaluate, comm)
            for loader in (DataLoader(mine, batch_size=4), DataLoader(mine, batch_size=3, shuffle=len(mine) > 0)):
                got = everywhere(torch.sin, loader)
                assert list(got) == ["loss", "accuracy"]
                assert got == pytest.approx(expected, rel=1e-12), f"{length} items, equal lengths: {equal}"
                assert comm.allgather_obj(got) == [got] * comm.size, "not the same on every rank"


@ranks(3, on="threads")
def test_a_data_set_can_be_the_argument_too_by_position_or_name(comm):
    def mean_of(model, data):
        return float(sum(model(x).sum() for x, _ in data) / len(data))

    whole = whole_set(10)
    mine = scatter_dataset(whole, comm)
    assert sum(comm.allgather_obj(mine.repeated)) > 0, "the case needs repeats"
    everywhere = create_multi_node_evaluator(mean_of, comm)
    expected = mean_of(torch.sin, whole)
    assert everywhere(torch.sin, mine) == pytest.approx(expected, rel=1e-12)
    assert everywhere(model=torch.sin, data=mine) == pytest.approx(expected, rel=1e-12)


@ranks(1, 2, 3, on="threads")
def test_the_result_may_contain_the_number_of_samples(comm):
    n = comm.rank  # rank 0 has nothing, and a mean of nothing
    mean = float("nan") if n == 0 else float(10 * n)
    total = sum(range(comm.size))
    expected = sum(10.0 * k * k for k in range(comm.size)) / total if total else float("nan")
    for result in (
        ({"m": mean}, n),
        {"m": (mean, n)},
        {"m": (torch.tensor(mean), torch.tensor(n))},
        ({"m": np.float64(mean)}, np.int64(n)),
    ):
        got = create_multi_node_evaluator(lambda result=result: result, comm)()
        assert got == {"m": pytest.approx(expected, nan_ok=True)}, result
    assert create_multi_node_evaluator(lambda: (mean, n), comm)() == pytest.approx(expected, nan_ok=True)


@ranks(3, on="threads")
def test_keys_of_some_ranks_sums_and_tensors(comm):
    def result():
        matrix = torch.full((2, 2), comm.rank)
        common = {"confusion": Sum(matrix), "seen": Sum(5), "per_class": (torch.tensor([1.0, comm.rank]), 2)}
        if comm.rank == 0:
            return {**common, "only_0": 0.3, "late": None}
        if comm.rank == 1:
            return {"late": (4.0, 1), **common, "early": (1.0, 3)}
        return {**common, "early": (5.0, 1)}

    got = create_multi_node_evaluator(result, comm)()
    assert list(got) == ["confusion", "seen", "per_class", "only_0", "late", "early"]
    assert got["confusion"].tolist() == [[3, 3], [3, 3]]
    assert got["seen"] == 15 and isinstance(got["seen"], int)
    assert got["per_class"].tolist() == [1.0, 1.0] and got["per_class"].dtype == torch.float32
    assert (got["only_0"], got["late"], got["early"]) == (0.3, 4.0, 2.0)


@ranks(2, on="threads")
def test_ranks_without_metrics_do_not_count(comm):
    for nothing in (None, {}):
        got = create_multi_node_evaluator(lambda nothing=nothing: {"loss": 0.1} if comm.rank else nothing, comm)()
        assert got == {"loss": 0.1}
    assert create_multi_node_evaluator(lambda: None, comm)() == {}
    assert create_multi_node_evaluator(lambda: 0.1 if comm.rank else None, comm)() == 0.1


@ranks(2, 3, on="threads")
@ranks(2, on="mpi")
def test_means_without_numbers_of_samples_are_refused_on_every_rank_unless_weights_are_equal(comm):
    last = comm.size - 1

    def local():
        return {"loss": float(comm.rank)} if comm.rank == last else {"loss": (float(comm.rank), 5)}

    for words in (
        f"rank {last} did not return its number of samples",
        "'loss'",
        "number_of_samples",
        "weights='equal'",
    ):
        assert_refused(comm, create_multi_node_evaluator(local, comm), words, kind=torchmn.MismatchError)
    assert create_multi_node_evaluator(local, comm, weights="equal")() == {"loss": last / 2}
    # With two loaders, it is unknown to which of them the metric belongs.
    two = [DataLoader(whole_set(4 + comm.rank)) for _ in range(2)]
    everywhere = create_multi_node_evaluator(lambda *_: 1.0, comm)
    assert_refused(comm, lambda: everywhere(*two), "did not return its number")
    assert everywhere(two[0]) == 1.0


@ranks(2, on="threads")
def test_results_that_cannot_be_combined_are_refused_on_every_rank(comm):
    wrong = {
        "metric 'loss': expected a number": {"loss": "low"},
        "got 'many' as the number": ({"loss": 1.0}, "many"),
        "got -1 as the number": {"loss": (1.0, -1)},
        "expected a number": "low",
        "got 0.9 as the number. Return several metrics as a dict": (0.5, 0.9),  # (loss, accuracy)
        "metric 'names': expected a number": {"names": np.array(["a", "b"])},
    }
    for words, result in wrong.items():
        given = result if comm.rank == 1 else {"loss": (1.0, 1)}
        everywhere = create_multi_node_evaluator(lambda given=given: given, comm)
        assert_refused(comm, everywhere, "rank 1", words, kind=torchmn.ArgumentError)
    differ = {
        "one number and others a dict": ((1.0, 1), {"loss": (1.0, 1)}),
        "not the same kind": ({"loss": Sum(1)}, {"loss": (1.0, 1)}),
        "shape (2,)": ({"loss": (torch.ones(2), 1)}, {"loss": (torch.ones(3), 1)}),
    }
    for words, results in differ.items():
        everywhere = create_multi_node_evaluator(lambda results=results: results[comm.rank], comm)
        assert_refused(comm, everywhere, words, kind=torchmn.MismatchError)
    everywhere = create_multi_node_evaluator(lambda: 1.0, comm, weights=("samples", "equal")[comm.rank])
    assert_refused(comm, everywhere, "weights", kind=torchmn.MismatchError)


@ranks(2, on="threads")
def test_repeats_that_cannot_be_left_out_are_refused_on_every_rank(comm):
    class Transformed(Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            return self.dataset[index]

    mine = scatter_dataset(whole_set(5), comm)
    uneven = scatter_dataset(whole_set(5), comm, force_equal_length=False)
    everywhere = create_multi_node_evaluator(lambda loader: float(len(loader.dataset)), comm)
    weighted = WeightedRandomSampler([1.0] * 3, 3)
    words = {
        "a Transformed has ScatteredDataset": DataLoader(Transformed(mine)),
        "a custom sampler": DataLoader(mine, sampler=weighted),
        "DistributedSampler repeats": DataLoader(whole_set(5), sampler=DistributedSampler(whole_set(5), 2, comm.rank)),
    }
    for word, loader in words.items():
        assert_refused(comm, lambda loader=loader: everywhere(loader), word, kind=torchmn.ArgumentError)
    assert everywhere(DataLoader(Transformed(uneven))) == pytest.approx((3 * 3 + 2 * 2) / 5)


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.float8_e4m3fn, torch.uint16])
def test_sums_of_narrow_dtypes_do_not_overflow(comm, dtype):
    value = 240.0 if dtype != torch.bool else 1.0
    mine = {"sum": Sum(torch.tensor([value, 0.0]).to(dtype)), "mean": (torch.tensor([value]).to(dtype), comm.rank)}
    got = create_multi_node_evaluator(lambda: mine, comm)()
    assert got["sum"].tolist() == [value * comm.size, 0.0]
    assert got["mean"].tolist() == [value]


class Holding(Dataset):
    """A data set that has other data sets in its attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [1.0, 2.0][index]


@ranks(2, on="threads")
def test_repeats_are_found_in_dicts_and_data_sets_may_hold_each_other(comm):
    everywhere = create_multi_node_evaluator(lambda data: sum(data) / len(data), comm)
    scattered = scatter_dataset(torch.arange(5.0), comm)
    assert_refused(comm, lambda: everywhere(Holding(parts={"x": scattered})), "counted twice")
    around = Holding()
    around.inner = Holding(outer=around)
    assert everywhere(around) == 1.5


@ranks(2, on="threads")
def test_items_of_a_loader_without_batches_may_be_batches_and_are_not_counted(comm):
    batches = Holding()
    everywhere = create_multi_node_evaluator(lambda loader: sum(loader) / 2, comm)
    assert_refused(
        comm, lambda: everywhere(DataLoader(batches, batch_size=None)), "did not return its number of samples"
    )


@ranks(2, on="threads")
def test_samples_of_a_loader_are_those_that_it_goes_through(comm):
    everywhere = create_multi_node_evaluator(lambda _: float(comm.rank), comm)
    whole = whole_set(10)
    loaders = {
        8: DataLoader(whole, batch_size=4, drop_last=True),
        10: DataLoader(whole, batch_size=3),
        6: DataLoader(whole, batch_size=4, sampler=RandomSampler(whole, num_samples=6)),
    }
    for n, loader in loaders.items():
        other = DataLoader(whole_set(2))
        assert everywhere(loader if comm.rank else other) == pytest.approx(n / (n + 2)), n


@ranks(2, on="threads")
def test_an_object_is_not_changed_and_its_attributes_are_those_of_the_wrapper(comm):
    class Evaluator:
        name = "validation"
        scale = 1

        def evaluate(self):
            return {"loss": self.scale * float(comm.rank)}, 1

    actual = Evaluator()
    everywhere = create_multi_node_evaluator(actual, comm)
    assert everywhere.evaluate() == {"loss": 0.5} == everywhere()
    assert actual.evaluate() == ({"loss": float(comm.rank)}, 1) and "evaluate" not in vars(actual)
    everywhere.scale = 4
    assert actual.scale == 4 and everywhere.evaluate() == {"loss": 2.0}
    assert everywhere.name == "validation" and everywhere.actual_evaluator is actual
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = everywhere.nothing_like_it


@ranks(1, on="threads")
def test_wrong_arguments_are_refused(comm):
    for call, words in (
        (lambda: create_multi_node_evaluator(evaluate, comm, weights="equla"), "Did you mean 'equal'"),
        (lambda: create_multi_node_evaluator(evaluate, "comm"), "communicator"),
        (lambda: create_multi_node_evaluator(3, comm), "a method 'evaluate'"),
    ):
        with pytest.raises(torchmn.ArgumentError, match=words):
            call()


@ranks(2, on="threads")
def test_without_repeats_keeps_everything_else_of_a_loader(comm):
    def collate(items):
        return [y for _, y in items]

    mine = scatter_dataset(whole_set(5), comm)
    loader = DataLoader(mine, batch_size=2, collate_fn=collate, shuffle=True, drop_last=True)
    kept = without_repeats(loader)
    assert (kept.batch_size, kept.collate_fn, kept.drop_last) == (2, collate, True)
    assert isinstance(kept.sampler, RandomSampler) and len(kept.dataset) == 3 - mine.repeated
    assert without_repeats(kept) is kept
    mine = [int(y) for [y] in DataLoader(kept.dataset, collate_fn=collate)]
    assert sorted(comm.allreduce_obj(mine)) == [0, 0, 1, 1, 2]


@ranks(2, on="threads")
def test_arrays_that_torch_cannot_share_are_combined_like_others(comm):
    values = np.array([3.0, 5.0])
    given = {
        "backwards": values[::-1][::-1] if comm.rank == 0 else values[::-1],
        "of another machine": values if comm.rank == 0 else values.astype(">f8"),
        "of no dimension": 3.0 if comm.rank == 0 else np.array(5.0),
    }
    got = create_multi_node_evaluator(lambda: (given, 1), comm)()
    assert got["backwards"].tolist() == [4.0, 4.0]
    assert got["of another machine"].tolist() == [3.0, 5.0]
    assert got["of no dimension"] == 4.0


@ranks(2, on="threads")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_without_numbers_are_refused_on_every_rank(comm):
    odd = {
        "meta": torch.ones(2, device="meta"),
        "masked": np.ma.array([1.0, 2.0], mask=[False, True]),  # whose mean is 1, or 0 where all is masked
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    for kind, x in odd.items():
        value = x if comm.rank == 1 else torch.ones(2)
        everywhere = create_multi_node_evaluator(lambda value=value: ({"metric": value}, 1), comm)
        assert_refused(comm, everywhere, "rank 1 of 2: evaluate: metric 'metric'", kind)
