"""A convolution without shared weights: every output position has filters of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn._torch_compat import DisableTorchFunction, own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError
from torchmn.functions.halo.global_array import GlobalArray
from torchmn.geometry import Window, all_owned
from torchmn.nn.layers.slices import SlicedModule
from torchmn.nn.local_filters.batch_last import batch_last, halo_of, in_order_of, sum_of_halos
from torchmn.nn.local_filters.pair import Size, count, pair
from torchmn.nn.local_filters.receptive_fields import decoded, outputs
from torchmn.nn.local_filters.tiling import Tiling
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.sharding import Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import nothing


class LocalFilter2d(nn.Module):
    """Each output unit is the product of a filter of its own with its receptive field; no two share weights.

    in_size: the (height, width) of the images, which fixes the number of filters
    padding: zeros around the image
    tied: `transpose` uses the filters themselves; otherwise `decoder_weight`, which starts as a copy of them

    weight: (out_height, out_width, out_maps, in_maps, kernel height, kernel width), so that `weight[row, column]` is
    the weight of the Conv2d that applies there; in memory, in_maps come last. bias: (out_height, out_width, out_maps).

    Filters start with a uniformly random direction and L2 norm 1. Beside its output, a pass takes the memory of a copy
    of the image and of a few rows of it unfolded.
    """

    weight: nn.Parameter
    decoder_weight: nn.Parameter | None

    def __init__(
        self,
        in_maps: int,
        out_maps: int,
        kernel: Size,
        stride: Size,
        in_size: Size,
        bias: bool = False,
        *,
        padding: Size = 0,
        tied: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_maps = count("LocalFilter2d", "in_maps", in_maps)
        self.out_maps = count("LocalFilter2d", "out_maps", out_maps)
        self.kernel = pair("LocalFilter2d", "kernel", kernel)
        self.stride = pair("LocalFilter2d", "stride", stride)
        self.padding = pair("LocalFilter2d", "padding", padding, least=0)
        self.in_size = pair("LocalFilter2d", "in_size", in_size)
        padded = self._padded_size()
        if padded[0] < self.kernel[0] or padded[1] < self.kernel[1]:
            raise ArgumentError(
                f"LocalFilter2d: a kernel of {self.kernel} does not fit into an image of {self.in_size} with padding "
                f"{self.padding}. Use a smaller kernel."
            )
        self.out_size = self._tiling(padded).positions
        positions = (*self.out_size, self.out_maps)
        filters = torch.empty(*positions, self.in_maps, *self.kernel, device=device, dtype=dtype)
        self.weight = nn.Parameter(maps_last(filters))
        self.decoder_weight = None if tied else nn.Parameter(self.weight.detach().clone())
        self.bias = nn.Parameter(torch.zeros(positions, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, out_maps, out_height, out_width) from x: (batch, in_maps, *in_size)."""
        x = self._checked(x, "forward", (self.in_maps, *self.in_size))
        (top, left) = self.padding
        return self.local(F.pad(x, (left, left, top, top)) if top or left else x)

    def transpose(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The decoder's image: every output unit puts its filter, times its value, where it took its input from.

        y: (batch, out_maps, *out_size). Gives (batch, in_maps, *in_size). With `tied`, the exact transpose of
        `forward` without bias.
        weight: filters to decode with in place of the layer's own, of the same shape
        """
        y = self._checked(y, "transpose", (self.out_maps, *self.out_size))
        (top, left), (height, width) = self.padding, self.in_size
        image = self.local_transpose(y, self._padded_size(), self.decoding_weight(weight))
        return image[:, :, top : top + height, left : left + width]

    def local(self, x: Tensor) -> Tensor:
        """The outputs of the filters that this layer holds, from images that contain their padding or halo."""
        y = outputs(batch_last(x), by_pixel(self.weight), self._tiling((x.shape[2], x.shape[3])))
        if self.bias is not None:
            y = y + self.bias.unsqueeze(3)
        return in_order_of(x, y)

    def local_transpose(self, y: Tensor, size: tuple[int, int], weight: Tensor) -> Tensor:
        """The transpose of `local` for images of `size`, which contains padding and halo."""
        return in_order_of(y, decoded(batch_last(y), by_pixel(weight), self._tiling(size)))

    @torch.no_grad()
    def unit_norm_(self) -> LocalFilter2d:
        """Divide every filter, the decoder's too, by its L2 norm; a filter of zeros stays as it is."""
        for weight in (self.weight, self.decoder_weight):
            if weight is not None:
                unit_norm_(weight)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random filters of norm 1; the decoder a copy of them; bias 0."""
        # Drawn in the order of the dims, not in that in memory: a seed means the same filters in either.
        self.weight.copy_(torch.empty_like(self.weight, memory_format=torch.contiguous_format).uniform_(-0.1, 0.1))
        unit_norm_(self.weight)
        if self.decoder_weight is not None:
            self.decoder_weight.copy_(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def slice_over(self, grid: Any) -> nn.Module:
        """This rank's part of the layer under halopar: the filters of its own tile's outputs."""

        return TiledLocalFilter2d.of(self, grid)

    def decoding_weight(self, weight: Tensor | None) -> Tensor:
        if weight is not None:
            return weight
        return self.weight if self.decoder_weight is None else self.decoder_weight

    def _padded_size(self) -> tuple[int, int]:
        return self.in_size[0] + 2 * self.padding[0], self.in_size[1] + 2 * self.padding[1]

    def _tiling(self, size: tuple[int, int]) -> Tiling:
        return Tiling(size, self.kernel, self.stride)

    def _checked(self, x: Tensor, operation: str, expected: tuple[int, int, int]) -> Tensor:
        """`x`, the whole of it: of a grid with one tile, or of maps that are cut, it is a ShardedTensor."""
        self.check_shape(x, operation, expected)
        return whole(x) if isinstance(x, ShardedTensor) else x

    def check_shape(self, x: Tensor, operation: str, expected: tuple[int, int, int]) -> None:
        if x.dim() != 4 or tuple(x.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise ArgumentError(
                f"LocalFilter2d.{operation}: expected (batch, {shape}), got {tuple(x.shape)}. Its filters belong to "
                f"positions: for images of another size it needs another in_size (now {self.in_size}).{self._hint()}"
            )

    def _hint(self) -> str:
        """What else may be wrong with an image of another size."""
        return ""

    def extra_repr(self) -> str:
        text = f"{self.in_maps}, {self.out_maps}, kernel={self.kernel}, stride={self.stride}, in_size={self.in_size}"
        text += f", bias={self.bias is not None}"
        if self.padding != (0, 0):
            text += f", padding={self.padding}"
        return text if self.decoder_weight is None else text + ", tied=False"


@torch.no_grad()
def unit_norm_(weight: Tensor) -> Tensor:
    """Divide every filter of a LocalFilter2d's `weight` by its L2 norm, in place; a filter of zeros stays as it is."""
    norm = torch.linalg.vector_norm(weight, dim=(3, 4, 5), keepdim=True)
    return weight.div_(norm.masked_fill_(norm == 0, 1))


def by_pixel(weight: Tensor) -> Tensor:
    """(row, column, out_map, kernel row, kernel column, map) from a LocalFilter2d's `weight`: a view."""
    return weight.permute(0, 1, 2, 4, 5, 3)


def from_by_pixel(filters: Tensor) -> Tensor:
    """The inverse of `by_pixel`."""
    return filters.permute(0, 1, 2, 5, 3, 4)


def maps_last(weight: Tensor) -> Tensor:
    """A `weight` of the same values, in memory in the order of `by_pixel`, in which it is multiplied with images."""
    return from_by_pixel(by_pixel(weight).contiguous())


Box = tuple[slice, slice]


class TiledLocalFilter2d(SlicedModule, LocalFilter2d):
    """`LocalFilter2d` of which this rank holds the filters of its own outputs. They never travel.

    weight: (own rows, own columns, out_maps, in_maps, kernel height, kernel width). `forward` fetches the halo of the
    images; `transpose` adds what it decodes into neighbours' tiles to them, and gets back what they decode into its
    own.
    """

    array: GlobalArray

    @staticmethod
    def of(layer: LocalFilter2d, grid: ProcessGrid) -> TiledLocalFilter2d:
        """This rank's filters of `layer`."""
        made: Any = TiledLocalFilter2d.in_place_of(layer, grid)
        windows = [
            Window(kernel, stride, (padding, padding))
            for kernel, stride, padding in zip(layer.kernel, layer.stride, layer.padding, strict=True)
        ]
        made.array = GlobalArray(grid, layer.in_size, windows, name="LocalFilter2d")
        made.cut_parameters = dict.fromkeys(name for name, _ in layer.named_parameters(recurse=False))
        for name, value in own_parameters(layer).items():
            mine = None if value is None else nn.Parameter(made.sliced(name, value.detach()), value.requires_grad)
            made.register_parameter(name, mine)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the outputs, from the sharded images."""
        self.check_shape(x, "forward", (self.in_maps, *self.in_size))
        mine, layout = self._opened(x, "forward")
        result = image_layout(self.grid, (mine.shape[0], self.out_maps, *self.out_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            buffer = self.fetched(mine)
            if self.weight.numel() == 0:
                return wrap(nothing(result.local_shape(), buffer, self.weight, self.bias), result)
            return wrap(_as(mine, self.local(buffer)), result)

    def transpose(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """This rank's part of the decoded images, from the sharded outputs."""
        self.check_shape(y, "transpose", (self.out_maps, *self.out_size))
        (mine, layout), decoder = self._opened(y, "transpose"), self.decoding_weight(weight)
        result = image_layout(self.grid, (mine.shape[0], self.in_maps, *self.in_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            if decoder.numel() == 0:
                image = nothing((mine.shape[0], self.in_maps, *self.array.plan.buffer_shape), mine, decoder)
            else:
                height, width = self.array.plan.buffer_shape
                image = self.local_transpose(mine, (height, width), decoder)
            return wrap(_as(mine, sum_of_halos(image, self.array.plan, self.grid.tiles)), result)

    def fetched(self, mine: Tensor) -> Tensor:
        """This rank's tile of the images with its halo and padding, in memory with the batch last."""
        return halo_of(mine, self.array.plan, self.grid.tiles)

    def sliced(self, name: str, whole: Tensor) -> Tensor:
        """This rank's filters, as memory of their own, of those of all positions."""
        mine = whole[self._boxes()[self.grid.tiles.rank]].clone()
        return mine if name == "bias" else maps_last(mine)

    def gathered(self, name: str, mine: Tensor) -> Tensor:
        """The filters of all positions; every rank of `grid.tiles` must call it."""
        whole = mine.new_empty((*self.out_size, *mine.shape[2:]))
        for box, part in zip(self._boxes(), self.grid.tiles.allgather(mine), strict=True):
            whole[box] = part.to(mine.device)
        return whole

    def _is_global(self, name: str, mine: Tensor, given: Tensor) -> bool:
        return tuple(given.shape[:2]) == self.out_size

    def _opened(self, x: Tensor, operation: str) -> tuple[Tensor, Sharding]:
        """What this rank holds of a ShardedTensor, and how the whole is cut."""
        if not isinstance(x, ShardedTensor):
            refuse(
                f"LocalFilter2d.{operation} holds the filters of one tile: expected a ShardedTensor, got a whole tensor"
            )
        return local(x), x.spec

    def _hint(self) -> str:
        shape = self.in_maps, *self.in_size
        return f" If each rank passed whole images, not tiles: parallelize(..., input_shape={shape}) tells them apart."

    def _boxes(self) -> list[Box]:
        """The output positions of each rank of `grid.tiles`, row by row."""
        rows, columns = (all_owned(n, p) for n, p in zip(self.out_size, self.grid.parts_of(2), strict=True))
        return [(row.as_slice(), column.as_slice()) for row in rows for column in columns]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {tuple(self.weight.shape[:2])} of {self.out_size} positions here"


def _as(x: Tensor, y: Tensor) -> Tensor:
    """`y` in the order in memory of `x`."""
    return in_order_of(x, batch_last(y))
