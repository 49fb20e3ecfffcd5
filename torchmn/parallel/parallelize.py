"""parallelize: an ordinary model in, the same model on a grid of ranks out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm, forward_hooks, forward_pre_hooks, gradient_hooks
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ParallelizeError, nearest
from torchmn.modes import ALIASES, BASIC_MODES
from torchmn.nn.layers.slices import SlicedModule
from torchmn.parallel.events import GUARDS, Model, announce
from torchmn.parallel.module import Parallelism
from torchmn.parallel.passes import model_pass
from torchmn.parallel.splitting import (
    LayersOfTheirOwn,
    LinearUse,
    LinearWatch,
    choose_splits,
    replace_module,
    swap_channel_layers,
    swap_linears,
)
from torchmn.parallel.summary import warn_of_whole_modules
from torchmn.parallel.trace import compiled_modules, dry_run, explained
from torchmn.sharded.sharding import Samples, image_layout
from torchmn.sharded.tensor import wrap

# Sizes that data sets have come first: the first that fits wins.
_SIZES = (32, 28, 64, 96, 128, 224, 256, 227, 299, 512, *range(1, 300))
_IMAGE_LAYERS = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


def candidates(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of one sample that the first layer of `model` could take: a vector's, or a square image's in each size."""
    for module in model.modules():
        dims = next((dims for kind, dims in _IMAGE_LAYERS.items() if isinstance(module, kind)), None)
        if dims is not None:
            sizes = _SIZES if dims < 3 else tuple(size for size in _SIZES if size <= 64)
            return [(module.in_channels, *[size] * dims) for size in sizes]  # type: ignore[list-item]
        if isinstance(module, nn.Linear):
            return [(module.in_features,)]
        if isinstance(module, nn.Embedding):
            return [(8,)]
        takes_image = getattr(module, "in_maps", None), getattr(module, "in_size", None)
        if None not in takes_image:  # a local filter knows its image
            maps, size = takes_image
            return [(maps, *([size] * 2 if isinstance(size, int) else size))]  # type: ignore[list-item, misc]
    return []


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the inputs of a model: indices where it begins with an embedding, else what it computes in."""
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        return torch.int64
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def copy_with_computed_weights(model: nn.Module) -> Any:
    """Returns a deep copy of a model: torch copies no result of a computation, and these will be computed anew."""
    memo: dict[int, Any] = {}  # of deepcopy: by id, what stands for an object in the copy
    for module in model.modules():
        if any(type(hook).__module__.startswith("torch.nn.utils") for hook in forward_pre_hooks(module).values()):
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    memo[id(value)] = deepcopy(value.detach(), memo)
    return deepcopy(model, memo)


OUTPUTS = ("whole", "tile")


def parallelize(
    model: nn.Module,
    grid: ProcessGrid | Communicator,
    mode: str,
    *,
    input_shape: Sequence[int] | None = None,
    output: str = "whole",
) -> nn.Module:
    """A copy of `model` that computes on the ranks of `grid` what `model` computes on one. Every rank must call it.

    mode: "datapar" each rank has samples of its own; "modelpar" (or "vecpar") vectors and channels are cut over ranks;
        "halopar" images are cut into tiles; "halodatapar" both tiles and samples, by the axes of the grid
    input_shape: of one sample, without the batch dim: (channels, height, width). Needed where the model takes images
        that are not square and has a Linear behind them.
    output: "whole" on every rank, or "tile": a dense output stays cut, its loss goes through functions.global_mean

    The parameters are rank 0's. The class and the keys of the state dict stay; `torchmn.full_state_dict(model)` is
    the serial one. Under halopar the input is this rank's tile, or the whole image. What can not be computed in parts
    with the numbers of one rank is refused, naming the module, before anything is computed.
    """
    mode = ALIASES.get(mode, mode)
    GUARDS.load()
    comm = grid.comm if isinstance(grid, ProcessGrid) else grid
    problem = _problem(model, mode, output, input_shape) or _grid_problem(grid, mode)
    comm.agree("parallelize", problem, mode=mode, output=output, input_shape=str(input_shape))
    grid = _as_grid(grid, mode)
    copied = _copy(model, comm)
    comm.bcast_data(copied)
    shape = tuple(input_shape) if input_shape is not None else None
    parallelism = Parallelism(grid, mode, BASIC_MODES[mode].cuts_images, output, shape)
    if mode != "datapar":
        comm.attempt("parallelize", lambda: _distribute(copied, parallelism), raises=ParallelizeError)
    copied.parallelism = parallelism  # type: ignore[assignment]
    copied.forward = MethodType(_forward, copied)
    parallelism.adopt(copied)  # before anybody can call it with other parameters (functional_call)
    if parallelism.cuts_images and grid.tile_count > 1:
        model_pass().prepare(copied)
    announce("model", Model(copied, parallelism))
    if grid.sizes["data"] > 1 and _has_batch_norm(copied):
        copied.gradients_cross_ranks = True  # type: ignore[assignment]
    warn_of_whole_modules(copied)
    return copied


def _copy(model: nn.Module, comm: Communicator) -> nn.Module:
    """A deep copy; an error on every rank if one of them can not make it."""
    copies: list[nn.Module] = []

    def work() -> None:
        try:
            copies.append(copy_with_computed_weights(model))
        except Exception as error:
            raise ParallelizeError(
                f"the model can not be copied: {error}. It may hold a result of a forward (call parallelize before "
                "it), or something that no process can copy, such as a TorchScript function"
            ) from error

    comm.attempt("parallelize", work, raises=ParallelizeError)
    return copies[0]


@uncompiled
def _forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return model.parallelism.run(model, args, kwargs)  # type: ignore[operator, union-attr]


def _problem(model: object, mode: object, output: object, input_shape: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"expected a torch.nn.Module, got {type(model).__name__}"
    if mode not in BASIC_MODES:
        return f"expected a mode, got {mode!r}. {nearest(mode, (*BASIC_MODES, *ALIASES))}"
    if output not in OUTPUTS:
        return f"expected output to be one of {', '.join(OUTPUTS)}, got {output!r}"
    if hasattr(model, "parallelism"):
        return "the model is parallel already"
    scripted = [name or "the model" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        return (
            f"{', '.join(scripted)} is compiled (ScriptModule): what it computes can not be seen. Pass the plain module"
        )
    compiled = compiled_modules(model)
    if compiled and (mode != "datapar" or compiled[0] == ""):
        names = ", ".join(name or "the model" for name in compiled)
        return (
            f"{names} is compiled (torch.compile), and what it computes can not be cut. Pass the plain module; "
            "torch.compile(parallelize(...)) works, and compiles what lies around the parallel model"
        )
    if "forward" in vars(model):
        return (
            f"{type(model).__name__}.forward was replaced on this object, and parallelize runs that of its class. "
            "Write a class with this forward, or wrap the model in a module that calls it"
        )
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        return f"expected initialised parameters, got lazy {', '.join(lazy)}: run a forward pass first"
    hooked = [name for name, p in model.named_parameters() if any(gradient_hooks(p))]
    if hooked:
        return (
            f"{', '.join(hooked)} has a hook on its gradient, which a copy of the model does not have; and ranks hold "
            "shares of gradients. Change p.grad between optimizer.synchronize() and optimizer.step()"
        )
    if input_shape is not None and not all(isinstance(extent, int) for extent in input_shape):  # type: ignore[attr-defined]
        return f"expected input_shape to be ints, (channels, height, width), got {input_shape!r}"
    return None


def _as_grid(grid: ProcessGrid | Communicator, mode: str) -> ProcessGrid:
    """A grid for a communicator: all its ranks along data, or as the squarest grid of tiles."""
    if isinstance(grid, ProcessGrid):
        return grid
    if mode == "datapar":
        return ProcessGrid(grid, data=grid.size)
    return ProcessGrid.squarest(grid)


def _grid_problem(grid: ProcessGrid | Communicator, mode: str) -> str | None:
    if not isinstance(grid, ProcessGrid):
        if mode == "halodatapar":
            return (
                "halodatapar needs a ProcessGrid, to know how many ranks share an image: "
                "ProcessGrid(comm, data=2, height=2)"
            )
        return None
    if mode == "datapar" and grid.tile_count > 1:
        return f"datapar uses the axis data only, got {grid!r}. Use mode='halodatapar'"
    if mode == "halopar" and grid.sizes["data"] > 1:
        return f"halopar does not use the axis data, got {grid!r}. Use mode='halodatapar'"
    return None


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, BatchNorm) for m in model.modules())


def _distribute(model: nn.Module, parallelism: Parallelism) -> None:
    """Swap layers for this rank's slices, and learn the role of every parameter, by runs without values."""
    shapes = [parallelism.input_shape] if parallelism.input_shape is not None else candidates(model)
    failure: Exception | None = None
    for shape in shapes:
        if shape is None or not _runs_serially(model, shape):
            continue
        try:
            _split(model, parallelism, shape)
            args, samples = _inputs(model, parallelism, shape)
            parallelism.learn_roles(model, args, {}, samples, samples.total)
            return
        except Exception as error:
            failure = failure or error
            if parallelism.input_shape is not None or not _is_too_small(error):
                break
    if failure is not None:
        raise explained(failure) from (None if isinstance(failure, ParallelizeError) else failure)
    if parallelism.input_shape is not None:
        _inputs_serial_error(model, parallelism.input_shape)
    # No shape fits (several inputs, say): what needs no knowledge of the run is done, the rest at the first forward.
    if parallelism.mode == "modelpar" and parallelism.grid.tiles.size > 1:
        swap_channel_layers(model, parallelism.grid)
        own = LayersOfTheirOwn(model)
        linears = [LinearUse(layer, calls=1) for layer in _linears(model) if layer in own]
        swap_linears(model, parallelism.grid, [(use, "input") for use in linears])


