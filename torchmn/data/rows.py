"""Data sets that are tables: item i is row i of one or several tensors, so that parts travel as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torchmn.communicators import checks
from torchmn.datasets.image_set import ImageSet


@dataclass(frozen=True)
class Table:
    """How to take rows out of a data set."""

    kind: str  # names the entry of `_BUILDERS` that makes a data set of rows again
    name: str
    take: Callable[[Tensor], tuple[Tensor, ...]]


def table_of(dataset: Any) -> Table | None:
    """How to take rows of `dataset`, or None if its items may be more than rows.

    Only classes that we know: a class derived from them may compute its items in any way.
    """
    kind = type(dataset)
    if kind is Tensor and _is_rows(dataset):
        return Table("tensor", "", lambda rows: (_taken(dataset, rows),))
    if kind is np.ndarray and dataset.ndim > 0 and _torch_knows(dataset.dtype):
        return Table("array", "", lambda rows: (torch.from_numpy(dataset[rows.numpy()]),))
    if kind is TensorDataset and all(_is_rows(x) for x in dataset.tensors):
        return Table("TensorDataset", "", lambda rows: tuple(_taken(x, rows) for x in dataset.tensors))
    if kind is ImageSet and _is_rows(dataset.images) and _is_rows(dataset.labels):
        columns = (dataset.images, dataset.labels)
        return Table("ImageSet", dataset.name, lambda rows: tuple(_taken(x, rows) for x in columns))
    return None


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """These rows; x[rows] knows no float8 and no uint16 in some releases of torch, such as 2.6."""
    return x.index_select(0, rows.to(x.device))


def dataset_of_rows(kind: str, name: str, columns: Sequence[Tensor]) -> Any:
    """A data set of the same kind as the one that the rows were taken from."""
    return _BUILDERS[kind](name, columns)


_BUILDERS: dict[str, Callable[[str, Sequence[Tensor]], Any]] = {
    "tensor": lambda name, columns: columns[0],
    "array": lambda name, columns: columns[0].numpy(),
    "TensorDataset": lambda name, columns: TensorDataset(*columns),
    "ImageSet": lambda name, columns: ImageSet(name, *columns),
}


def _is_rows(x: object) -> bool:
    return isinstance(x, Tensor) and checks.tensor_problem(x) is None and x.dim() > 0


def _torch_knows(dtype: np.dtype) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True
