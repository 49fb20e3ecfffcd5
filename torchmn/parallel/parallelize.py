"""parallelize: returns a copy of an ordinary model that computes on a grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm, forward_hooks, forward_pre_hooks, gradient_hooks
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ParallelizeError, nearest
from torchmn.modes import ALIASES, BASIC_MODES
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.parallel.events import GUARDS, ModelEvent, announce
from torchmn.parallel.module import Parallelism
from torchmn.parallel.passes import model_pass
from torchmn.parallel.splitting import (
    LinearRecorder,
    LinearUse,
    UnsharedLayers,
    choose_splits,
    replace_module,
    swap_channel_layers,
    swap_linears,
)
from torchmn.parallel.summary import warn_of_replicated_modules
from torchmn.parallel.trace import compiled_modules, dry_run, explain
from torchmn.sharded.sharding import Samples, image_layout
from torchmn.sharded.tensor import wrap

# Sizes of square images that are tried if `input_shape` is not given, common ones first: the first that fits is taken.
_SIZES = (32, 28, 64, 96, 128, 224, 256, 227, 299, 512, *range(1, 300))
_IMAGE_LAYERS = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}
OUTPUTS = ("whole", "tile")

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    grid: ProcessGrid | Communicator,
    mode: str,
    *,
    input_shape: Sequence[int] | None = None,
    output: str = "whole",
) -> Model:
    """Returns a copy of `model` that computes on the ranks of `grid` what `model` computes on one rank.

    Collective: every rank must call it. The parameters are those of rank 0. The class and the keys of the state dict
    stay; `torchmn.full_state_dict(model)` returns the state dict of the model on one rank.

    Args:
        model: the model, with its parameters initialised. It is not changed.
        grid: the process grid. For a communicator, all ranks are arranged along `data` for "datapar", and as the
            squarest grid of tiles for "modelpar" and "halopar".
        mode: "datapar" (data parallel): each rank has different samples. "modelpar" or "vecpar" (tensor parallel):
            vectors and channels are cut over ranks, together with their weights. "halopar" (spatial parallel): images
            are cut into tiles. "halodatapar": tiles and samples, by the axes of the grid.
        input_shape: of one sample, without the batch dim: (channels, height, width). Needed if the model takes images
            that are not square and has a Linear after them. With images in tiles, forward takes this rank's tile or
            the whole image; `input_shape` is needed to distinguish them.
        output: "whole": outputs are gathered on every rank. "tile": a dense output stays cut, and its loss is computed
            with `torchmn.functions.global_mean`.

    Returns:
        The parallel model, of the same class.

    Raises:
        ArgumentError: on every rank, if an argument is wrong or differs between ranks.
        ParallelizeError: on every rank, before anything is computed, if a module cannot be computed on the grid with
            the numbers of one rank. The error names the module.
    """
    mode = ALIASES.get(mode, mode)
    GUARDS.load()
    comm = grid.comm if isinstance(grid, ProcessGrid) else grid
    problem = _problem(model, mode, output, input_shape) or _grid_problem(grid, mode)
    comm.agree("parallelize", problem, mode=mode, output=output, input_shape=str(input_shape))
    grid = _as_grid(grid, mode)
    copied: Any = _copy(model, comm)
    comm.bcast_data(copied)
    shape = tuple(input_shape) if input_shape is not None else None
    return _made_parallel(copied, Parallelism(grid, mode, BASIC_MODES[mode].cuts_images, output, shape))


def _made_parallel(copied: Any, parallelism: Parallelism) -> Any:
    """Returns the copy of the model, distributed over the ranks of the grid."""
    grid = parallelism.grid
    if parallelism.mode != "datapar":
        grid.comm.attempt("parallelize", lambda: _distribute(copied, parallelism), raises=ParallelizeError)
    copied.parallelism = parallelism
    copied.forward = MethodType(_forward, copied)
    parallelism.adopt(copied)  # must come before the first functional_call with other parameters
    if parallelism.cuts_images and grid.tile_count > 1:
        model_pass().prepare(copied)
    announce("model", ModelEvent(copied, parallelism))
    if grid.sizes["data"] > 1 and _has_batch_norm(copied):
        copied.gradients_cross_ranks = True
    warn_of_replicated_modules(copied)
    return copied


def _problem(model: object, mode: object, output: object, input_shape: Any) -> str | None:
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
            f"{', '.join(scripted)} is compiled (ScriptModule), so its torch functions cannot be traced. Pass the "
            "plain module"
        )
    compiled = compiled_modules(model)
    if compiled and (mode != "datapar" or compiled[0] == ""):
        names = ", ".join(name or "the model" for name in compiled)
        return (
            f"{names} is compiled (torch.compile), so its computation cannot be cut. Pass the plain module; "
            "torch.compile(parallelize(...)) works, and compiles the code around the parallel model"
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
            f"{', '.join(hooked)} has a hook on its gradient, which is not copied, and in backward ranks have only "
            "contributions to gradients. Change p.grad between optimizer.synchronize() and optimizer.step()"
        )
    if input_shape is not None and not all(isinstance(extent, int) for extent in input_shape):
        return f"expected input_shape to be ints, (channels, height, width), got {input_shape!r}"
    return None


def _grid_problem(grid: ProcessGrid | Communicator, mode: str) -> str | None:
    if not isinstance(grid, ProcessGrid):
        if mode == "halodatapar":
            return (
                "halodatapar needs a ProcessGrid, which determines how many ranks share an image: "
                "ProcessGrid(comm, data=2, height=2)"
            )
        return None
    if mode == "datapar" and grid.tile_count > 1:
        return f"datapar uses the axis data only, got {grid!r}. Use mode='halodatapar'"
    if mode == "halopar" and grid.sizes["data"] > 1:
        return f"halopar does not use the axis data, got {grid!r}. Use mode='halodatapar'"
    return None


def _as_grid(grid: ProcessGrid | Communicator, mode: str) -> ProcessGrid:
    """Returns the default grid of a communicator: all ranks along data, or the squarest grid of tiles."""
    if isinstance(grid, ProcessGrid):
        return grid
    if mode == "datapar":
        return ProcessGrid(grid, data=grid.size)
    return ProcessGrid.squarest(grid)


def _copy(model: nn.Module, comm: Communicator) -> nn.Module:
    """Returns a deep copy; raises a ParallelizeError on every rank if it fails on one."""
    copies: list[nn.Module] = []

    def work() -> None:
        try:
            copies.append(copy_with_computed_weights(model))
        except Exception as error:
            raise ParallelizeError(
                f"the model cannot be copied: {error}. It may hold a result of a forward (call parallelize before "
                "it), or an object that deepcopy cannot copy, such as a TorchScript function"
            ) from error

    comm.attempt("parallelize", work, raises=ParallelizeError)
    return copies[0]


def copy_with_computed_weights(model: nn.Module) -> Any:
    """Returns a deep copy of a model whose weights may be computed by hooks, as with torch.nn.utils.weight_norm.

    deepcopy refuses tensors with a graph; here they are detached, since the hooks compute them again in every forward.
    """
    memo: dict[int, Any] = {}  # of deepcopy: id of an object -> its copy
    for module in model.modules():
        if any(type(hook).__module__.startswith("torch.nn.utils") for hook in forward_pre_hooks(module).values()):
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    memo[id(value)] = deepcopy(value.detach(), memo)
    return deepcopy(model, memo)


@uncompiled
def _forward(model: Any, /, *args: Any, **kwargs: Any) -> Any:
    return model.parallelism.run(model, args, kwargs)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, BatchNorm) for m in model.modules())


def _distribute(model: nn.Module, parallelism: Parallelism) -> None:
    """Replaces layers by this rank's slices of them, and finds the role of every parameter, in dry runs."""
    shapes = [parallelism.input_shape] if parallelism.input_shape is not None else candidate_shapes(model)
    failure: Exception | None = None
    for shape in shapes:
        if shape is None or not _runs_on_one_rank(model, shape):
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
        raise explain(failure) from (None if isinstance(failure, ParallelizeError) else failure)
    if parallelism.input_shape is not None:
        _raise_error_of_model(model, parallelism.input_shape)
    # No shape fits, for example because the model has several inputs: layers are replaced without a dry run, and roles
    # are found before the first forward.
    if parallelism.mode == "modelpar" and parallelism.grid.tiles.size > 1:
        swap_channel_layers(model, parallelism.grid)
        unshared = UnsharedLayers(model)
        linears = [LinearUse(layer, calls=1) for layer in _linears(model) if layer in unshared]
        swap_linears(model, parallelism.grid, [(use, "input") for use in linears])


