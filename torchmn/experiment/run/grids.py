"""Which grid of ranks each mode takes: integers only, so that it can be said before any rank is started."""

from __future__ import annotations

from math import prod

from torchmn.errors import ExperimentError
from torchmn.experiment.vocabulary.schema import Experiment, Parallel
from torchmn.modes import MODES, mode_of

TILE_AXES = ("depth", "height", "width")
Sizes = dict[str, int]
Shape = tuple[int, ...]


class Unfit(ValueError):
    """A mode that does not work on so many ranks, or with such samples."""


def grid_for(mode: str, size: int, shape: Shape, given: Sizes) -> Sizes:
    """How many ranks stand along each axis (data, depth, height, width): as `given`, or as squarely as can be.

    shape: of one sample. Raises Unfit where the mode has no grid of `size` ranks.
    """
    if mode_of(mode).cuts_images and not _is_image(shape):
        raise Unfit(f"{mode} cuts images, and a sample of shape {shape} is none")
    unused = [axis for axis in given if given[axis] > 1 and axis not in _axes(mode, shape)]
    if unused:
        others = [known.flag for other, known in MODES.items() if unused[0] in _axes(other, shape)]
        raise Unfit(
            f"{mode} has no axis {unused[0]} here, only {' and '.join(_axes(mode, shape))}; with it go {_or(others)}"
        )
    sizes = {axis: given.get(axis, 1) for axis in ("data", *TILE_AXES)}
    if given:
        if len(mode_of(mode).divides) > 1 and "data" not in given and size % prod(sizes.values()) == 0:
            sizes["data"] = size // prod(sizes.values())
        if prod(sizes.values()) != size:
            said = " x ".join(f"{axis} {count}" for axis, count in sizes.items() if count > 1) or "1"
            needed = prod(sizes.values())
            raise Unfit(
                f"a grid of {said} has {needed} ranks, and there are {size}: take {needed} ranks (-n {needed}), or "
                f"{_or(grids_of(mode, size, shape))}"
            )
    elif mode == "datapar":
        sizes["data"] = size
    else:
        sizes.update(_chosen(mode, size, shape))
    _check_extents(mode, sizes, shape)
    return sizes


def _is_image(shape: Shape) -> bool:
    return 2 <= len(shape) <= 4  # maps, and one to three dims


def _axes(mode: str, shape: Shape) -> tuple[str, ...]:
    known = mode_of(mode)
    if mode == "datapar":
        return ("data",)
    if known.cuts_images and not _is_image(shape):
        return ()
    tiles = TILE_AXES[4 - len(shape) :] if known.cuts_images else TILE_AXES
    return ("data", *tiles) if "samples" in known.divides else tiles


def _chosen(mode: str, size: int, shape: Shape) -> Sizes:
    """The grid of a mode where none is given."""
    sizes = {}
    if len(mode_of(mode).divides) > 1:
        data = next((n for n in range(2, size) if size % n == 0), None)
        if data is None:
            raise Unfit(f"{mode} needs a number of ranks that is a product, as 4 = 2 x 2, and there are {size}")
        sizes["data"] = data
        size //= data
    if mode_of(mode).cuts_images and len(shape) == 2:
        return {**sizes, "width": size}
    height = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    return {**sizes, "height": height, "width": size // height}


def _check_extents(mode: str, sizes: Sizes, shape: Shape) -> None:
    if mode_of(mode).cuts_images:
        for axis, extent in zip(TILE_AXES[4 - len(shape) :], shape[1:], strict=True):
            if sizes[axis] > extent:
                raise Unfit(f"{sizes[axis]} ranks along {axis} can not share {extent} rows of an image")


def grids_of(mode: str, size: int, shape: Shape) -> list[str]:
    """Every grid of `size` ranks for a mode, as --grid takes them."""
    axes = _axes(mode, shape)
    found: list[Sizes] = [{}]
    for axis in axes:
        found = [{**sizes, axis: n} for sizes in found for n in range(1, size + 1) if size % n == 0]
    fit = []
    for sizes in [sizes for sizes in found if prod(sizes.values()) == size]:
        both = "data" in sizes and mode != "datapar"
        if not both or 1 < sizes["data"] < size:  # groups of one rank, or one group, are another mode
            try:
                _check_extents(mode, {**dict.fromkeys(("data", *TILE_AXES), 1), **sizes}, shape)
            except Unfit:
                continue
            fit.append(_as_flag(sizes))
    return list(dict.fromkeys(fit))


def _as_flag(sizes: Sizes) -> str:
    if set(sizes) <= {"height", "width"} or sizes.get("depth", 1) == sizes.get("data", 1) == 1:
        return f"--grid {sizes.get('height', 1)}x{sizes.get('width', 1)}"
    return "--grid " + ",".join(f"{axis}={count}" for axis, count in sizes.items() if count > 1)


def _or(words: list[str], most: int = 6) -> str:
    if not words:
        return "another mode"
    return " or ".join([*words[:most], *(["..."] if len(words) > most else [])])


def described(sizes: Sizes, mode: str) -> str:
    """`2 x 2 (height x width)`, for people."""
    used = {axis: count for axis, count in sizes.items() if count > 1}
    if "vectors" in mode_of(mode).divides:  # the ranks that share an image share its vectors instead
        vectors = prod(count for axis, count in used.items() if axis != "data")
        used = {axis: count for axis, count in {"data": used.get("data", 1), "vectors": vectors}.items() if count > 1}
    if not used:
        return "1"
    return f"{' x '.join(str(count) for count in used.values())} ({' x '.join(used)})"


def sizes_for(parallel: Parallel, size: int, shape: Shape) -> tuple[str, Sizes]:
    """The mode, and how many ranks stand along each axis; raises Unfit."""
    mode = parallel.mode or "datapar"
    return mode, grid_for(mode, size, shape, parallel.grid.sizes() if parallel.grid else {})


def check(experiment: Experiment, size: int, shape: Shape | None) -> None:
    """Raise an ExperimentError where the experiment's mode has no place for `size` ranks.

    shape: of one sample; None where it is not known yet: then only what does not depend on it is checked.
    """
    mode = experiment.the_parallel().mode or "datapar"
    if size > 1 and mode != "datapar" and any(layer.kind == "rbm" for layer in experiment.the_model().layers or []):
        raise ExperimentError(f"{mode} is not possible: rbm layers are pretrained whole. This mode would: --datapar.")
    if shape is None:
        return
    try:
        sizes_for(experiment.the_parallel(), size, shape)
    except Unfit as error:
        if experiment.the_parallel().grid and fits(mode, size, shape):
            raise ExperimentError(f"{error}.") from None  # which says the grids that fit
        fit = [known.flag for name, known in MODES.items() if fits(name, size, shape)]
        raise ExperimentError(f"{str(error).rstrip('.')}. With {size} ranks these would: {', '.join(fit)}") from None


def fits(mode: str, size: int, shape: Shape) -> bool:
    """Whether a mode has a grid of `size` ranks for samples of this shape."""
    try:
        grid_for(mode, size, shape, {})
    except Unfit:
        return False
    return True
