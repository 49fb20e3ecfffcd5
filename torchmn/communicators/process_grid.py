"""`ProcessGrid`, the ranks of a communicator along named axes: a device mesh.

Ranks along `data` have replicas of the model; along the other axes they have tiles of the same images.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.errors import ArgumentError, HaloError, nearest
from torchmn.other_spellings import adapted

AXES = ("data", "depth", "height", "width")
TILE_AXES = AXES[1:]
MAPPINGS = ("within-host", "across-hosts")


class ProcessGrid:
    """A grid of `data` x `depth` x `height` x `width` ranks. All ranks of `comm` must create it.

    Args:
        comm: communicator of all ranks.
        data: number of replicas, which have different samples.
        depth: number of tiles into which volumes are cut along their depth.
        height: the same for rows.
        width: the same for columns.
        tiles: "within-host" places the tiles of an image on as few hosts as possible, so that halos do not cross the
            network; "across-hosts" does so with the replicas of a tile.

    Attributes:
        comm: communicator of all ranks.
        sizes: number of ranks of each axis.
        place: this rank's coordinate along each axis.
        tiles: communicator of the ranks with other tiles of the same images, in row-major order of depth, height,
            width.
        replicas: communicator of the ranks with the same tile of other images, in order of `data`.

    Raises:
        ArgumentError: on every rank, if the axes do not multiply to `comm.size`.
    """

    def __init__(
        self,
        comm: Communicator,
        data: int = 1,
        depth: int = 1,
        height: int = 1,
        width: int = 1,
        *,
        tiles: str = MAPPINGS[0],
    ):
        comm = as_communicator(comm, "ProcessGrid")
        sizes: dict[str, Any] = {"data": data, "depth": depth, "height": height, "width": width}
        comm.agree("ProcessGrid", _problem(sizes, tiles, comm.size), **sizes, tiles=tiles)
        self.comm = comm
        self.sizes: dict[str, int] = sizes
        self.mapping = tiles
        # All ranks of one host before those of the next, so that neighbours in this order share hosts.
        hosts = comm.hosts
        order = sorted(range(comm.size), key=lambda rank: (hosts.index(hosts[rank]), rank))
        self._positions = [self._position(order.index(rank)) for rank in range(comm.size)]
        replica, tile = self._positions[comm.rank]
        self.place: dict[str, int] = {"data": replica, **self._tile_place(tile)}
        self.tiles = self._group(color=replica, key=tile, size=self.tile_count)
        self.replicas = self._group(color=tile, key=replica, size=data)

    @staticmethod
    def squarest(comm: Communicator) -> ProcessGrid:
        """Returns the grid of all ranks along height and width that is nearest to a square, with height <= width."""
        height = max(height for height in range(1, comm.size + 1) if comm.size % height == 0 and height**2 <= comm.size)
        return ProcessGrid(comm, height=height, width=comm.size // height)

    @staticmethod
    def of(grid: ProcessGrid | Communicator) -> ProcessGrid:
        """Returns `grid` itself, or the squarest grid of a communicator."""
        return grid if isinstance(grid, ProcessGrid) else ProcessGrid.squarest(grid)

    def __deepcopy__(self, _: Any) -> ProcessGrid:
        return self  # a copy of a model communicates with the same ranks

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "a ProcessGrid, and a parallel model with it, belongs to the ranks of its job and cannot be pickled. Save "
            "torchmn.full_state_dict(model), which loads into the plain model and into any other grid and mode"
        )

    @property
    def tile_count(self) -> int:
        """Number of tiles into which an image is cut."""
        return prod(self.sizes[axis] for axis in TILE_AXES)

    def axes_of(self, dims: int) -> tuple[str, ...]:
        """Returns the axes along which an image of `dims` dims is cut, in the order of its dims.

        Three dims are depth, height, width; two are height, width; a single one is the axis that has several ranks.

        Args:
            dims: number of dims of an image, 1 to 3.

        Returns:
            Names of axes, one per dim.

        Raises:
            HaloError: an axis that the image does not have has several ranks.
        """
        if dims == 1:
            used = [axis for axis in TILE_AXES if self.sizes[axis] > 1] or [TILE_AXES[-1]]
        else:
            used = list(TILE_AXES[3 - dims :])
        left_over = [f"{axis}={self.sizes[axis]}" for axis in TILE_AXES if self.sizes[axis] > 1 and axis not in used]
        if not 1 <= dims <= 3 or left_over or len(used) != dims:
            raise HaloError(
                f"rank {self.comm.rank} of {self.comm.size}: an image of {dims} dim{'s' * (dims != 1)} cannot be cut "
                f"over {self!r}: use as many axes of {', '.join(TILE_AXES)} as the image has dims, its last ones."
            )
        return tuple(used)

    def parts_of(self, dims: int) -> tuple[int, ...]:
        """Returns the number of parts into which each dim of an image of `dims` dims is cut."""
        return tuple(self.sizes[axis] for axis in self.axes_of(dims))

    def place_of(self, dims: int) -> tuple[int, ...]:
        """Returns this rank's coordinate along each dim of an image of `dims` dims."""
        return tuple(self.place[axis] for axis in self.axes_of(dims))

    def _position(self, index: int) -> tuple[int, int]:
        """Returns (replica, tile) of the rank with this index in the order of hosts."""
        if self.mapping == "within-host":
            return divmod(index, self.tile_count)
        tile, replica = divmod(index, self.sizes["data"])
        return replica, tile

    def _tile_place(self, tile: int) -> dict[str, int]:
        place = {}
        for axis in reversed(TILE_AXES):
            tile, place[axis] = divmod(tile, self.sizes[axis])
        return place

    def _group(self, color: int, key: int, size: int) -> Communicator:
        """Returns a communicator of the ranks of one color; a new one only if necessary, because MPI has few."""
        if size == self.comm.size and all(max(position) == rank for rank, position in enumerate(self._positions)):
            return self.comm  # the same ranks in the same order: the other coordinate of all is 0
        if size == 1:
            alone = self.comm.group.among([self.comm.rank], f"{self.comm.name}/alone")
            return Communicator(SoloTransport(alone))
        group = self.comm.split(color, key)
        assert group is not None
        return group

    def __repr__(self) -> str:
        axes = [axis for axis in AXES if self.sizes[axis] > 1]
        size = " x ".join(f"{axis} {self.sizes[axis]}" for axis in axes) or "one rank"
        return f"<ProcessGrid {size}>"

    def __str__(self) -> str:
        """Returns a drawing of the grid: one block of ranks per replica (and depth)."""
        ranks = {position: rank for rank, position in enumerate(self._positions)}
        digits = len(str(self.comm.size - 1))
        plane = self.sizes["height"] * self.sizes["width"]
        lines = [f"{self!r}: rank {self.comm.rank} is at " + ", ".join(f"{a} {p}" for a, p in self.place.items())]
        for replica in range(self.sizes["data"]):
            for depth in range(self.sizes["depth"]):
                lines.append(f"  data {replica}" + (f", depth {depth}" if self.sizes["depth"] > 1 else ""))
                for row in range(self.sizes["height"]):
                    first = depth * plane + row * self.sizes["width"]
                    cells = [ranks[replica, first + column] for column in range(self.sizes["width"])]
                    lines.append("    " + " ".join(f"{rank:>{digits}}" for rank in cells))
        return "\n".join(lines)


def _problem(sizes: dict[str, Any], tiles: object, size: int) -> str | None:
    """Returns why these axes do not form a grid of `size` ranks, or None."""
    for axis, ranks in sizes.items():
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            return f"expected {axis} to be a number of ranks, 1 or more, got {ranks!r}"
    if tiles not in MAPPINGS:
        return f"tiles {tiles!r} does not exist. {nearest(tiles, MAPPINGS)}"
    if prod(sizes.values()) != size:
        requested = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1) or "1"
        return (
            f"{requested} = {prod(sizes.values())} ranks, but the communicator has {size}: choose axes that multiply "
            f"to {size}, or start {prod(sizes.values())} ranks"
        )
    return None


def checked_grid(grid: object, operation: str) -> ProcessGrid:
    """Returns `grid`, or the squarest grid of a communicator; raises an ArgumentError for anything else."""
    if not isinstance(grid, ProcessGrid | Communicator):
        found = adapted(grid)
        if found is None:
            raise ArgumentError(f"{operation}: expected a ProcessGrid or a communicator, got {type(grid).__name__}")
        return ProcessGrid.of(found)
    return ProcessGrid.of(grid)
