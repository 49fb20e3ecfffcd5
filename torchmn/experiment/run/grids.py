"""Chooses the process grid of a mode. Pure integer arithmetic, so that errors are found before ranks are started."""

from __future__ import annotations

from math import prod

from torchmn.errors import ExperimentError
from torchmn.experiment.vocabulary.schema import Experiment, Parallel
from torchmn.modes import MODES, mode_of

TILE_AXES = ("depth", "height", "width")
Sizes = dict[str, int]
Shape = tuple[int, ...]


class GridError(ValueError):
    """A mode has no grid for this number of ranks, or for samples of this shape."""


def grid_for(mode: str, size: int, shape: Shape, given: Sizes) -> Sizes:
    """Returns the number of ranks along each axis (data, depth, height, width).

    Args:
        mode: name of the mode.
        size: number of ranks.
        shape: of one sample, without the batch dim.
        given: sizes of axes that the user has chosen; if empty, the grid is as square as possible.

    Raises:
        GridError: if the mode has no such grid of `size` ranks.
    """
    if mode_of(mode).cuts_images and not _is_image(shape):
        raise GridError(f"{mode} needs images, got samples of shape {shape}")
    unused = [axis for axis in given if given[axis] > 1 and axis not in _axes(mode, shape)]
    if unused:
        suitable = [other.flag for name, other in MODES.items() if unused[0] in _axes(name, shape)]
        raise GridError(
            f"{mode} has no axis {unused[0]} here, only {' and '.join(_axes(mode, shape))}; use {_or(suitable)}"
        )
    sizes = {axis: given.get(axis, 1) for axis in ("data", *TILE_AXES)}
    if given:
        if len(mode_of(mode).divides) > 1 and "data" not in given and size % prod(sizes.values()) == 0:
            sizes["data"] = size // prod(sizes.values())
        if prod(sizes.values()) != size:
            axes = " x ".join(f"{axis} {count}" for axis, count in sizes.items() if count > 1) or "1"
            needed = prod(sizes.values())
            raise GridError(
                f"a grid of {axes} has {needed} ranks, and there are {size}: use {needed} ranks (-n {needed}), or "
                f"{_or(grids_of(mode, size, shape))}"
            )
    elif mode == "datapar":
        sizes["data"] = size
    else:
        sizes.update(_default_grid(mode, size, shape))
    _check_extents(mode, sizes, shape)
    return sizes


def _is_image(shape: Shape) -> bool:
    return 2 <= len(shape) <= 4  # channels, and one to three spatial dims


def _axes(mode: str, shape: Shape) -> tuple[str, ...]:
    if mode == "datapar":
        return ("data",)
    definition = mode_of(mode)
    if definition.cuts_images and not _is_image(shape):
        return ()
    tiles = TILE_AXES[4 - len(shape) :] if definition.cuts_images else TILE_AXES
    return ("data", *tiles) if "samples" in definition.divides else tiles


def _default_grid(mode: str, size: int, shape: Shape) -> Sizes:
    sizes = {}
    if len(mode_of(mode).divides) > 1:
        data = next((n for n in range(2, size) if size % n == 0), None)
        if data is None:
            raise GridError(f"{mode} needs a number of ranks that is a product, such as 4 = 2 x 2, got {size}")
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
                raise GridError(f"{sizes[axis]} ranks along {axis} cannot share {extent} rows of an image")


def grids_of(mode: str, size: int, shape: Shape) -> list[str]:
    """Returns every grid of `size` ranks for a mode, as options `--grid ...`."""
    axes = _axes(mode, shape)
    found: list[Sizes] = [{}]
    for axis in axes:
        found = [{**sizes, axis: n} for sizes in found for n in range(1, size + 1) if size % n == 0]
    fit = []
    for sizes in [sizes for sizes in found if prod(sizes.values()) == size]:
        is_hybrid = "data" in sizes and mode != "datapar"
        if not is_hybrid or 1 < sizes["data"] < size:  # with 1 or all ranks along data it is another mode
            try:
                _check_extents(mode, {**dict.fromkeys(("data", *TILE_AXES), 1), **sizes}, shape)
            except GridError:
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


def description(sizes: Sizes, mode: str) -> str:
    """Returns a grid as text: `2 x 2 (height x width)`."""
    used = {axis: count for axis, count in sizes.items() if count > 1}
    if "vectors" in mode_of(mode).divides:  # the image axes of the grid then divide vectors
        vectors = prod(count for axis, count in used.items() if axis != "data")
        used = {axis: count for axis, count in {"data": used.get("data", 1), "vectors": vectors}.items() if count > 1}
    if not used:
        return "1"
    return f"{' x '.join(str(count) for count in used.values())} ({' x '.join(used)})"


def sizes_for(parallel: Parallel, size: int, shape: Shape) -> tuple[str, Sizes]:
    """Returns the mode of the section `parallel` and its grid; raises a GridError if there is none."""
    mode = parallel.mode or "datapar"
    return mode, grid_for(mode, size, shape, parallel.grid.sizes() if parallel.grid else {})


def check(experiment: Experiment, size: int, shape: Shape | None) -> None:
    """Raises an ExperimentError if the experiment's mode is not possible on `size` ranks.

    Args:
        experiment: with a mode and perhaps a grid.
        size: number of ranks.
        shape: of one sample, or None if it is not known yet; then only the rest is checked.
    """
    mode = experiment.parallel_section().mode or "datapar"
    if size > 1 and mode != "datapar" and any(layer.kind == "rbm" for layer in experiment.model.layers or []):
        raise ExperimentError(f"{mode} is not possible: rbm layers cannot be sharded. Use --datapar.")
    if shape is None:
        return
    try:
        sizes_for(experiment.parallel_section(), size, shape)
    except GridError as error:
        if experiment.parallel_section().grid and fits(mode, size, shape):
            raise ExperimentError(f"{error}.") from None  # the message lists the grids that fit
        fit = [other.flag for name, other in MODES.items() if fits(name, size, shape)]
        raise ExperimentError(f"{str(error).rstrip('.')}. Possible modes with {size} ranks: {', '.join(fit)}") from None


def fits(mode: str, size: int, shape: Shape) -> bool:
    """Returns whether a mode has a grid of `size` ranks for samples of this shape."""
    try:
        grid_for(mode, size, shape, {})
    except GridError:
        return False
    return True
