"""The same order on every rank, without messages."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from tests.data.worlds import ACROSS, small_worlds, small_worlds_of_several
from torchmn.iterators import create_synchronized_iterator


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def epoch_of(batches) -> list:
    return [torch.as_tensor(batch).tolist() for batch in batches]


class Evens(Sampler):
    """A user's sampler that takes a generator, as torch's own do."""

    def __init__(self, length, generator=None):
        self.length = length
        self.generator = generator

    def __len__(self):
        return self.length // 2

    def __iter__(self):
        for index in torch.randperm(self.length // 2, generator=self.generator).tolist():
            yield 2 * index


class Halves(BatchSampler):
    """A user's batch sampler around a random one."""

    def __len__(self):
        return 2

    def __iter__(self):
        order = list(self.sampler)
        yield from (order[: len(order) // 2], order[len(order) // 2 :])


def shuffling_loaders(seed=None) -> dict[str, DataLoader]:
    """Loaders whose batches are random in different ways."""
    generator = None if seed is None else seeded(seed)
    items = range(17)

    def loader(**options):
        return DataLoader(items, generator=generator, **options)

    weights = torch.arange(17) + 1.0
    return {
        "shuffle": loader(batch_size=4, shuffle=True),
        "drop_last": loader(batch_size=4, shuffle=True, drop_last=True),
        "single items": loader(batch_size=None, shuffle=True),
        "replacement": loader(batch_size=5, sampler=RandomSampler(items, True, 40, generator)),
        "weighted": loader(batch_size=5, sampler=WeightedRandomSampler(weights.tolist(), 40, generator=generator)),
        "subset": loader(batch_size=2, sampler=SubsetRandomSampler([1, 5, 7, 11, 16], generator)),
        "own sampler": loader(batch_size=3, sampler=Evens(17, generator)),
        "own batches": loader(batch_sampler=Halves(RandomSampler(items, generator=generator), 1, False)),
    }


@small_worlds
@ranks(4, on="mpi")
def test_every_rank_gets_the_same_new_order_each_epoch(comm):
    for name, loader in shuffling_loaders(seed=comm.rank).items():
        iterator = create_synchronized_iterator(loader, comm)
        assert len(iterator) == len(loader), name
        epochs = [epoch_of(iterator) for _ in range(3)]
        assert comm.allgather_obj(epochs) == [epochs] * comm.size, name
        assert epochs[0] != epochs[1] or epochs[0] != epochs[2], name
        assert [len(epoch) for epoch in epochs] == [len(loader)] * 3, name


@ranks(1, 2, 3, on="threads")
def test_without_generators_the_order_is_shared_too(comm):
    for name, loader in shuffling_loaders().items():
        epochs = [epoch_of(create_synchronized_iterator(loader, comm)) for _ in range(2)]
        assert comm.allgather_obj(epochs) == [epochs] * comm.size, name


@ranks(1, 2, 3, on="threads")
def test_with_a_generator_the_order_is_that_of_rank_0s_own_loader(comm):
    plain = shuffling_loaders(seed=0)
    for name, loader in shuffling_loaders(seed=comm.rank).items():
        before = loader.generator.get_state()
        iterator = create_synchronized_iterator(loader, comm)
        plain[name].generator.manual_seed(0)
        for _epoch in range(3):
            assert epoch_of(iterator) == epoch_of(plain[name]), name
        assert torch.equal(loader.generator.get_state(), before), "the user's generator is not changed"


@small_worlds
def test_what_was_not_shuffled_stays_unshuffled(comm):
    in_order = [[0, 1, 2], [3, 4, 5], [6]]
    own = [[5, 0], [2]]
    for loader, expected in (
        (DataLoader(range(7), batch_size=3), in_order),
        (DataLoader(range(7), batch_size=3, drop_last=True), in_order[:2]),
        (DataLoader(range(7), batch_size=2, sampler=[5, 0, 2]), own),
        (DataLoader(range(7), batch_sampler=own), own),
        (DataLoader(range(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, False)), in_order),
        (DataLoader([], batch_size=2), []),
    ):
        iterator = create_synchronized_iterator(loader, comm)
        assert [epoch_of(iterator), epoch_of(iterator)] == [expected, expected]
        assert iterator.epoch == 2


@ranks(3, on=ACROSS)
def test_rank_0s_random_state_decides_and_each_iterator_draws_an_order(comm):
    def drawn(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed + comm.rank)
            iterator = create_synchronized_iterator(DataLoader(range(30), batch_size=4, shuffle=True), comm)
            following = torch.get_rng_state()
            epochs = [epoch_of(iterator), epoch_of(iterator)]
            assert torch.equal(torch.get_rng_state(), following), "an epoch draws from a private generator"
            another = create_synchronized_iterator(DataLoader(range(30), batch_size=4, shuffle=True), comm)
            assert epoch_of(another) not in epochs
        assert comm.allgather_obj(epochs) == [epochs] * comm.size
        return epochs

    first, again, other = drawn(1), drawn(1), drawn(7)
    assert first == again != other


@small_worlds
def test_a_resumed_iterator_gives_exactly_the_rest_and_the_same_next_epochs(comm):
    for name in shuffling_loaders():
        for steps in (0, 1, 2):
            iterator = create_synchronized_iterator(shuffling_loaders()[name], comm)
            epoch_of(iterator)
            epoch = iter(iterator)
            for _step in range(steps):
                next(epoch)
            state = iterator.state_dict()
            rest = epoch_of(epoch)
            following = [epoch_of(iterator), epoch_of(iterator)]

            resumed = create_synchronized_iterator(shuffling_loaders(seed=99)[name], comm)
            resumed.load_state_dict(state)
            assert (resumed.epoch, resumed.position) == (1, steps)
            assert epoch_of(resumed) == rest, f"{name} after {steps} steps"
            assert [epoch_of(resumed), epoch_of(resumed)] == following, f"{name} after {steps} steps"
            assert (resumed.epoch, resumed.position) == (4, 0)


@ranks(2, on="threads")
def test_a_state_saved_after_the_last_batch_leaves_nothing_of_its_epoch(comm):
    iterator = create_synchronized_iterator(DataLoader(range(5), batch_size=2, shuffle=True), comm)
    states = [iterator.state_dict() for _ in iterator]
    after = iterator.state_dict()
    following = epoch_of(iterator)
    iterator.load_state_dict(states[-1])
    assert epoch_of(iterator) == []
    assert epoch_of(iterator) == following
    iterator.load_state_dict(after)
    assert epoch_of(iterator) == following


@ranks(2, on="threads")
def test_a_state_can_be_loaded_twice_and_into_a_used_iterator(comm):
    iterator = create_synchronized_iterator(DataLoader(range(9), batch_size=2, shuffle=True), comm)
    epoch = iter(iterator)
    next(epoch)
    state = iterator.state_dict()
    rest = epoch_of(epoch)
    for _ in range(2):
        iterator.load_state_dict(state)
        assert epoch_of(iterator) == rest
        epoch_of(iterator)


@ranks(2, on="threads")
def test_an_epoch_that_is_left_early_is_over_and_the_next_is_as_if_it_had_ended(comm):
    whole = create_synchronized_iterator(DataLoader(range(9), batch_size=2, shuffle=True, generator=seeded(4)), comm)
    left = create_synchronized_iterator(DataLoader(range(9), batch_size=2, shuffle=True, generator=seeded(4)), comm)
    epoch_of(whole)
    for _ in left:
        break
    assert epoch_of(left) == epoch_of(whole)
    assert left.epoch == whole.epoch == 2


@ranks(1, on="threads")
def test_an_old_epoch_cannot_continue_after_a_new_one_began(comm):
    iterator = create_synchronized_iterator(DataLoader(range(9)), comm)
    old = iter(iterator)
    next(old)
    next(iter(iterator))
    with pytest.raises(torchmn.TorchMNError, match="a later one has begun"):
        next(old)


@small_worlds_of_several
def test_loaders_that_differ_raise_on_every_rank(comm):
    last = int(comm.rank == comm.size - 1)
    for loader in (
        DataLoader(range(9 + last)),
        DataLoader(range(9), batch_size=2 + last),
        DataLoader(range(9), shuffle=bool(last)),
        DataLoader(range(9), sampler=[1, 2, 3 + last]),
        DataLoader(range(9), sampler=SubsetRandomSampler([1, 2, 3 + last])),
    ):
        call = lambda loader=loader: create_synchronized_iterator(loader, comm)  # noqa: E731
        assert_refused(comm, call, "create_synchronized_iterator", "order", kind=torchmn.MismatchError)


@small_worlds
def test_loaders_whose_order_cannot_be_drawn_are_refused_on_every_rank(comm):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class Unordered(Sampler):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(torch.randperm(3).tolist())

    class Endless(Evens):
        __len__ = None  # type: ignore[assignment]

    items = range(9)
    parts = DistributedSampler(items, num_replicas=2, rank=0)
    for loader, word in (
        ([1, 2], "list"),
        (DataLoader(Stream()), "Stream"),
        (DataLoader(items, sampler=Unordered()), "Unordered"),
        (DataLoader(items, sampler=parts), "DistributedSampler"),
        (DataLoader(items, batch_size=None, sampler=Endless(4)), "length"),
        (DataLoader(items, batch_size=2, sampler=Endless(4)), "length"),
        (DataLoader(items, num_workers=1, in_order=False), "in_order"),
    ):
        bad = loader if comm.rank == comm.size - 1 else DataLoader(items)
        call = lambda bad=bad: create_synchronized_iterator(bad, comm)  # noqa: E731
        assert_refused(comm, call, f"rank {comm.size - 1}", word, kind=torchmn.ArgumentError)


@small_worlds
def test_states_that_do_not_fit_are_refused_on_every_rank(comm):
    iterator = create_synchronized_iterator(DataLoader(range(9), batch_size=2, shuffle=True), comm)
    epoch = iter(iterator)
    next(epoch)
    inside = iterator.state_dict()
    epoch_of(epoch)
    between = iterator.state_dict()
    other = create_synchronized_iterator(DataLoader(range(9), batch_size=3, shuffle=True), comm)
    call = lambda: other.load_state_dict(inside)  # noqa: E731
    assert_refused(comm, call, "5 batches", "3 batches", kind=torchmn.ArgumentError)
    other.load_state_dict(between)
    assert (other.epoch, len(epoch_of(other))) == (1, 3)
    if comm.size > 1:
        different = inside if comm.rank else between
        call = lambda: iterator.load_state_dict(different)  # noqa: E731
        assert_refused(comm, call, "position", kind=torchmn.MismatchError)
