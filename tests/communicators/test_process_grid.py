"""ProcessGrid: places, groups, mappings to hosts, and what it refuses."""

import pytest
import torch

from tests._worlds import ranks
from torchmn import ProcessGrid, run_threads
from torchmn.errors import ArgumentError, HaloError, MismatchError


@ranks(6, on="threads")
def test_places_are_row_major(comm):
    grid = ProcessGrid(comm, height=2, width=3)
    assert grid.place == {"data": 0, "depth": 0, "height": comm.rank // 3, "width": comm.rank % 3}
    assert (grid.tiles.rank, grid.tiles.size) == (comm.rank, 6)
    assert (grid.replicas.rank, grid.replicas.size) == (0, 1)


@ranks(4, on=("threads", "mpi", "gloo"))
@ranks(8, on="threads")
def test_groups_hold_the_right_ranks(comm):
    grid = ProcessGrid(comm, data=2, height=comm.size // 2)
    tiles = [int(x) for x in grid.tiles.allgather(torch.tensor(comm.rank))]
    replicas = [int(x) for x in grid.replicas.allgather(torch.tensor(comm.rank))]
    per_copy = comm.size // 2
    assert tiles == [per_copy * grid.place["data"] + tile for tile in range(per_copy)]
    assert replicas == [comm.rank % per_copy, per_copy + comm.rank % per_copy]
    assert tiles[grid.tiles.rank] == replicas[grid.replicas.rank] == comm.rank
    assert grid.place["height"] == grid.tiles.rank and grid.place["data"] == grid.replicas.rank


@ranks(8, on="threads")
def test_three_tile_axes(comm):
    grid = ProcessGrid(comm, depth=2, height=2, width=2)
    assert grid.place_of(3) == (comm.rank // 4, comm.rank // 2 % 2, comm.rank % 2)
    with pytest.raises(HaloError, match="2 dims cannot be cut over <ProcessGrid depth 2 x height 2 x width 2>"):
        grid.axes_of(2)


@ranks(1)
def test_a_grid_of_one(comm):
    grid = ProcessGrid(comm)
    assert grid.tiles.size == grid.replicas.size == 1 and set(grid.place.values()) == {0}
    assert grid.parts_of(1) == (1,) and grid.parts_of(2) == (1, 1) and grid.parts_of(3) == (1, 1, 1)
    assert ProcessGrid.squarest(comm).sizes == grid.sizes


def places_on(hosts, **arguments):
    def main(comm):
        grid = ProcessGrid(comm, **arguments)
        hosts_of_tiles = grid.tiles.allgather_obj(hosts[comm.rank])
        hosts_of_replicas = grid.replicas.allgather_obj(hosts[comm.rank])
        return grid.place["data"], grid.tiles.rank, set(hosts_of_tiles), set(hosts_of_replicas)

    return run_threads(main, len(hosts), hosts, timeout=30)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba"])
def test_tiles_or_copies_share_a_host_however_ranks_are_dealt_to_hosts(hosts):
    within = places_on(list(hosts), data=2, height=2)
    assert all(len(tiles) == 1 and len(copies) == 2 for _, _, tiles, copies in within)
    across = places_on(list(hosts), data=2, height=2, tiles="across-hosts")
    assert all(len(tiles) == 2 and len(copies) == 1 for _, _, tiles, copies in across)
    for seats in (within, across):
        assert sorted((copy, tile) for copy, tile, *_ in seats) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_squarest_grid():
    sizes = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 6: (2, 3), 9: (3, 3), 12: (3, 4)}
    for size, expected in sizes.items():
        shapes = run_threads(lambda comm: ProcessGrid.squarest(comm).parts_of(2), size, timeout=30)
        assert set(shapes) == {expected}


@ranks(4, on="threads")
def test_a_single_dim_takes_the_axis_that_has_ranks(comm):
    assert ProcessGrid(comm, height=4).parts_of(1) == (4,)
    assert ProcessGrid(comm, width=4).place_of(1) == (comm.rank,)
    with pytest.raises(HaloError, match="1 dim cannot be cut"):
        ProcessGrid(comm, height=2, width=2).axes_of(1)


@ranks(3, on="threads")
def test_wrong_axes_raise_on_every_rank(comm):
    with pytest.raises(ArgumentError, match="height 2 x width 2 = 4 ranks, but the communicator has 3"):
        ProcessGrid(comm, height=2, width=2)
    with pytest.raises(ArgumentError, match="expected width to be a number of ranks, 1 or more, got 0"):
        ProcessGrid(comm, width=0)
    with pytest.raises(ArgumentError, match="Did you mean 'within-host'"):
        ProcessGrid(comm, width=3, tiles="within-hosts")


@ranks(3, on="threads")
def test_ranks_that_disagree_raise_on_every_rank(comm):
    with pytest.raises(MismatchError, match="height 1, width 3"):
        ProcessGrid(comm, **{"height" if comm.rank == 1 else "width": 3})


@ranks(4, on="threads")
def test_a_printed_grid_shows_the_ranks_in_their_places(comm):
    text = str(ProcessGrid(comm, data=2, width=2))
    assert text.splitlines()[1:] == ["  data 0", "    0 1", "  data 1", "    2 3"]
