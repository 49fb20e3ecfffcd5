"""LocalFilter2d: a convolution without shared weights, on one rank and, as TiledLocalFilter2d, on tiles.

Every output position has different filters. On a grid of tiles each rank holds the filters of its outputs.
"""

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
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.nn.local_filters.batch_last import batch_last, halo_of, in_order_of, sum_of_halos
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.nn.local_filters.image_sizes import Size, count, pair
from torchmn.nn.local_filters.receptive_fields import decoded, outputs
from torchmn.sharded.redistribute import gathered
from torchmn.sharded.refusals import refuse
from torchmn.sharded.sharding import Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import empty_with_graph


class LocalFilter2d(nn.Module):
    """A convolution whose filters differ at every position (locally connected layer).

    Filters are initialised with a uniformly random direction and L2 norm 1. Besides its output, a forward needs memory
    for a copy of the image and for a few rows of unfolded fields.

    Args:
        in_maps: number of maps of the input.
        out_maps: number of maps of the output.
        kernel: size of the filters.
        stride: distance between filters.
        in_size: (height, width) of the images, which determines the number of filters.
        bias: whether each output has a bias.
        padding: zeros around the image.
        tied: whether `transpose` uses the filters themselves, or else `decoder_weight`, initialised as a copy of them.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: (out_height, out_width, out_maps, in_maps, kernel height, kernel width): `weight[row, column]` is the
            weight of an equivalent Conv2d at that position. In memory, in_maps are last.
        decoder_weight: the same shape, or None if tied.
        bias: (out_height, out_width, out_maps), or None.
        out_size: (out_height, out_width).

    Raises:
        ArgumentError: if an argument is wrong, or the kernel is larger than the padded image.
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
        self.out_size = self._field_grid(padded).positions
        positions = (*self.out_size, self.out_maps)
        filters = torch.empty(*positions, self.in_maps, *self.kernel, device=device, dtype=dtype)
        self.weight = nn.Parameter(maps_last(filters))
        self.decoder_weight = None if tied else nn.Parameter(self.weight.detach().clone())
        self.bias = nn.Parameter(torch.zeros(positions, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, out_maps, out_height, out_width) from x: (batch, in_maps, *in_size)."""
        x = self._checked(x, "forward", (self.in_maps, *self.in_size))
        (top, left) = self.padding
        return self.local(F.pad(x, (left, left, top, top)) if top or left else x)

    def transpose(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns the decoded images: the sum of all filters times their outputs, at their positions.

        With tied filters, this is the exact transpose of `forward` without bias.

        Args:
            y: (batch, out_maps, *out_size).
            weight: other filters to decode with, of the shape of `self.weight`.

        Returns:
            (batch, in_maps, *in_size).
        """
        y = self._checked(y, "transpose", (self.out_maps, *self.out_size))
        (top, left), (height, width) = self.padding, self.in_size
        image = self.local_transpose(y, self._padded_size(), self.decoding_weight(weight))
        return image[:, :, top : top + height, left : left + width]

    def local(self, x: Tensor) -> Tensor:
        """Returns the outputs of the filters of this rank, from images with their padding or halo."""
        y = outputs(batch_last(x), by_pixel(self.weight), self._field_grid((x.shape[2], x.shape[3])))
        if self.bias is not None:
            y = y + self.bias.unsqueeze(3)
        return in_order_of(x, y)

    def local_transpose(self, y: Tensor, size: tuple[int, int], weight: Tensor) -> Tensor:
        """Returns the transpose of `local` for images of `size`, which includes padding and halo."""
        return in_order_of(y, decoded(batch_last(y), by_pixel(weight), self._field_grid(size)))

    @torch.no_grad()
    def unit_norm_(self) -> LocalFilter2d:
        """Divides every filter, also of the decoder, by its L2 norm, and returns the layer. Zero filters stay."""
        for weight in (self.weight, self.decoder_weight):
            if weight is not None:
                unit_norm_(weight)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises filters at random with norm 1, the decoder as a copy of them, and the bias with 0."""
        # Drawn in the order of dims, not of memory, so that a seed gives the same filters for every memory format.
        self.weight.copy_(torch.empty_like(self.weight, memory_format=torch.contiguous_format).uniform_(-0.1, 0.1))
        unit_norm_(self.weight)
        if self.decoder_weight is not None:
            self.decoder_weight.copy_(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def slice_over(self, grid: Any) -> nn.Module:
        """Returns this rank's slice of the layer under halopar: the filters of its tile's outputs."""
        return TiledLocalFilter2d.of(self, grid)

    def decoding_weight(self, weight: Tensor | None) -> Tensor:
        """Returns `weight`, or by default the filters with which the layer decodes."""
        if weight is not None:
            return weight
        return self.weight if self.decoder_weight is None else self.decoder_weight

    def _padded_size(self) -> tuple[int, int]:
        return self.in_size[0] + 2 * self.padding[0], self.in_size[1] + 2 * self.padding[1]

    def _field_grid(self, size: tuple[int, int]) -> FieldGrid:
        return FieldGrid(size, self.kernel, self.stride)

    def _checked(self, x: Tensor, operation: str, expected: tuple[int, int, int]) -> Tensor:
        """Returns `x` as a whole tensor. It may be sharded: on a grid with one tile, or along maps."""
        self.check_shape(x, operation, expected)
        return gathered(x)

    def check_shape(self, x: Tensor, operation: str, expected: tuple[int, int, int]) -> None:
        """Raises an ArgumentError if the shape of `x` is not (batch, *expected)."""
        if x.dim() != 4 or tuple(x.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise ArgumentError(
                f"LocalFilter2d.{operation}: expected (batch, {shape}), got {tuple(x.shape)}. Its filters belong to "
                f"positions: for images of another size it needs another in_size (now {self.in_size}).{self._hint()}"
            )

    def _hint(self) -> str:
        """Returns a hint for the error about an image of another size."""
        return ""

    def extra_repr(self) -> str:
        text = f"{self.in_maps}, {self.out_maps}, kernel={self.kernel}, stride={self.stride}, in_size={self.in_size}"
        text += f", bias={self.bias is not None}"
        if self.padding != (0, 0):
            text += f", padding={self.padding}"
        return text if self.decoder_weight is None else text + ", tied=False"


@torch.no_grad()
def unit_norm_(weight: Tensor) -> Tensor:
    """Divides every filter of a LocalFilter2d's `weight` by its L2 norm, in place. Zero filters stay."""
    norm = torch.linalg.vector_norm(weight, dim=(3, 4, 5), keepdim=True)
    return weight.div_(norm.masked_fill_(norm == 0, 1))


def by_pixel(weight: Tensor) -> Tensor:
    """Returns a view (row, column, out_map, kernel row, kernel column, map) of a LocalFilter2d's `weight`."""
    return weight.permute(0, 1, 2, 4, 5, 3)


def from_by_pixel(filters: Tensor) -> Tensor:
    """Returns the inverse of `by_pixel`, a view."""
    return filters.permute(0, 1, 2, 5, 3, 4)


def maps_last(weight: Tensor) -> Tensor:
    """Returns a `weight` with the same values, in memory in the order of `by_pixel`, as products need it."""
    return from_by_pixel(by_pixel(weight).contiguous())


Box = tuple[slice, slice]


class TiledLocalFilter2d(SlicedModule, LocalFilter2d):
    """The filters of a LocalFilter2d for the outputs of this rank's tile.

    `forward` needs a halo exchange of the images; `transpose` adds the parts of decoded images that are in neighbours'
    tiles to these. Filters are never sent.

    Attributes:
        weight: (rows, columns, out_maps, in_maps, kernel height, kernel width) of this rank's outputs.
        array: the halo exchange.
    """

    array: GlobalArray

    @staticmethod
    def of(layer: LocalFilter2d, grid: ProcessGrid) -> TiledLocalFilter2d:
        """Returns this rank's filters of `layer`."""
        made: Any = TiledLocalFilter2d.in_place_of(layer, grid)
        windows = [
            Window(kernel, stride, (padding, padding))
            for kernel, stride, padding in zip(layer.kernel, layer.stride, layer.padding, strict=True)
        ]
        made.array = GlobalArray(grid, layer.in_size, windows, name="LocalFilter2d")
        made.sliced_parameters = dict.fromkeys(name for name, _ in layer.named_parameters(recurse=False))
        for name, value in own_parameters(layer).items():
            sliced = None if value is None else nn.Parameter(made.sliced(name, value.detach()), value.requires_grad)
            made.register_parameter(name, sliced)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sharded outputs of sharded images."""
        self.check_shape(x, "forward", (self.in_maps, *self.in_size))
        tile, layout = self._open(x, "forward")
        result = image_layout(self.grid, (tile.shape[0], self.out_maps, *self.out_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            buffer = self.fetched(tile)
            if self.weight.numel() == 0:
                return wrap(empty_with_graph(result.local_shape(), buffer, self.weight, self.bias), result)
            return wrap(_in_memory_format_of(tile, self.local(buffer)), result)

    def transpose(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns the sharded decoded images of sharded outputs."""
        self.check_shape(y, "transpose", (self.out_maps, *self.out_size))
        (tile, layout), decoder = self._open(y, "transpose"), self.decoding_weight(weight)
        result = image_layout(self.grid, (tile.shape[0], self.in_maps, *self.in_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            if decoder.numel() == 0:
                image = empty_with_graph((tile.shape[0], self.in_maps, *self.array.plan.buffer_shape), tile, decoder)
            else:
                height, width = self.array.plan.buffer_shape
                image = self.local_transpose(tile, (height, width), decoder)
            return wrap(_in_memory_format_of(tile, sum_of_halos(image, self.array.plan, self.grid.tiles)), result)

    def fetched(self, tile: Tensor) -> Tensor:
        """Returns this rank's tile of the images with its halo and padding, in memory with the batch last."""
        return halo_of(tile, self.array.plan, self.grid.tiles)

    def sliced(self, name: str, whole: Tensor) -> Tensor:
        """Returns a copy of this rank's filters from those of all positions."""
        slice_ = whole[self._boxes()[self.grid.tiles.rank]].clone()
        return slice_ if name == "bias" else maps_last(slice_)

    def gathered(self, name: str, slice_: Tensor) -> Tensor:
        """Returns the filters of all positions; every rank of `grid.tiles` must call it."""
        whole = slice_.new_empty((*self.out_size, *slice_.shape[2:]))
        for box, part in zip(self._boxes(), self.grid.tiles.allgather(slice_), strict=True):
            whole[box] = part.to(slice_.device)
        return whole

    def _is_global(self, name: str, parameter: Tensor, loaded: Tensor) -> bool:
        return tuple(loaded.shape[:2]) == self.out_size

    def _open(self, x: Tensor, operation: str) -> tuple[Tensor, Sharding]:
        """Returns this rank's tile of a ShardedTensor, and its sharding."""
        if not isinstance(x, ShardedTensor):
            refuse(
                f"LocalFilter2d.{operation} holds the filters of one tile: expected a ShardedTensor, got a whole tensor"
            )
        return local(x), x.spec

    def _hint(self) -> str:
        shape = self.in_maps, *self.in_size
        return f" If each rank passed whole images, not tiles, pass parallelize(..., input_shape={shape})."

    def _boxes(self) -> list[Box]:
        """Returns the output positions of each rank of `grid.tiles`, row by row."""
        rows, columns = (all_owned(n, p) for n, p in zip(self.out_size, self.grid.parts_of(2), strict=True))
        return [(row.as_slice(), column.as_slice()) for row in rows for column in columns]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {tuple(self.weight.shape[:2])} of {self.out_size} positions here"


def _in_memory_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Returns `y` in the memory format of `x`."""
    return in_order_of(x, batch_last(y))