def _split(model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...]) -> None:
    """Replaces layers by this rank's slices of them."""
    grid = parallelism.grid
    if grid.tiles.size == 1:
        return
    if parallelism.mode == "modelpar":
        swap_channel_layers(model, grid)
    for name, module in list(model.named_modules()):
        slice_over: Any = getattr(module, "slice_over", None)  # a method of layers such as LocalFilter2d
        if parallelism.cuts_images and slice_over is not None and not isinstance(module, SlicedModule):
            if not name:
                raise ParallelizeError(
                    f"the model is one {type(module).__name__}, of which each rank would hold a slice, and a slice "
                    "cannot replace the model itself. Put it into one: nn.Sequential(layer)"
                )
            replace_module(model, name, slice_over(grid))
    uses = {id(layer): LinearUse(layer) for layer in _linears(model)}
    if not uses:
        return
    order = _record_linears(model, parallelism, shape, uses)
    unshared = UnsharedLayers(model)
    swap_linears(model, grid, [pair for pair in choose_splits(order) if pair[0].layer in unshared])


def _linears(model: nn.Module) -> list[nn.Linear]:
    """Returns the Linear layers that may be replaced: those without hooks, which may compute the weight."""
    found = [module for module in model.modules() if type(module) is nn.Linear]
    return [layer for layer in found if not forward_hooks(layer) and not forward_pre_hooks(layer)]


