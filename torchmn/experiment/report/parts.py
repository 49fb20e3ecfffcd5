"""The model with each rank's part, for templates/model.html: tiles with one rank's halo, slices of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.experiment.run.parallel import Placed
from torchmn.experiment.vocabulary.layers.options import Shape, text
from torchmn.geometry import Interval, Window, owned
from torchmn.modes import mode_of
from torchmn.nn.layers.slices import SlicedModule

SIDE = 104
"""Of a drawing, in pixels."""


@dataclass(frozen=True)
class Step:
    """A layer without layers inside, and the shapes of a sample before and after it."""

    name: str
    module: nn.Module
    before: Shape
    after: Shape


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
    """A layer's input, cut into tiles, and what one rank needs of it."""

    width: float
    height: float
    tiles: list[Box]
    rank: int = 0
    halo: Box | None = None
    seen: str = ""


@dataclass(frozen=True)
class Slices:
    """How many of a layer's inputs or outputs each rank has the weights of."""

    of: str
    counts: list[int]


@dataclass
class LayerRow:
    """A layer: its name, what it is, the shape that it gives, and which part of it each rank holds."""

    name: str
    description: str
    gives: str
    weights: int
    tiles: TileDrawing | None = None
    slices: Slices | None = None
    is_whole: bool = False


@torch.no_grad()
def steps_of(model: nn.Module, shape: Shape) -> list[Step]:
    """What a sample goes through, found by sending one through."""
    found: list[Step] = []
    hooks = []

    def note(name: str):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                found.append(Step(name, module, tuple(args[0].shape[1:]), tuple(output.shape[1:])))

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(note(name)))
    try:
        parameter = next(model.parameters(), torch.zeros(()))
        model.eval()(torch.zeros(1, *shape, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def model_rows(serial: nn.Module, placed: Placed, shape: Shape) -> list[LayerRow]:
    """The layers of a model, which is given as on one rank, with the parts that ranks hold of it."""
    return [_row(step, placed) for step in steps_of(serial, shape)]


def _row(step: Step, placed: Placed) -> LayerRow:
    module = step.module
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    description = f"{type(module).__name__}({module.extra_repr()})"[:90]
    row = LayerRow(step.name or type(module).__name__, description, text(step.after), weights)
    if placed.comm.size == 1 or placed.grid is None:
        return row
    weighted = bool(list(module.parameters(recurse=False)))
    if mode_of(placed.mode).cuts_images and len(step.before) == 3:
        row.tiles = _tiles(step, placed) if _windows(module) or weighted else None
        return row
    part = _submodule(placed.model, step.name)
    row.slices = _slices(part) if isinstance(part, SlicedModule) else None
    row.is_whole = row.slices is None and (weighted or isinstance(part, SlicedModule))
    return row


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _tiles(step: Step, placed: Placed) -> TileDrawing:
    """The layer's input, cut into tiles, and around one of them what it needs of its neighbours."""
    height, width = step.before[1:]
    rows, columns = placed.sizes["height"], placed.sizes["width"]
    scale = SIDE / max(height, width)
    boxes = [
        Box.of(owned(width, columns, j), owned(height, rows, i), scale) for i in range(rows) for j in range(columns)
    ]
    drawing = TileDrawing(SIDE + 2, height * scale + 2, boxes)
    windows = _windows(step.module)
    if windows and len(step.after) == 3:
        i, j = rows // 2, columns // 2  # a rank with neighbours on several sides, where there is one
        y = _clipped(windows[0].needed(owned(step.after[1], rows, i), height), height)
        x = _clipped(windows[1].needed(owned(step.after[2], columns, j), width), width)
        drawing.rank, drawing.halo, drawing.seen = i * columns + j, Box.of(x, y, scale), f"{len(y)} x {len(x)}"
    return drawing


def _windows(module: nn.Module) -> tuple[Window, Window] | None:
    """The windows of a convolution or a pool along height and width."""
    kernel = getattr(module, "kernel_size", getattr(module, "kernel", None))
    if kernel is None:
        return None
    stride = getattr(module, "stride", None)
    stride = kernel if stride is None else stride
    padding, dilation = getattr(module, "padding", 0), getattr(module, "dilation", 1)
    if isinstance(padding, str) or isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return None
    if not all(_is_extent(value) for value in (kernel, stride, padding, dilation)):
        return None  # a user's own module, to which `kernel` is something else
    values = [_pair(value) for value in (kernel, stride, padding, dilation)]
    rows, columns = zip(*values, strict=True)
    return tuple(Window(k, s, (p, p), d) for k, s, p, d in (rows, columns))  # type: ignore[return-value]


def _is_extent(value: Any) -> bool:
    sides = value if isinstance(value, tuple | list) else [value]
    return bool(sides) and all(isinstance(side, int) for side in sides)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[-1])) if isinstance(value, tuple | list) else (int(value), int(value))


def _clipped(interval: Interval, extent: int) -> Interval:
    return Interval(max(interval.start, 0), min(max(interval.stop, 0), extent))


def _slices(part: SlicedModule) -> Slices | None:
    """Which share of its weights each rank holds; None if all of them hold all."""
    name = "weight" if "weight" in part.cut_parameters else next(iter(part.cut_parameters), None)
    if name is None:
        return None
    dim, share = part.cut_parameters[name][:2]
    counts = [len(share(rank)) for rank in range(part.grid.tiles.size)]
    return Slices("inputs" if dim == 1 else "outputs", counts)
