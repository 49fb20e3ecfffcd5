"""Local contrast normalisation: each pixel relative to the mean and the deviation of its surroundings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.errors import ArgumentError, nearest
from torchmn.geometry import Window
from torchmn.nn.pair import Size, count, odd_pair
from torchmn.nn.parts.exchange import fetch, nothing, plans_for_windows
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part, local, wrap
from torchmn.nn.plain_tensors import plain_tensors

KINDS = ("subtractive-divisive", "response")


class LocalContrastNorm2d(nn.Module):
    """Images whose local mean and contrast are evened out; as large as the input.

    kernel: the window, odd; maps: the input's maps

    kind "subtractive-divisive": with a Gaussian window g over space and all maps, of sum 1,
        v = x - g∗x  (one mean for all maps),  y = v / √(g∗v²),  and y = v where that root is at most `threshold`.
        Outside the image lie zeros.
    kind "response": per map, with d = x - the mean of the part of the window that lies in the image,
        y = x · (1 + alpha / (kernel height · width) · Σ d² over the window) ** -beta.

    The gradient is that of these formulas, nothing left out.
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
        foreign = {"threshold": threshold} if kind == "response" else {"alpha": alpha, "beta": beta}
        for name, value in foreign.items():
            if value is not None:
                raise ArgumentError(f"LocalContrastNorm2d: {name} has no meaning for kind {kind!r}: leave it out")
        self.kernel = odd_pair("LocalContrastNorm2d", "kernel", kernel)
        self.maps = count("LocalContrastNorm2d", "maps", maps)
        self.kind = kind
        self.alpha = 1.0 if alpha is None else float(alpha)
        self.beta = 0.75 if beta is None else float(beta)
        self.threshold = 0.0 if threshold is None else float(threshold)
        window = None
        if kind == "subtractive-divisive":
            window = gaussian_window(self.kernel, self.maps).to(device, dtype or torch.get_default_dtype())
        # Not in the state dict: it follows from the arguments.
        self.register_buffer("gaussian", window, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images, from x: (batch, maps, height, width)."""
        if x.dim() != 4 or x.shape[1] != self.maps:
            raise ArgumentError(
                f"LocalContrastNorm2d: expected (batch, {self.maps}, height, width), got {tuple(x.shape)}"
            )
        if self.gaussian is None:
            return self._responses(x)
        if isinstance(x, Part) and not x.layout_.is_tile:
            x = whole(x)  # its maps are cut
        if isinstance(x, Part):
            with plain_tensors():
                return wrap(self._subtract_and_divide(local(x), partial(self._blurred_part, x.layout_)), x.layout_)
        return self._subtract_and_divide(x, self._blurred)

    def _subtract_and_divide(self, x: Tensor, blurred: Callable[[Tensor], Tensor]) -> Tensor:
        # The window is the same for all maps: summed first, there is one map to blur, and one whose halo travels.
        centred = x - blurred(x.sum(1, keepdim=True))
        variance = blurred((centred * centred).sum(1, keepdim=True))
        flat = variance <= self.threshold**2
        return centred * torch.rsqrt(torch.where(flat, 1.0, variance))

    def _blurred(self, total: Tensor) -> Tensor:
        """The Gaussian mean around each pixel of one map: (batch, 1, height, width), as large as `total`."""
        return F.conv2d(total, self._gaussian(), padding=self._middle())

    def _blurred_part(self, layout: Layout, total: Tensor) -> Tensor:
        """This rank's part of it, from its part of `total`, the sum over maps of an image with `layout`."""
        one_map = layout.with_dims((layout.shape[0], 1, *layout.shape[2:]), layout.cuts)
        windows = [Window(kernel, padding=(kernel // 2, kernel // 2)) for kernel in self.kernel]
        buffer = fetch(wrap(total, one_map), plans_for_windows(one_map, windows))
        if 0 in total.shape:
            return nothing(total.shape, buffer)
        return F.conv2d(buffer, self._gaussian())

    def _gaussian(self) -> Tensor:
        assert self.gaussian is not None
        return self.gaussian

    def _responses(self, x: Tensor) -> Tensor:
        middle = self._middle()
        distance = x - F.avg_pool2d(x, self.kernel, 1, middle, count_include_pad=False)
        # With the padding counted, the mean is the sum over the window divided by the kernel's area.
        contrast = F.avg_pool2d(distance * distance, self.kernel, 1, middle)
        return x * (1.0 + self.alpha * contrast) ** -self.beta

    def _middle(self) -> tuple[int, int]:
        return self.kernel[0] // 2, self.kernel[1] // 2

    def extra_repr(self) -> str:
        text = f"kernel={self.kernel}, maps={self.maps}, kind={self.kind!r}"
        if self.kind == "response":
            return text + f", alpha={self.alpha:g}, beta={self.beta:g}"
        return text + (f", threshold={self.threshold:g}" if self.threshold else "")


def gaussian_window(kernel: tuple[int, int], maps: int) -> Tensor:
    """A round Gaussian for the sum of `maps` maps: (1, 1, height, width), float64, of sum 1 over window and maps.

    Its deviation is a third of the distance from the middle to a corner: 0.471 for 3 x 3.
    """
    half_height, half_width = kernel[0] // 2, kernel[1] // 2
    deviation = math.hypot(half_height, half_width) / 3 or 1.0
    y = torch.arange(-half_height, half_height + 1, dtype=torch.float64)
    x = torch.arange(-half_width, half_width + 1, dtype=torch.float64)
    window = torch.exp(-(y[:, None] ** 2 + x**2) / (2 * deviation**2))
    return (window / (window.sum() * maps)).view(1, 1, *kernel)