def _split(model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...]) -> None:
    grid = parallelism.grid
    if grid.tiles.size == 1:
        return
    if parallelism.mode == "modelpar":
        swap_channel_layers(model, grid)
    for name, module in list(model.named_modules()):
        slice_over: Any = getattr(module, "slice_over", None)  # a layer that knows how to cut itself
        if parallelism.cuts_images and slice_over is not None and not isinstance(module, SlicedModule):
            if not name:
                raise ParallelizeError(
                    f"the model is one {type(module).__name__}, of which each rank would hold a slice, and a slice can "
                    "not take the place of a model. Put it into one: nn.Sequential(layer)"
                )
            replace_module(model, name, slice_over(grid))
    uses = {id(layer): LinearUse(layer) for layer in _linears(model)}
    if not uses:
        return
    watch = _watch_linears(model, parallelism, shape, uses)
    own = LayersOfTheirOwn(model)
    swap_linears(model, grid, [pair for pair in choose_splits(watch.order) if pair[0].layer in own])


def _linears(model: nn.Module) -> list[nn.Linear]:
    """Those that may be swapped: a hook would be left behind, and may compute the weight (pruning, weight_norm)."""
    found = [module for module in model.modules() if type(module) is nn.Linear]
    return [layer for layer in found if not forward_hooks(layer) and not forward_pre_hooks(layer)]


