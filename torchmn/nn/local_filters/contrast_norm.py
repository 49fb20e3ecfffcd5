"""LocalContrastNorm2d: local contrast normalisation, by the mean and the deviation around each pixel."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn._torch_compat import DisableTorchFunction
from torchmn.errors import ArgumentError, nearest
from torchmn.geometry import Interval
from torchmn.nn.local_filters.contrast_region import Normalisation, normalised
from torchmn.nn.local_filters.image_sizes import Size, count, odd_pair, pair
from torchmn.sharded.redistribute import whole
from torchmn.sharded.tensor import ShardedTensor
from torchmn.sharded.windows import plan_needs, windowed

KINDS = ("subtractive-divisive", "response")


class LocalContrastNorm2d(nn.Module):
    """Normalises the local mean and contrast of images; the output has the size of the input.

    kind "subtractive-divisive": with a Gaussian window g over space and all maps, of sum 1,
        v = x - g∗x  (one mean for all maps),  y = v / √(g∗v²),  and y = v where that root is at most `threshold`.
        Beyond the image are zeros.
    kind "response": per map, with d = x - the mean of the pixels of the window that are inside the image,
        y = x · (1 + alpha / (kernel height · width) · Σ d² over the window) ** -beta.

    Gradients are exact.

    Args:
        kernel: size of the window. Odd, except for "response", where the window begins kernel // 2 pixels before one.
        maps: number of maps of the input.
        kind: "subtractive-divisive" or "response".
        alpha: only for "response"; 1.0 by default.
        beta: only for "response"; 0.75 by default.
        threshold: only for "subtractive-divisive"; 0.0 by default.
        device: of the window.
        dtype: of the window.

    Raises:
        ArgumentError: if an argument is wrong or does not belong to `kind`.
    """

    gaussian: Tensor | None

    def __init__(
        self,
        kernel: Size,
        maps: int,
        kind: str = "subtractive-divisive",
        *,
        alpha: float | None = None,
        beta: float | None = None,
        threshold: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ArgumentError(f"LocalContrastNorm2d: kind {kind!r} does not exist. {nearest(kind, KINDS)}")
        not_allowed = {"threshold": threshold} if kind == "response" else {"alpha": alpha, "beta": beta}
        for name, value in not_allowed.items():
            if value is not None:
                raise ArgumentError(f"LocalContrastNorm2d: {name} has no meaning for kind {kind!r}: leave it out")
        check = pair if kind == "response" else odd_pair
        self.kernel = check("LocalContrastNorm2d", "kernel", kernel)
        self.maps = count("LocalContrastNorm2d", "maps", maps)
        self.kind = kind
        self.alpha = 1.0 if alpha is None else float(alpha)
        self.beta = 0.75 if beta is None else float(beta)
        self.threshold = 0.0 if threshold is None else float(threshold)
        window = None
        if kind == "subtractive-divisive":
            window = gaussian_window(self.kernel, self.maps)
            # A two-dimensional Gaussian is the product of one along height and one along width.
            rows, columns = window[0, 0].sum(1), window[0, 0].sum(0)
            self._weights = tuple(rows.tolist()), tuple((columns / columns.sum()).tolist())
            window = window.to(device, dtype or torch.get_default_dtype())
        # Not in the state dict, since the arguments determine it.
        self.register_buffer("gaussian", window, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised images, of the shape of x: (batch, maps, height, width)."""
        if x.dim() != 4 or x.shape[1] != self.maps:
            raise ArgumentError(
                f"LocalContrastNorm2d: expected (batch, {self.maps}, height, width), got {tuple(x.shape)}"
            )
        if self.gaussian is None:
            return self._responses(x)
        if isinstance(x, ShardedTensor) and not x.spec.is_tile:
            x = whole(x)  # maps are cut
        if isinstance(x, ShardedTensor):
            with DisableTorchFunction():
                return self._normalised_tile(x)
        size = x.shape[2], x.shape[3]
        return normalised(x, self.region(size, (Interval(0, size[0]), Interval(0, size[1]))))

    def region(self, size: tuple[int, int], outputs: tuple[Interval, Interval]) -> Normalisation:
        """Returns the region of an image of `size` from which a box of the normalised image is computed."""
        return Normalisation.of(size, outputs, self._weights, self.threshold)

    def _normalised_tile(self, x: ShardedTensor) -> ShardedTensor:
        """Returns this rank's tile, with one exchange of a halo that is wide enough for mean and variance."""
        layout = x.spec
        size = layout.shape[2], layout.shape[3]
        reach = [2 * (kernel // 2) for kernel in self.kernel]

        def needed(dim: int, outputs: Interval) -> Interval:
            return Interval(max(0, outputs.start - reach[dim]), min(size[dim], outputs.stop + reach[dim]))

        region = self.region(size, (layout.interval(2), layout.interval(3)))
        return windowed(x, plan_needs(layout, size, needed), lambda tile: normalised(tile, region))

    def _responses(self, x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor) and not all(extent % 2 for extent in self.kernel):
            x = whole(x)  # tiles cannot drop the outputs after the last pixel
        distance = x - self._means(x, of_image=True)
        # Including padding, the mean is the sum over the window divided by the area of the kernel.
        contrast = self._means(distance * distance, of_image=False)
        return x * (1.0 + self.alpha * contrast) ** -self.beta

    def _means(self, x: Tensor, of_image: bool) -> Tensor:
        """Returns the mean over the window of each pixel, of its part inside the image or with zeros beyond it."""
        middle = self.kernel[0] // 2, self.kernel[1] // 2
        means = F.avg_pool2d(x, self.kernel, 1, middle, count_include_pad=not of_image)
        return means if means.shape == x.shape else means[..., : x.shape[2], : x.shape[3]]

    def extra_repr(self) -> str:
        text = f"kernel={self.kernel}, maps={self.maps}, kind={self.kind!r}"
        if self.kind == "response":
            return text + f", alpha={self.alpha:g}, beta={self.beta:g}"
        return text + (f", threshold={self.threshold:g}" if self.threshold else "")


def gaussian_window(kernel: tuple[int, int], maps: int) -> Tensor:
    """Returns a Gaussian window for the sum of `maps` maps: (1, 1, height, width), float64, of sum 1 / maps.

    Its standard deviation is a third of the distance from the centre to a corner: 0.471 for 3 x 3.
    """
    half_height, half_width = kernel[0] // 2, kernel[1] // 2
    deviation = math.hypot(half_height, half_width) / 3 or 1.0
    y = torch.arange(-half_height, half_height + 1, dtype=torch.float64)
    x = torch.arange(-half_width, half_width + 1, dtype=torch.float64)
    window = torch.exp(-(y[:, None] ** 2 + x**2) / (2 * deviation**2))
    return (window / (window.sum() * maps)).view(1, 1, *kernel)
