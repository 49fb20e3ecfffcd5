"""StateCopy: the tensors of a state, copied to one buffer on the CPU, from which they are written later."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# At least the itemsize of every dtype.
_ALIGNMENT = 16


Layout = tuple[list[str], list[torch.dtype], list[tuple[int, ...]]]
"""Paths, dtypes and shapes of tensors."""


class Place(NamedTuple):
    """Where a tensor is in the buffer of a copy: bytes `start` to `stop`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class StateCopy:
    """Copies of tensors, contiguous and without gaps. Each `take` overwrites the previous copies in the same memory.

    Tensors are ordered by the power of two that divides their size in bytes, the largest first. So each begins at a
    multiple of its itemsize, also in files that contain only some of them in this order.

    Attributes:
        places: of the tensors, by path, in the order of the buffer.
        memory: the buffer, as bytes.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.memory = np.empty(0, np.uint8)
        self._layout: Layout = ([], [], [])
        self._views: list[Tensor] = []

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors, from any device; they may change afterwards."""
        layout = ([*tensors], [x.dtype for x in tensors.values()], [tuple(x.shape) for x in tensors.values()])
        if layout != self._layout:
            self._arrange(layout)
        with torch.no_grad():
            for view, x in zip(self._views, tensors.values(), strict=True):
                view.copy_(x)

    def bytes_of(self, place: Place) -> np.ndarray:
        """Returns the bytes of a tensor."""
        return self.memory[place.start : place.stop]

    def _arrange(self, layout: Layout) -> None:
        tensors = list(zip(*layout, strict=True))
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
        order = sorted(range(len(sizes)), key=lambda number: -gcd(sizes[number], _ALIGNMENT))
        self.places, start = {}, 0
        for number in order:
            path, dtype, shape = tensors[number]
            self.places[path] = Place(dtype, shape, start, start + sizes[number])
            start += sizes[number]
        if start != self.memory.size:
            self.memory, self._views = np.empty(0, np.uint8), []  # frees the old buffer before there is a new one
            self.memory = torch.empty(start, dtype=torch.uint8).numpy()  # aligned, unlike NumPy's
        buffer = torch.from_numpy(self.memory)
        self._views = [_view(buffer, self.places[path]) for path in layout[0]]
        self._layout = layout


def _view(buffer: Tensor, place: Place) -> Tensor:
    if place.start == place.stop:
        return torch.empty(place.shape, dtype=place.dtype)
    return buffer[place.start : place.stop].view(place.dtype).view(place.shape)