def _watch_linears(
    model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...], uses: dict[int, LinearUse]
) -> LinearWatch:
    weights: dict[int, LinearUse] = {}
    watch = LinearWatch(weights)

    def forward(*args: Any) -> Any:
        weights.update({id(use.layer.weight): use for use in uses.values()})
        with watch:
            return type(model).forward(model, *args)

    args, _ = _inputs(model, parallelism, shape)
    dry_run(model, forward, args, {})
    return watch


def _inputs(model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...]) -> tuple[tuple, Samples]:
    """An input without values: two samples, so that batch statistics exist."""
    batch = 2
    samples = Samples(0, batch)
    dtype = dtype_of(model)
    if not parallelism.cuts_images or len(shape) < 2:
        return (torch.empty((batch, *shape), dtype=dtype, device="meta"),), samples
    layout = image_layout(parallelism.grid, (batch, *shape), samples)
    return (wrap(torch.empty(layout.local_shape(), dtype=dtype, device="meta"), layout),), samples


def _runs_serially(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the model takes samples of this shape on one rank."""
    x = torch.empty((2, *shape), dtype=dtype_of(model), device="meta")
    try:
        dry_run(model, lambda *args: type(model).forward(model, *args), (x,), {})
    except Exception:
        return False
    return True


def _inputs_serial_error(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise what the model itself says of an input_shape that it does not take."""
    x = torch.empty((2, *shape), dtype=dtype_of(model), device="meta")
    try:
        dry_run(model, lambda *args: type(model).forward(model, *args), (x,), {})
    except Exception as error:
        raise explained(error) from error


def _is_too_small(error: Exception) -> bool:
    """Whether a larger image might do: more ranks than rows, or a window larger than the image."""
    return "smaller than the window" in str(error) or "rows" in str(error)


__all__ = ["parallelize"]
