"""A brute-force oracle for halo plans, index by index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torchmn.geometry import BoxCopy, DimPlan, HaloPlan

PADDING = None


def global_index(index: int, extent: int, mode: str) -> int | None:
    """Returns the index of the image that fills `index`, which may be outside; None for constant padding."""
    if 0 <= index < extent:
        return index
    if mode == "zeros":
        return PADDING
    if mode == "circular":
        return index % extent
    if mode == "replicate":
        return 0 if index < 0 else extent - 1
    while not 0 <= index < extent:
        index = -index if index < 0 else 2 * (extent - 1) - index
    return index


def expected_buffer(plan: HaloPlan) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """Returns, for every index of the buffer, the global indices that must fill it; None for constant padding."""
    needed = [dim.needed[at] for dim, at in zip(plan.dims, plan.place, strict=True)]
    buffer = {}
    for index in product(*(range(interval.start, interval.stop) for interval in needed)):
        sources = [global_index(i, dim.extent, dim.padding_mode) for i, dim in zip(index, plan.dims, strict=True)]
        at = tuple(i - interval.start for i, interval in zip(index, needed, strict=True))
        buffer[at] = PADDING if PADDING in sources else tuple(sources)
    return buffer


def element_copies(box: BoxCopy) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields every (index in the buffer, index in the owner's tile) of a box."""
    dims = []
    for target, source, step in zip(box.target, box.source, box.steps, strict=True):
        first = source.start if step >= 0 else source.stop - 1
        pairs = [(target.start + n, first + n * step) for n in range(len(target))]
        assert all(at in source for _, at in pairs)
        dims.append(pairs)
    for pairs in product(*dims):
        yield tuple(to for to, _ in pairs), tuple(at for _, at in pairs)


def executed_buffer(plan: HaloPlan) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """Returns what the plan's boxes fill the buffer with; fails if two boxes overlap."""
    buffer: dict[tuple[int, ...], tuple[int, ...] | None] = {}
    for owner, boxes in {plan.rank: plan.local, **plan.receives}.items():
        starts = [interval.start for interval in owned_box(plan.dims, place_of(plan, owner))]
        for box in boxes:
            for target, source in element_copies(box):
                assert target not in buffer
                buffer[target] = tuple(start + at for start, at in zip(starts, source, strict=True))
    for box in plan.padding:
        for target in product(*(range(interval.start, interval.stop) for interval in box)):
            assert target not in buffer
            buffer[target] = PADDING
    return buffer


def place_of(plan: HaloPlan, rank: int) -> tuple[int, ...]:
    return list(product(*(range(parts) for parts in plan.grid_shape)))[rank]


def owned_box(dims: tuple[DimPlan, ...], place: tuple[int, ...]):
    return [dim.owned[at] for dim, at in zip(dims, place, strict=True)]
