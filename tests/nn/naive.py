"""The formulas of the layers as plain loops, for comparison."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor


def places(*extents: int) -> product:
    return product(*map(range, extents))


def padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    (batch, maps, height, width), (top, left) = x.shape, padding
    out = x.new_zeros(batch, maps, height + 2 * top, width + 2 * left)
    out[:, :, top : top + height, left : left + width] = x
    return out


def windows_along(extent: int, kernel: int, stride: int) -> list[int]:
    """Where the windows begin."""
    return list(range(0, extent - kernel + 1, stride))


def local_filter(x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding) -> Tensor:
    x = padded(x, padding)
    rows, columns, maps, _, kernel_height, kernel_width = weight.shape
    y = x.new_zeros(x.shape[0], maps, rows, columns)
    for b, k, r, q in places(*y.shape):
        top, left = r * stride[0], q * stride[1]
        field = x[b, :, top : top + kernel_height, left : left + kernel_width]
        y[b, k, r, q] = (weight[r, q, k] * field).sum() + (0 if bias is None else bias[r, q, k])
    return y


def local_filter_transpose(y: Tensor, weight: Tensor, stride, padding, in_size) -> Tensor:
    (top, left), (height, width) = padding, in_size
    _, _, _, in_maps, kernel_height, kernel_width = weight.shape
    x = y.new_zeros(y.shape[0], in_maps, height + 2 * top, width + 2 * left)
    for b, k, r, q in places(*y.shape):
        row, column = r * stride[0], q * stride[1]
        x[b, :, row : row + kernel_height, column : column + kernel_width] += y[b, k, r, q] * weight[r, q, k]
    return x[:, :, top : top + height, left : left + width]


def l2_pool(x: Tensor, kernel, stride, eps: float, padding) -> Tensor:
    x = padded(x, padding)
    rows, columns = (windows_along(x.shape[2 + d], kernel[d], stride[d]) for d in range(2))
    y = x.new_zeros(*x.shape[:2], len(rows), len(columns))
    for b, c, i, j in places(*y.shape):
        window = x[b, c, rows[i] : rows[i] + kernel[0], columns[j] : columns[j] + kernel[1]]
        y[b, c, i, j] = math.sqrt(eps + sum(value * value for value in window.flatten().tolist()))
    return y


def gaussian(kernel, maps: int) -> dict[tuple[int, int], float]:
    """The window's weight at each distance (dy, dx) from the middle."""
    half = kernel[0] // 2, kernel[1] // 2
    deviation = math.sqrt(half[0] ** 2 + half[1] ** 2) / 3
    weights = {
        (dy, dx): math.exp(-(dy**2 + dx**2) / (2 * deviation**2)) if deviation else 1.0
        for dy in range(-half[0], half[0] + 1)
        for dx in range(-half[1], half[1] + 1)
    }
    total = maps * sum(weights.values())
    return {place: weight / total for place, weight in weights.items()}


def weighted_sums(x: Tensor, weights: dict[tuple[int, int], float]) -> Tensor:
    """One map: at each pixel the weighted sum over the window and all maps."""
    batch, _, height, width = x.shape
    out = x.new_zeros(batch, 1, height, width)
    for b, r, q in places(batch, height, width):
        for (dy, dx), weight in weights.items():
            if 0 <= r + dy < height and 0 <= q + dx < width:
                out[b, 0, r, q] += weight * x[b, :, r + dy, q + dx].sum()
    return out


def subtractive_divisive(x: Tensor, kernel, threshold: float = 0.0) -> Tensor:
    weights = gaussian(kernel, x.shape[1])
    centred = x - weighted_sums(x, weights)
    deviation = weighted_sums(centred**2, weights).sqrt()
    deviation[deviation <= threshold] = 1
    return centred / deviation


def contrast_response(x: Tensor, kernel, alpha: float, beta: float) -> Tensor:
    half = kernel[0] // 2, kernel[1] // 2
    distance, y = torch.empty_like(x), torch.empty_like(x)

    def window(r: int, q: int) -> tuple[slice, slice]:
        first, left = r - half[0], q - half[1]
        return slice(max(0, first), first + kernel[0]), slice(max(0, left), left + kernel[1])

    for b, c, r, q in places(*x.shape):
        distance[b, c, r, q] = x[b, c, r, q] - x[b, c][window(r, q)].mean()
    for b, c, r, q in places(*x.shape):
        contrast = (distance[b, c][window(r, q)] ** 2).sum() / (kernel[0] * kernel[1])
        y[b, c, r, q] = x[b, c, r, q] * (1 + alpha * contrast) ** -beta
    return y


def cross_map_response(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    y = torch.empty_like(x)
    for b, c, r, q in places(*x.shape):
        first = max(0, c - size // 2)
        squares = (x[b, first : c + (size - 1) // 2 + 1, r, q] ** 2).sum()
        y[b, c, r, q] = x[b, c, r, q] / (1 + alpha / size * squares) ** beta
    return y
