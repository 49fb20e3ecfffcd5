"""Ranges of indices per rank, checked against sets of integers."""

from hypothesis import given
from hypothesis import strategies as st

from torchmn.data.partition import IndexRange, permutation

totals, sizes = st.integers(0, 200), st.integers(1, 40)


@given(totals, sizes)
def test_equal_ranges_cover_all_items_with_the_fewest_repeats(total, size):
    windows = [IndexRange.of(total, size, rank, equal=True) for rank in range(size)]
    length = -(-total // size)
    assert [window.end - window.begin for window in windows] == [length] * size
    everything = [place for window in windows for place in window.indices().tolist()]
    assert set(everything) == set(range(total))
    repeats = sum(window.repeated for window in windows)
    assert repeats == length * size - total <= size - 1
    assert all(window.repeated in (0, 1) for window in windows)


@given(totals, sizes)
def test_each_item_is_unrepeated_on_exactly_one_rank(total, size):
    own = []
    for rank in range(size):
        window = IndexRange.of(total, size, rank, equal=True)
        places = window.indices().tolist()
        assert sorted(places) == list(range(window.begin, window.end))
        own += places[: len(places) - window.repeated]
    assert sorted(own) == list(range(total))


@given(totals, sizes)
def test_no_item_is_repeated_much_more_often_than_another(total, size):
    counts = [0] * total
    for rank in range(size):
        for place in IndexRange.of(total, size, rank, equal=True).indices().tolist():
            counts[place] += 1
    assert not counts or max(counts) - min(counts) <= 1


@given(totals, sizes)
def test_exact_ranges_are_consecutive_and_lengths_differ_by_at_most_one(total, size):
    windows = [IndexRange.of(total, size, rank, equal=False) for rank in range(size)]
    assert [place for window in windows for place in window.indices().tolist()] == list(range(total))
    lengths = [window.end - window.begin for window in windows]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert all(window.repeated == 0 for window in windows)


def test_a_permutation_follows_from_its_seed():
    assert permutation(5, None).tolist() == [0, 1, 2, 3, 4]
    first, again, other = permutation(50, 1), permutation(50, 1), permutation(50, 2)
    assert sorted(first.tolist()) == list(range(50))
    assert first.tolist() == again.tolist() != other.tolist()