def _record_linears(
    model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...], uses: dict[int, LinearUse]
) -> list[LinearUse]:
    """Returns the uses of Linear layers in the order in which a dry run calls them."""
    weights: dict[int, LinearUse] = {}
    recorder = LinearRecorder(weights)

    def forward(*args: Any) -> Any:
        weights.update({id(use.layer.weight): use for use in uses.values()})
        with recorder:
            return type(model).forward(model, *args)

    args, _ = _inputs(model, parallelism, shape)
    dry_run(model, forward, args, {})
    return recorder.order


def candidate_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Returns shapes of one sample that the first layer of `model` could take: a vector, or square images by size."""
    for module in model.modules():
        dims = next((dims for kind, dims in _IMAGE_LAYERS.items() if isinstance(module, kind)), None)
        if dims is not None:
            sizes = _SIZES if dims < 3 else tuple(size for size in _SIZES if size <= 64)
            return [(cast(Any, module).in_channels, *[size] * dims) for size in sizes]
        if isinstance(module, nn.Linear):
            return [(module.in_features,)]
        if isinstance(module, nn.Embedding):
            return [(8,)]
        maps, size = getattr(module, "in_maps", None), getattr(module, "in_size", None)
        if maps is not None and size is not None:  # local filters have a fixed image size
            return [(maps, *([size] * 2 if isinstance(size, int) else size))]
    return []


def input_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of the inputs of a model: int64 if it begins with an embedding, else that of its parameters."""
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        return torch.int64
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _inputs(model: nn.Module, parallelism: Parallelism, shape: tuple[int, ...]) -> tuple[tuple, Samples]:
    """Returns a meta tensor as input, with two samples, so that batch statistics exist."""
    batch = 2
    samples = Samples(0, batch)
    dtype = input_dtype(model)
    if not parallelism.cuts_images or len(shape) < 2:
        return (torch.empty((batch, *shape), dtype=dtype, device="meta"),), samples
    layout = image_layout(parallelism.grid, (batch, *shape), samples)
    return (wrap(torch.empty(layout.local_shape(), dtype=dtype, device="meta"), layout),), samples


def _dry_run_on_one_rank(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.empty((2, *shape), dtype=input_dtype(model), device="meta")
    dry_run(model, lambda *args: type(model).forward(model, *args), (x,), {})


def _runs_on_one_rank(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the model takes samples of this shape on one rank."""
    try:
        _dry_run_on_one_rank(model, shape)
    except Exception:
        return False
    return True


def _raise_error_of_model(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raises the error that the model itself raises for samples of this shape."""
    try:
        _dry_run_on_one_rank(model, shape)
    except Exception as error:
        raise explain(error) from error


def _is_too_small(error: Exception) -> bool:
    """Whether the error may not occur for a larger image: more ranks than rows, or a window larger than the image."""
    return "smaller than the window" in str(error) or "rows" in str(error)


__all__ = ["parallelize"]
