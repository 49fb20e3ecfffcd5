"""The model with each rank's part drawn: tiles of images with one rank's halo, slices of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.experiment.modes import CUTS_IMAGES
from torchmn.experiment.parallel import Placed
from torchmn.experiment.weighted import Shape, text
from torchmn.geometry import Interval, Window, owned
from torchmn.nn.slices import SlicedModule

SIDE = 104
"""Of a drawing, in pixels."""


@dataclass(frozen=True)
class Step:
    """A layer without layers inside, and the shapes of a sample before and after it."""

    name: str
    module: nn.Module
    before: Shape
    after: Shape


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


def model_table(serial: nn.Module, placed: Placed, shape: Shape) -> str:
    """A row for each layer: its name, what it is, the shape that comes out, and who holds which part."""
    rows = []
    for step in steps_of(serial, shape):
        weights = sum(parameter.numel() for parameter in step.module.parameters(recurse=False))
        rows.append(
            f"<tr><th>{escape(step.name or type(step.module).__name__)}</th><td>{escape(_words(step.module))}</td>"
            f"<td class='shape'>{text(step.after)}</td><td class='num'>{format(weights, ',') if weights else ''}</td>"
            f"<td>{_drawing(step, placed)}</td></tr>"
        )
    head = "<tr><th>layer</th><th></th><th>gives</th><th>weights</th><th>parts</th></tr>"
    return f'<div class="scroll"><table class="model">{head}{"".join(rows)}</table></div>'


def _words(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"[:90]


def _drawing(step: Step, placed: Placed) -> str:
    if placed.comm.size == 1 or placed.grid is None:
        return ""
    weighted = bool(list(step.module.parameters(recurse=False)))
    if placed.mode in CUTS_IMAGES and len(step.before) == 3:
        return _tiles(step, placed) if _windows(step.module) or weighted else ""
    part = _submodule(placed.model, step.name)
    if isinstance(part, SlicedModule):
        return _slices(part)
    return "" if not weighted else "<small>whole on every rank</small>"


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _tiles(step: Step, placed: Placed) -> str:
    """The layer's input, cut into tiles, and around one of them what it needs of its neighbours."""
    height, width = step.before[1:]
    rows, columns = placed.sizes["height"], placed.sizes["width"]
    scale = SIDE / max(height, width)
    parts = [f'<svg class="tiles" width="{SIDE + 2}" height="{height * scale + 2:.0f}" role="img">']
    for i in range(rows):
        for j in range(columns):
            y, x = owned(height, rows, i), owned(width, columns, j)
            parts.append(_box("tile", x, y, scale))
            place = f'x="{(x.start + len(x) / 2) * scale + 1:.1f}" y="{(y.start + len(y) / 2) * scale + 5:.1f}"'
            parts.append(f'<text class="tick" text-anchor="middle" {place}>{i * columns + j}</text>')
    windows = _windows(step.module)
    words = ""
    if windows and len(step.after) == 3:
        i, j = rows // 2, columns // 2  # a rank with neighbours on several sides, where there is one
        y = _clipped(windows[0].needed(owned(step.after[1], rows, i), height), height)
        x = _clipped(windows[1].needed(owned(step.after[2], columns, j), width), width)
        parts.append(_box("halo", x, y, scale))
        words = f"<br><small>dashed: what rank {i * columns + j} sees, {len(y)} x {len(x)}</small>"
    return "".join(parts) + "</svg>" + words


def _windows(module: nn.Module) -> tuple[Window, Window] | None:
    """The windows of a convolution or a pool along height and width."""
    kernel = getattr(module, "kernel_size", getattr(module, "kernel", None))
    if kernel is None:
        return None
    stride = getattr(module, "stride", None)
    stride = kernel if stride is None else stride
    padding, dilation = getattr(module, "padding", 0), getattr(module, "dilation", 1)
    if isinstance(padding, str) or isinstance(module, nn.modules.conv._ConvTransposeNd):
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


def _box(kind: str, x: Interval, y: Interval, scale: float) -> str:
    return (
        f'<rect class="{kind}" x="{x.start * scale + 1:.1f}" y="{y.start * scale + 1:.1f}" '
        f'width="{len(x) * scale:.1f}" height="{len(y) * scale:.1f}"/>'
    )


def _slices(part: SlicedModule) -> str:
    """Which share of its weights each rank holds."""
    name = "weight" if "weight" in part.cut_parameters else next(iter(part.cut_parameters), None)
    if name is None:
        return "<small>whole on every rank</small>"
    dim, share = part.cut_parameters[name][:2]
    counts = [len(share(rank)) for rank in range(part.grid.tiles.size)]
    total = max(sum(counts), 1)
    pieces = "".join(
        f'<i class="piece c{rank % 6}" style="width:{100 * count / total:.2f}%" title="rank {rank}: {count}">{rank}</i>'
        for rank, count in enumerate(counts)
    )
    what = "its inputs" if dim == 1 else "its outputs"
    return (
        f'<div class="slices">{pieces}</div><small>each rank holds the weights of a slice of {what}: {counts}</small>'
    )
