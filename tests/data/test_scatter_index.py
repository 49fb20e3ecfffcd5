"""Each rank's part of a range."""

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, roots
from tests.data.worlds import small_worlds
from torchmn.data import scatter_dataset, scatter_index


@small_worlds
def test_shares_cover_the_range_and_are_those_of_scatter_dataset(comm):
    for n in sorted({0, 1, comm.size - 1, comm.size, 5 * comm.size - 1, 10}):
        for root in roots(comm):
            for equal in (True, False):
                begin, end = scatter_index(n if comm.rank == root else None, comm, root, force_equal_length=equal)
                assert (begin, end) == scatter_index(n, comm, root, force_equal_length=equal)
                part = scatter_dataset(range(n), comm, root, force_equal_length=equal)
                assert sorted(part) == list(range(begin, end))
                shares = comm.allgather_obj((begin, end))
                assert {i for share in shares for i in range(*share)} == set(range(n))
                if not equal:
                    assert sum(last - first for first, last in shares) == n


@ranks(3, on="threads")
def test_ten_over_three(comm):
    assert scatter_index(10, comm, force_equal_length=False) == ((0, 4), (4, 7), (7, 10))[comm.rank]
    assert scatter_index(10, comm) == ((0, 4), (3, 7), (6, 10))[comm.rank]


@small_worlds
def test_wrong_arguments_are_refused_on_every_rank(comm):
    last = comm.size - 1
    for n in (-1, 2.5, "7"):
        call = lambda n=n: scatter_index(n if comm.rank == last else 7, comm)  # noqa: E731
        assert_refused(comm, call, f"rank {last}", "scatter_index", "n", repr(n), kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: scatter_index(None, comm), "None", kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: scatter_index(7, comm, comm.size), "root", kind=torchmn.ArgumentError)
    if comm.size > 1:
        assert_refused(comm, lambda: scatter_index(7 + comm.rank, comm), "7 n", "8 n", kind=torchmn.MismatchError)
