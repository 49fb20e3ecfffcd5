"""Table of a model's layers for templates/layer_table.html: shapes, weights, and the tiles or slices of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.experiment.run.parallel import PlacedModel
from torchmn.experiment.vocabulary.layers.options import Shape, format_shape
from torchmn.geometry import Interval, Window, owned
from torchmn.modes import mode_of
from torchmn.nn.layers.sliced_module import SlicedModule

SIDE = 76
"""Longer side of a drawing, in pixels."""


@dataclass(frozen=True)
class TracedLayer:
    """A module without submodules, and the shapes of a sample before and after it."""

    name: str
    module: nn.Module
    input: Shape
    output: Shape


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float

    @classmethod
    def of(cls, x: Interval, y: Interval, scale: float) -> Box:
        return cls(x.start * scale + 1, y.start * scale + 1, len(x) * scale, len(y) * scale)


@dataclass
class TileDrawing:
    """The tiles of a layer's input, and one rank's tile with its halo."""

    width: float
    height: float
    tiles: list[Box]
    rank: int = 0
    halo: Box | None = None
    halo_size: str = ""


@dataclass(frozen=True)
class Slices:
    """The number of inputs or outputs (`of`) whose weights each rank holds."""

    of: str
    counts: list[int]


@dataclass
class LayerRow:
    """One row of the table."""

    name: str
    description: str
    output: str
    weights: int
    tiles: int | None = None
    """Number of a drawing of the table."""
    slices: Slices | None = None
    is_replicated: bool = False


@dataclass
class LayerTable:
    """The table. Layers whose inputs are cut in the same way share a drawing. `is_parallel`: on several ranks."""

    is_parallel: bool
    rows: list[LayerRow] = field(default_factory=list)
    drawings: list[TileDrawing] = field(default_factory=list)

    def number_of(self, drawing: TileDrawing) -> int:
        """Returns the number of this drawing, which is added if there is no such drawing yet."""
        if drawing not in self.drawings:
            self.drawings.append(drawing)
        return self.drawings.index(drawing)


@torch.no_grad()
def trace_layers(model: nn.Module, shape: Shape) -> list[TracedLayer]:
    """Returns the layers in the order in which a sample of this shape passes through them."""
    found: list[TracedLayer] = []
    hooks = []

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                found.append(TracedLayer(name, module, tuple(args[0].shape[1:]), tuple(output.shape[1:])))

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(record(name)))
    try:
        parameter = next(model.parameters(), torch.zeros(()))
        model.eval()(torch.zeros(1, *shape, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def layer_table(serial: nn.Module, placed: PlacedModel, shape: Shape) -> LayerTable:
    """Returns the table.

    Args:
        serial: the model as on one rank.
        placed: the same model in its mode.
        shape: of a sample.
    """
    table = LayerTable(placed.comm.size > 1 and placed.grid is not None)
    table.rows = [_row(layer, placed, table) for layer in trace_layers(serial, shape)]
    return table


def _row(layer: TracedLayer, placed: PlacedModel, table: LayerTable) -> LayerRow:
    module = layer.module
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    description = f"{type(module).__name__}({module.extra_repr()})"[:90]
    row = LayerRow(layer.name or type(module).__name__, description, format_shape(layer.output), weights)
    if not table.is_parallel:
        return row
    has_weights = bool(list(module.parameters(recurse=False)))
    if mode_of(placed.mode).cuts_images and len(layer.input) == 3:
        row.tiles = table.number_of(_tiles(layer, placed)) if _windows(module) or has_weights else None
        return row
    local = _submodule(placed.model, layer.name)
    row.slices = _slices(local) if isinstance(local, SlicedModule) else None
    row.is_replicated = row.slices is None and (has_weights or isinstance(local, SlicedModule))
    return row


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _tiles(layer: TracedLayer, placed: PlacedModel) -> TileDrawing:
    height, width = layer.input[1:]
    rows, columns = placed.sizes["height"], placed.sizes["width"]
    scale = SIDE / max(height, width)
    boxes = [
        Box.of(owned(width, columns, j), owned(height, rows, i), scale) for i in range(rows) for j in range(columns)
    ]
    drawing = TileDrawing(SIDE + 2, height * scale + 2, boxes)
    windows = _windows(layer.module)
    if windows and len(layer.output) == 3:
        i, j = rows // 2, columns // 2  # a rank with neighbours on as many sides as possible
        y = _clipped(windows[0].needed(owned(layer.output[1], rows, i), height), height)
        x = _clipped(windows[1].needed(owned(layer.output[2], columns, j), width), width)
        drawing.rank, drawing.halo, drawing.halo_size = i * columns + j, Box.of(x, y, scale), f"{len(y)} x {len(x)}"
    return drawing


def _windows(module: nn.Module) -> tuple[Window, Window] | None:
    """Returns the windows of a convolution or pooling along height and width; None for other modules."""
    kernel = getattr(module, "kernel_size", getattr(module, "kernel", None))
    if kernel is None:
        return None
    stride = getattr(module, "stride", None)
    stride = kernel if stride is None else stride
    padding, dilation = getattr(module, "padding", 0), getattr(module, "dilation", 1)
    if isinstance(padding, str) or isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return None
    if not all(_is_extent(value) for value in (kernel, stride, padding, dilation)):
        return None  # a user's module with another meaning of `kernel`
    values = [_pair(value) for value in (kernel, stride, padding, dilation)]

    def window(index: int) -> Window:
        k, s, p, d = (value[index] for value in values)
        return Window(k, s, (p, p), d)

    return window(0), window(1)


def _is_extent(value: Any) -> bool:
    sides = value if isinstance(value, tuple | list) else [value]
    return bool(sides) and all(isinstance(side, int) for side in sides)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[-1])) if isinstance(value, tuple | list) else (int(value), int(value))


def _clipped(interval: Interval, extent: int) -> Interval:
    return Interval(max(interval.start, 0), min(max(interval.stop, 0), extent))


def _slices(module: SlicedModule) -> Slices | None:
    """Returns the slices of the weights of each rank; None if they are replicated."""
    name = "weight" if "weight" in module.sliced_parameters else next(iter(module.sliced_parameters), None)
    if name is None:
        return None
    dim, share = module.sliced_parameters[name][:2]
    counts = [len(share(rank)) for rank in range(module.grid.tiles.size)]
    return Slices("inputs" if dim == 1 else "outputs", counts)
